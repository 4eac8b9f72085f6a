import time

import pytest
import torch

from tests.networks import PAPER, small_dit
from training.speed import SpeedCheck, interleaved_seconds, speedup

CPU = torch.device("cpu")


def check(dense_sec, routed_sec, predicted, **options):
    """Run a check on steps that sleep; return what was reported and shown."""
    net, reported, shown = small_dit([PAPER], **options), {}, []
    SpeedCheck(
        step=lambda ratios: time.sleep(routed_sec if ratios[0] else dense_sec),
        predict=lambda ratios: predicted,
        net=net,
        device=CPU,
        compiled=False,
        report=reported.update,
        show=shown.append,
    )((0.5,))
    return reported, shown


def test_a_speed_up_as_predicted_is_told_and_no_more():
    reported, shown = check(0.03, 0.02, predicted=1.5)
    assert reported["measured_speedup"] == pytest.approx(1.5, rel=0.15)
    assert reported["predicted_speedup"] == 1.5
    assert len(shown) == 1
    assert "1.50x in FLOPs" in shown[0]


def test_a_speed_up_far_below_the_predicted_one_names_the_likely_causes():
    _, shown = check(0.02, 0.02, predicted=1.5, gradient_checkpointing=True)
    assert len(shown) == 2
    for cause in ("a short window (3 of 8 blocks)", "gradient checkpointing", "uncompiled blocks", "hidden_size=32"):
        assert cause in shown[1]


def test_where_nothing_bypasses_nothing_is_measured():
    assert check(0, 0, predicted=1) == ({}, [])


def test_functions_take_turns_after_a_warm_up():
    calls = []
    seconds = interleaved_seconds({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, CPU, repeats=2)
    assert calls == ["a", "b"] * 3
    assert [len(times) for times in seconds.values()] == [2, 2]


def test_a_speed_up_is_the_median_of_the_ratios_of_neighbours():
    """A machine that slows down on the way does not change it."""
    assert speedup([2, 4, 40, 80, 100], [1, 2, 20, 40, 1]) == 2
