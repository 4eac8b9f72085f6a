"""How long steps take, and whether routes save what their FLOPs promise."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from statistics import median
from typing import Any

import torch
import torch.nn as nn
from tqdm import tqdm

from training.recorder import Recorder

MIN_SHARE = 0.8  # of the predicted speed-up
REPEATS = 7
MAX_SPREAD = 1.3  # of repeats, the largest over the smallest without the extremes: beyond it, noise
SWITCH_OFF = "(train.check_speed=false: never)"
SLOW, NOISY = "less than the FLOPs promise", "too noisy to tell: is this machine busy?"
BAR_AFTER_SEC = 2
PEAK_FLOPS = {  # bf16, dense, as NVIDIA specifies them
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
}
PRODUCT_SIZES = {"cuda": 8192, "cpu": 1536}  # sides of matrices that keep a device busy


def interleaved_seconds(
    functions: Mapping[Any, Callable[[], None]], device: torch.device, repeats: int
) -> dict[Any, list[float]]:
    """Return the times of each function, after one call to warm up.

    The functions take turns, so that a machine that is busy with something else slows all of them.
    """
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


def fp32_slowdown(net: nn.Module, device: torch.device, bf16: bool) -> float:
    """Return how much slower a matrix product is outside bf16 autocast (on CUDA in TF32) than under it; 1
    where no block of the network runs outside.
    """
    if not (bf16 and net.flops([1] * len(net.routes)).fp32_training):
        return 1.0
    size = PRODUCT_SIZES[device.type]
    generator = torch.Generator(device).manual_seed(0)  # the run's own draws stay as they are
    outside = torch.randn(2, size, size, generator=generator, device=device)
    inside = outside.bfloat16()
    products = {"outside": lambda: outside[0] @ outside[1], "inside": lambda: inside[0] @ inside[1]}
    seconds = interleaved_seconds(products, device, REPEATS)
    return speedup(seconds["outside"], seconds["inside"])


@cache
def product_flops_per_sec(device: torch.device, dtype: torch.dtype, size: int, repeats: int) -> float:
    """Return the FLOPs per second of products of matrices of a size, the best of several; once in a
    process, for all jobs of a sweep.
    """
    generator = torch.Generator(device).manual_seed(0)  # the run's own draws stay as they are
    a, b = torch.randn(2, size, size, generator=generator, device=device).to(dtype)
    (seconds,) = interleaved_seconds({"product": lambda: a @ b}, device, repeats).values()
    return 2 * size**3 / min(seconds)


def specified_peak(device: torch.device, bf16: bool) -> float | None:
    """FLOPs per second that a device is specified for in bf16; None where unknown."""
    return PEAK_FLOPS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" and bf16 else None


def micro_loss(
    precond: nn.Module,
    net: nn.Module,
    loss: Callable[..., torch.Tensor],
    num_samples: int,
    device: torch.device,
    routing: Callable[[tuple[float, ...]], Any],
) -> Callable[[tuple[float, ...]], torch.Tensor]:
    """Build losses(ratios) of a micro-batch of zeros; `routing` turns the ratios of the routes into one."""

    def losses(ratios: tuple[float, ...]) -> torch.Tensor:
        x = torch.zeros(num_samples, *net.latent_shape, device=device)
        labels = torch.zeros(num_samples, dtype=torch.int64, device=device) if net.num_classes else None
        generator = torch.Generator(device).manual_seed(0)
        return loss(precond, x, labels, generator=generator, routing=routing(ratios))

    return losses


def micro_step(
    losses: Callable[[tuple[float, ...]], torch.Tensor], precond: nn.Module, net: nn.Module
) -> Callable[[tuple[float, ...]], None]:
    """Build step(ratios): forward and backward of a micro-batch, without a trace."""

    def step(ratios: tuple[float, ...]) -> None:
        try:
            with no_sync(precond):
                losses(ratios).mean().backward()
        finally:
            net.zero_grad()

    return step


def no_sync(precond: nn.Module) -> Any:
    """Leave the gradients of other ranks alone in a backward pass."""
    return precond.net.no_sync() if hasattr(precond.net, "no_sync") else nullcontext()


def most_graphs(num_lengths: int) -> int:
    """Graphs of the blocks at most: one for each length, and another where a block runs in fp32."""
    return 2 * num_lengths + 4


class SpeedCheck:
    """Compare the speed-up of the routes with what the cost model predicts.

    Args:
        step: runs forward and backward of one micro-batch at given ratios of the routes.
        predict: the speed-up that the cost model promises at given ratios.
    """

    def __init__(
        self,
        step: Callable[[tuple[float, ...]], None],
        predict: Callable[[tuple[float, ...]], float],
        device: torch.device,
        recorder: Recorder,
    ):
        self.step, self.predict, self.device, self.recorder = step, predict, device, recorder

    def __call__(self, ratios: tuple[float, ...]) -> None:
        """Measure at the ratios of a step, record and show the result."""
        predicted = self.predict(ratios)
        if predicted == 1:
            return
        tried = {"dense": (0.0,) * len(ratios), "routed": ratios}

        def step(ratios: tuple[float, ...]) -> None:
            self.step(ratios)
            bar.update()

        shown = {"desc": "  forward and backward", "unit": "step", "leave": False, "delay": BAR_AFTER_SEC}
        shown["disable"] = not self.recorder.launch.is_main
        passes = f"{REPEATS + 1} dense and {REPEATS + 1} routed passes"
        self.recorder.show(f"timing {passes} to compare the routes with their FLOPs {SWITCH_OFF}")
        try:
            with tqdm(total=len(tried) * (REPEATS + 1), **shown) as bar:
                steps = {name: partial(step, ratios) for name, ratios in tried.items()}
                seconds = interleaved_seconds(steps, self.device, REPEATS)
        except torch.OutOfMemoryError:
            reason = "a dense step does not fit into memory at this train.micro_batch_size"
            self.recorder.show(f"the speed-up was not measured: {reason}")
            return
        measured = speedup(seconds["dense"], seconds["routed"])
        low, high = spread(seconds["dense"], seconds["routed"])
        found = {"ratios": list(ratios), "predicted_speedup": predicted, "measured_speedup": measured}
        found |= {"range": [low, high], "verdict": verdict(low, high, predicted)}
        self.recorder.note({"speed_check": found})
        at = ", ".join(f"{ratio:g}" for ratio in ratios)
        self.recorder.show(f"a forward and backward pass at ratio {at}: {describe_check(found)}")
        if found["verdict"] == SLOW:
            self.recorder.show("To compare other routes: python -m benchmarks.advise run=...")


def spread(slow: Sequence[float], fast: Sequence[float]) -> tuple[float, float]:
    """Return the smallest and the largest speed-up of the repeats, without the two extremes if there are
    more than three.
    """
    ratios = sorted(a / b for a, b in zip(slow, fast, strict=True))
    kept = ratios[1:-1] if len(ratios) > 3 else ratios
    return kept[0], kept[-1]


def verdict(low: float, high: float, predicted: float) -> str:
    """What is wrong with speed-ups from `low` to `high`; empty if nothing is."""
    if high > MAX_SPREAD * low:
        return NOISY
    return SLOW if high < MIN_SHARE * predicted else ""


def describe_check(found: Mapping[str, Any]) -> str:
    """The record of a speed check in words."""
    low, high = found["range"]
    repeats, predicted = f"{low:.2f}x to {high:.2f}x", f"{found['predicted_speedup']:.2f}x by FLOPs"
    if found["verdict"] == NOISY:
        return f"{repeats} as fast as a dense one ({predicted}); {NOISY}"
    said = f"{found['measured_speedup']:.2f}x as fast as a dense one (repeats: {repeats}; {predicted})"
    return f"{said}; {found['verdict']}" if found["verdict"] else said
