from types import SimpleNamespace

import pytest
import torch

from diffusion import EDMPrecond
from routing import Routing
from runtime.launch import ALONE
from runtime.machine import start_process
from tests.networks import PAPER, small_dit
from training.speed import SpeedCheck, fp32_slowdown, interleaved_seconds, micro_loss, micro_step, speedup

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until a step moves it."""
    now = [0.0]
    monkeypatch.setattr("training.speed.time.perf_counter", lambda: now[0])
    return now


def check(clock, dense_sec, routed_sec, predicted):
    """Run a check on steps that move the clock; return what was reported and shown."""
    reported, shown = {}, []

    def step(ratios):
        clock[0] += routed_sec if ratios[0] else dense_sec

    recorder = SimpleNamespace(note=reported.update, show=shown.append, launch=ALONE)
    SpeedCheck(step, lambda ratios: predicted, CPU, recorder)((0.5,))
    return reported, shown


def test_a_speed_up_as_predicted_is_one_line(clock):
    reported, shown = check(clock, 3.0, 2.0, predicted=1.5)
    assert reported["speed_check"]["measured_speedup"] == pytest.approx(1.5)
    assert reported["speed_check"]["predicted_speedup"] == 1.5
    assert reported["speed_check"]["ratios"] == [0.5]
    assert len(shown) == 1
    assert "1.50x by FLOPs" in shown[0]


@pytest.mark.parametrize(("routed_sec", "lines"), [(2.49, 1), (2.51, 2)])
def test_the_limit_is_eighty_percent_of_the_predicted_speed_up(clock, routed_sec, lines):
    shown = check(clock, 3.0, routed_sec, predicted=1.5)[1]
    assert len(shown) == lines
    assert (lines == 1) or "python -m benchmarks.advise" in shown[1]


def test_a_dense_step_that_does_not_fit_is_reported_and_harms_nothing():
    net, shown = small_dit([PAPER]), []

    def loss(precond, x, labels, *, generator, routing):
        precond.net.x_embedder(x).sum().backward()
        raise torch.OutOfMemoryError("no")

    precond = EDMPrecond(net)
    step = micro_step(micro_loss(precond, net, loss, 2, CPU, Routing), precond, net)
    SpeedCheck(step, lambda ratios: 1.5, CPU, SimpleNamespace(show=shown.append, launch=ALONE))((0.5,))
    assert "was not measured" in shown[0]
    assert all(parameter.grad is None for parameter in net.parameters())


def test_where_nothing_bypasses_nothing_is_measured(clock):
    assert check(clock, 1, 1, predicted=1) == ({}, [])


def test_the_slowdown_outside_autocast_is_that_of_products(clock, monkeypatch):
    """Only where there is such a block: bf16 autocast, routes, and fp32 after them."""
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_multiplies_faster_under_autocast():
    start_process()
    net = small_dit([PAPER], fp32_after_route=True).cuda()
    assert fp32_slowdown(net, torch.device("cuda"), bf16=True) > 1


def test_functions_take_turns_after_a_warm_up():
    calls = []
    seconds = interleaved_seconds(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, CPU, repeats=2
    )
    assert calls == ["a", "b"] * 3
    assert [len(times) for times in seconds.values()] == [2, 2]


def test_a_speed_up_is_the_median_of_paired_ratios():
    """A machine that slows down on the way does not change it."""
    assert speedup([2, 4, 40, 80, 100], [1, 2, 20, 40, 1]) == 2
