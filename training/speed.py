"""Measure the duration of steps and of matrix products."""

import time
from collections.abc import Callable, Sequence
from functools import cache
from statistics import median
from typing import Any

import torch

REPEATS = 7
PEAK_FLOPS = {  # bf16, dense, from NVIDIA's specifications
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
}
PRODUCT_SIZES = {"cuda": 8192, "cpu": 1536}  # side of square matrices that keep a device busy


def seconds_of(function: Callable[[], Any], device: torch.device) -> float:
    """Time a call until the device has finished, in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize()  # SYNC: wait for the device
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()  # SYNC: wait for the device
    return time.perf_counter() - start


def speedup(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Return the median over repeats of the ratio of times."""
    return median(a / b for a, b in zip(slow, fast, strict=True))


def fp32_slowdown(net: Any, device: torch.device, bf16: bool) -> float:
    """Return the time of a matrix product in fp32 (TF32 on CUDA) over its time in bf16; 1 if training does
    not use bf16 autocast, or if no block of the network runs outside autocast.
    """
    if not (bf16 and net.flops([1] * len(net.routes)).fp32_training):
        return 1.0
    dtypes, size = (torch.bfloat16, torch.float32), PRODUCT_SIZES[device.type]
    bf16_flops, fp32_flops = (product_flops_per_sec(device, dtype, size, REPEATS) for dtype in dtypes)
    return bf16_flops / fp32_flops


@cache
def product_flops_per_sec(device: torch.device, dtype: torch.dtype, size: int, repeats: int) -> float:
    """Return the FLOPs per second of the fastest of several matrix products; measured once per process."""
    generator = torch.Generator(device).manual_seed(0)  # leaves the run's random state alone
    a, b = torch.randn(2, size, size, generator=generator, device=device).to(dtype)
    return 2 * size**3 / min(seconds_of(lambda: a @ b, device) for _ in range(repeats + 1))


def specified_peak(device: torch.device, bf16: bool) -> float | None:
    """Return a device's specified FLOPs per second in bf16; None if unknown."""
    return PEAK_FLOPS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" and bf16 else None


def most_graphs(num_lengths: int) -> int:
    """Return a limit on compiled graphs: two per length, because a block may also run in fp32, and 4 more."""
    return 2 * num_lengths + 4
