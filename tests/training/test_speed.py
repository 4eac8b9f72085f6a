import torch

from tests.networks import PAPER, small_dit
from training.speed import fp32_slowdown, speedup

CPU = torch.device("cpu")


def test_the_fp32_slowdown_is_measured_with_matrix_products(monkeypatch):
    """It is 1 without bf16 autocast, routes, or a block in fp32 after them."""
    torch_matmul, seconds = torch.Tensor.__matmul__, {torch.float32: 5.0, torch.bfloat16: 2.0}
    now = [0.0]

    def matmul(a, b):
        now[0] += seconds[a.dtype]
        return torch_matmul(a, b)

    monkeypatch.setattr("training.speed.time.perf_counter", lambda: now[0])
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
