"""How long steps take, and whether routes save what their FLOPs promise."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from statistics import median
from typing import Any

import torch
import torch.nn as nn

from training.recorder import Recorder

MIN_SHARE = 0.8  # of the predicted speed-up
REPEATS = 7
MAX_SPREAD = 1.3  # of repeats, the largest over the smallest without the extremes: beyond it, noise
SWITCH_OFF = "(train.check_speed=false: never)"
SLOW, NOISY = "less than the FLOPs promise", "too noisy to tell: is this machine busy?"
PEAK_FLOPS = {  # bf16, dense, as NVIDIA specifies them
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
}
PRODUCT_SIZES = {"cuda": 8192, "cpu": 1536}  # sides of matrices that keep a device busy


def interleaved_seconds(
    functions: Mapping[Any, Callable[[], Any]], device: torch.device, repeats: int
) -> dict[Any, list[float]]:
    """Time functions after one call to warm up, in turns: a busy machine slows all of them."""
    times = {name: [] for name in functions}
    for repeat in range(repeats + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if device.type == "cuda":
                torch.cuda.synchronize()  # SYNC: a function has ended when the device has
            if repeat:
                times[name].append(time.perf_counter() - start)
    return times


def speedup(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Median over repeats of the ratio of times."""
    return median(a / b for a, b in zip(slow, fast, strict=True))


def fp32_slowdown(net: Any, device: torch.device, bf16: bool) -> float:
    """Time of a matrix product outside bf16 autocast (on CUDA in TF32) over its time under it; 1 where no
    block of the network runs outside.
    """
    if not (bf16 and net.flops([1] * len(net.routes)).fp32_training):
        return 1.0
    dtypes, size = (torch.bfloat16, torch.float32), PRODUCT_SIZES[device.type]
    inside, outside = (product_flops_per_sec(device, dtype, size, REPEATS) for dtype in dtypes)
    return inside / outside


@cache
def product_flops_per_sec(device: torch.device, dtype: torch.dtype, size: int, repeats: int) -> float:
    """FLOPs per second of matrix products, the best of several; measured once in a process."""
    generator = torch.Generator(device).manual_seed(0)  # the run's own draws stay as they are
    a, b = torch.randn(2, size, size, generator=generator, device=device).to(dtype)
    (seconds,) = interleaved_seconds({"product": lambda: a @ b}, device, repeats).values()
    return 2 * size**3 / min(seconds)


def specified_peak(device: torch.device, bf16: bool) -> float | None:
    """FLOPs per second that a device is specified for in bf16; None where unknown."""
    return PEAK_FLOPS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" and bf16 else None


def micro_loss(
    precond: nn.Module,
    net: Any,
    loss: Callable[..., torch.Tensor],
    num_samples: int,
    device: torch.device,
    routing: Any,
) -> torch.Tensor:
    """The losses (N,) of a micro-batch of zeros."""
    x = torch.zeros(num_samples, *net.latent_shape, device=device)
    labels = torch.zeros(num_samples, dtype=torch.int64, device=device) if net.num_classes else None
    generator = torch.Generator(device).manual_seed(0)
    return loss(precond, x, labels, generator=generator, routing=routing)


def no_sync(precond: Any) -> Any:
    """Leave the gradients of other ranks alone in a backward pass."""
    return precond.net.no_sync() if hasattr(precond.net, "no_sync") else nullcontext()


def most_graphs(num_lengths: int) -> int:
    """Graphs of the blocks at most: one for each length, and another where a block runs in fp32."""
    return 2 * num_lengths + 4


class SpeedCheck:
    """Compare the speed-up of the routes with what the cost model predicts.

    Args:
        losses: losses(ratios) of a micro-batch at given ratios of the routes, by `precond`.
        predict: the speed-up that the cost model promises at given ratios.
    """

    def __init__(
        self,
        losses: Callable[[tuple[float, ...]], torch.Tensor],
        precond: nn.Module,
        predict: Callable[[tuple[float, ...]], float],
        device: torch.device,
        recorder: Recorder,
    ):
        self.losses, self.precond, self.predict = losses, precond, predict
        self.device, self.recorder = device, recorder

    def __call__(self, ratios: tuple[float, ...]) -> None:
        """Measure at the ratios of a step, record and show the result."""
        predicted = self.predict(ratios)
        if predicted == 1:
            return
        passes = f"{REPEATS + 1} dense and {REPEATS + 1} routed passes"
        self.recorder.show(f"timing {passes} to compare the routes with their FLOPs {SWITCH_OFF}")
        steps = {"dense": partial(self._step, (0.0,) * len(ratios)), "routed": partial(self._step, ratios)}
        try:
            seconds = interleaved_seconds(steps, self.device, REPEATS)
        except torch.OutOfMemoryError:
            reason = "a dense step does not fit into memory at this train.micro_batch_size"
            self.recorder.show(f"the speed-up was not measured: {reason}")
            return
        speedups = sorted(a / b for a, b in zip(seconds["dense"], seconds["routed"], strict=True))
        kept = speedups[1:-1] or speedups  # a single stall is not noise
        low, high = kept[0], kept[-1]
        verdict = SLOW if high < MIN_SHARE * predicted else ""
        found = {"ratios": list(ratios), "predicted_speedup": predicted, "measured_speedup": median(speedups)}
        found |= {"range": [low, high], "verdict": NOISY if high > MAX_SPREAD * low else verdict}
        self.recorder.note({"speed_check": found})
        at = ", ".join(f"{ratio:g}" for ratio in ratios)
        self.recorder.show(f"a forward and backward pass at ratio {at}: {describe_check(found)}")

    def _step(self, ratios: tuple[float, ...]) -> None:
        """Forward and backward of a micro-batch, without a trace."""
        try:
            with no_sync(self.precond):
                self.losses(ratios).mean().backward()
        finally:
            self.precond.zero_grad()


def describe_check(found: Mapping[str, Any]) -> str:
    """The record of a speed check in words."""
    low, high = found["range"]
    repeats, predicted = f"{low:.2f}x to {high:.2f}x", f"{found['predicted_speedup']:.2f}x by FLOPs"
    said = f"{found['measured_speedup']:.2f}x as fast as a dense one (repeats: {repeats}; {predicted})"
    return f"{said}; {found['verdict']}" if found["verdict"] else said
