from types import SimpleNamespace

import pytest
import torch

from diffusion import EDMPrecond
from routing import Routing
from tests.networks import PAPER, small_dit
from training import speed
from training.speed import (
    NOISY,
    SLOW,
    SpeedCheck,
    describe_check,
    fp32_slowdown,
    micro_loss,
    speedup,
)

BUSY = [6.4, 6.4, 2.0, 9.0, 1.5, 6.4, 6.4, 6.4]
CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """A clock that only steps move."""
    now = [0.0]
    monkeypatch.setattr("training.speed.time.perf_counter", lambda: now[0])
    return now


def check(clock, dense_sec, routed_sec, predicted):
    """Run a check on steps that move the clock; return the record and the printed lines.

    Args:
        routed_sec: durations of the routed steps; the last one repeats.
    """
    reported, shown, left = {}, [], list(routed_sec)

    def losses(ratios):
        clock[0] += (left.pop(0) if len(left) > 1 else left[0]) if ratios[0] else dense_sec
        return torch.zeros(2, requires_grad=True)

    recorder = SimpleNamespace(note=reported.update, show=shown.append)
    SpeedCheck(losses, EDMPrecond(torch.nn.Identity()), lambda ratios: predicted, CPU, recorder)((0.5,))
    return reported.get("speed_check"), shown


def test_a_check_is_announced_and_reports_its_range(clock, monkeypatch):
    monkeypatch.setattr(speed, "REPEATS", 7)
    # The first pass is not timed. The range leaves out the extremes.
    seconds = [99.0, 2.0, 2.0, 1.5, 1.0, 3.0, 1.8, 1.7]
    reported, shown = check(clock, 3.0, seconds, predicted=1.5)
    assert reported["ratios"] == [0.5] and reported["predicted_speedup"] == 1.5
    assert reported["measured_speedup"] == pytest.approx(3 / 1.8)
    assert reported["range"] == pytest.approx([1.5, 2.0])
    assert shown[0].startswith("timing 8 dense and 8 routed passes") and "train.check_speed=false" in shown[0]


@pytest.mark.parametrize(
    ("seconds", "verdict", "text"),
    [
        ([2.0], "", "1.50x as fast as a dense one (repeats: 1.50x to 1.50x; predicted: 1.50x)"),
        ([2.49], "", "1.20x as fast as a dense one"),
        ([2.51], SLOW, f"; {SLOW}"),
        # A single stall is not noise.
        ([2.0] * 4 + [40.0, 2.0], "", "(repeats: 1.50x to 1.50x"),
        # A busy machine.
        (BUSY, NOISY, f"(repeats: 0.47x to 1.50x; predicted: 1.50x); {NOISY}"),
    ],
)
def test_a_check_tells_slow_routes_from_a_busy_machine(clock, monkeypatch, seconds, verdict, text):
    monkeypatch.setattr(speed, "REPEATS", 7)
    reported, shown = check(clock, 3.0, seconds, predicted=1.5)
    assert reported["verdict"] == verdict
    assert text in shown[1] and shown[1].endswith(describe_check(reported))
    assert len(shown) == 2


def test_a_dense_step_that_does_not_fit_is_reported_and_leaves_no_gradients():
    net, shown = small_dit([PAPER]), []

    def loss(precond, x, labels, *, generator, routing):
        precond.net.x_embedder(x).sum().backward()
        raise torch.OutOfMemoryError("no")

    precond = EDMPrecond(net)
    recorder = SimpleNamespace(show=shown.append)

    def losses(ratios):
        return micro_loss(precond, net, loss, 2, CPU, Routing(ratios))

    SpeedCheck(losses, precond, lambda ratios: 1.5, CPU, recorder)((0.5,))
    assert "was not measured" in shown[-1]
    assert all(parameter.grad is None for parameter in net.parameters())


def test_speed_is_not_measured_without_bypassed_tokens(clock):
    assert check(clock, 1, [1], predicted=1) == (None, [])


def test_the_fp32_slowdown_is_measured_with_matrix_products(clock, monkeypatch):
    """It is 1 without bf16 autocast, routes, or a block in fp32 after them."""
    torch_matmul, seconds = torch.Tensor.__matmul__, {torch.float32: 5.0, torch.bfloat16: 2.0}

    def matmul(a, b):
        clock[0] += seconds[a.dtype]
        return torch_matmul(a, b)

    monkeypatch.setattr("training.speed.PRODUCT_SIZES", {"cpu": 8})
    monkeypatch.setattr(torch.Tensor, "__matmul__", matmul)
    net = small_dit([PAPER], fp32_after_route=True)
    assert fp32_slowdown(net, CPU, bf16=True) == 2.5
    assert fp32_slowdown(net, CPU, bf16=False) == 1
    assert fp32_slowdown(small_dit([PAPER]), CPU, bf16=True) == 1
    assert fp32_slowdown(small_dit(fp32_after_route=True), CPU, bf16=True) == 1


def test_a_speed_up_is_the_median_of_paired_ratios():
    """A machine that becomes slower does not change it."""
    assert speedup([2, 4, 40, 80, 100], [1, 2, 20, 40, 1]) == 2
