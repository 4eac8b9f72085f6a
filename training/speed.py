"""Measure the duration of steps, and compare the speed-up of routes with the one predicted by FLOPs."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import median
from typing import Any

import torch
import torch.nn as nn

from training.recorder import Recorder
from training.sharding import no_sync

MIN_SHARE = 0.8  # fraction of the predicted speed-up below which routes count as slow
REPEATS = 7
MAX_SPREAD = 1.3  # largest over smallest speed-up of the repeats, without the extremes; above it: noise
SWITCH_OFF = "(train.check_speed=false turns this off)"
SLOW, NOISY = "less than the FLOPs predict", "too noisy to tell: is this machine busy?"
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


def interleaved_seconds(
    functions: Mapping[Any, Callable[[], Any]], device: torch.device, repeats: int
) -> dict[Any, list[float]]:
    """Time functions in turns, after a warm-up call each, so that a busy machine slows all of them."""
    times = {name: [] for name in functions}
    for repeat in range(repeats + 1):
        for name, function in functions.items():
            sec = seconds_of(function, device)
            if repeat:
                times[name].append(sec)
    return times


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
    (seconds,) = interleaved_seconds({"product": lambda: a @ b}, device, repeats).values()
    return 2 * size**3 / min(seconds)


def specified_peak(device: torch.device, bf16: bool) -> float | None:
    """Return a device's specified FLOPs per second in bf16; None if unknown."""
    return PEAK_FLOPS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" and bf16 else None


def micro_loss(
    precond: nn.Module,
    net: Any,
    loss: Callable[..., torch.Tensor],
    num_samples: int,
    device: torch.device,
    routing: Any,
) -> torch.Tensor:
    """Return the losses (N,) of a micro-batch of zeros."""
    x = torch.zeros(num_samples, *net.latent_shape, device=device)
    generator = torch.Generator(device).manual_seed(0)
    return loss(precond, x, net.null_labels(num_samples), generator=generator, routing=routing)


def most_graphs(num_lengths: int) -> int:
    """Return the largest number of compiled graphs: one per length, and another if a block runs in fp32."""
    return 2 * num_lengths + 4


@dataclass(eq=False, repr=False)
class SpeedCheck:
    """Compare the speed-up of the routes with what the cost model predicts.

    Args:
        losses: losses(ratios) returns the losses of a micro-batch at these ratios of the routes.
        predict: predict(ratios) returns the speed-up that the cost model predicts.
    """

    losses: Callable[[tuple[float, ...]], torch.Tensor]
    precond: nn.Module
    predict: Callable[[tuple[float, ...]], float]
    device: torch.device
    recorder: Recorder

    def __call__(self, ratios: tuple[float, ...]) -> None:
        """Measure the speed-up at `ratios`, record it and show it."""
        predicted = self.predict(ratios)
        if predicted == 1:
            return
        passes = f"{REPEATS + 1} dense and {REPEATS + 1} routed passes"
        self.recorder.show(f"timing {passes} to compare the speed-up with the FLOPs {SWITCH_OFF}")
        steps = {"dense": partial(self._step, (0.0,) * len(ratios)), "routed": partial(self._step, ratios)}
        try:
            seconds = interleaved_seconds(steps, self.device, REPEATS)
        except torch.OutOfMemoryError:
            reason = "a dense step does not fit into memory at this train.micro_batch_size"
            self.recorder.show(f"the speed-up was not measured: {reason}")
            return
        speedups = sorted(a / b for a, b in zip(seconds["dense"], seconds["routed"], strict=True))
        kept = speedups[1:-1] or speedups  # without the extremes: a single stall is not noise
        low, high = kept[0], kept[-1]
        verdict = SLOW if high < MIN_SHARE * predicted else ""
        record = {"ratios": list(ratios), "predicted_speedup": predicted}
        record |= {"measured_speedup": median(speedups), "range": [low, high]}
        record["verdict"] = NOISY if high > MAX_SPREAD * low else verdict
        self.recorder.note({"speed_check": record})
        at = ", ".join(f"{ratio:g}" for ratio in ratios)
        self.recorder.show(f"a forward and backward pass at ratio {at}: {describe_check(record)}")

    def _step(self, ratios: tuple[float, ...]) -> None:
        """Run forward and backward on a micro-batch, then clear the gradients."""
        try:
            with no_sync(self.precond.net):
                self.losses(ratios).mean().backward()
        finally:
            self.precond.zero_grad()


def describe_check(record: Mapping[str, Any]) -> str:
    """Describe the record of a speed check."""
    low, high = record["range"]
    repeats, predicted = f"{low:.2f}x to {high:.2f}x", f"predicted: {record['predicted_speedup']:.2f}x"
    text = f"{record['measured_speedup']:.2f}x as fast as a dense one (repeats: {repeats}; {predicted})"
    return f"{text}; {record['verdict']}" if record["verdict"] else text
