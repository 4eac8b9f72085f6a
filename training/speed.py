"""How long steps take, and whether routes save what their FLOPs promise."""

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
import torch.nn as nn
from accelerate import Accelerator

from routing import Routing

MIN_SHARE = 0.8  # of the predicted speed-up
REPEATS = 7
NARROW = 512
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
    """Return the median over repeats of how much faster the second was."""
    return median(a / b for a, b in zip(slow, fast, strict=True))


def fp32_slowdown(net: nn.Module, device: torch.device, bf16: bool) -> float:
    """Measure how many times as long as under bf16 autocast a matrix product takes outside of it (on CUDA in
    TF32); 1 where no block of a network runs outside."""
    if not (net.fp32_after_route and net.routes and bf16):
        return 1.0
    size, generator = (
        PRODUCT_SIZES[device.type],
        torch.Generator(device).manual_seed(0),
    )  # the run's own draws stay as they are
    outside = torch.randn(2, size, size, generator=generator, device=device)
    inside = outside.bfloat16()
    products = {"outside": lambda: outside[0] @ outside[1], "inside": lambda: inside[0] @ inside[1]}
    seconds = interleaved_seconds(products, device, REPEATS)
    return speedup(seconds["outside"], seconds["inside"])


def micro_step(
    accelerator: Accelerator,
    precond: nn.Module,
    net: nn.Module,
    loss_fn: Callable[..., torch.Tensor],
    num_samples: int,
) -> Callable[[tuple[float, ...]], None]:
    """Return a function that runs forward and backward of a micro-batch at given ratios, and leaves nothing
    behind.
    """
    device = accelerator.device

    def step(ratios: tuple[float, ...]) -> None:
        x = torch.zeros(num_samples, *net.latent_shape, device=device)
        labels = torch.zeros(num_samples, dtype=torch.int64, device=device) if net.num_classes else None
        generator = torch.Generator(device).manual_seed(0)
        with (
            accelerator.no_sync(precond.net),
            torch.autocast(device.type, torch.bfloat16, enabled=accelerator.bf16),
        ):
            losses = loss_fn(precond, x, labels, generator=generator, routing=Routing(ratios))
            accelerator.backward(losses.mean())
        net.zero_grad()

    return step


def most_graphs(num_lengths: int) -> int:
    """Return how many graphs blocks may need: they share their code, each length is one, and another where
    one runs in fp32.
    """
    return 2 * num_lengths + 4


class SpeedCheck:
    """Compare the measured speed-up of the routes with the predicted one, once, when everything is compiled.

    Args:
        step: runs forward and backward of one micro-batch at given ratios of the routes, and leaves nothing
            behind.
        predict: the speed-up that the cost model promises at given ratios.
        net: whose routes they are.
        compiled: whether its blocks are compiled.
        fp32_slowdown: how many times as long products take in its blocks outside autocast; 1: there are none.
        num_lengths: how many lengths of the sequence the run knows.
        report: is given what was found.
        show: prints a line.
    """

    def __init__(
        self,
        step: Callable[[tuple[float, ...]], None],
        predict: Callable[[tuple[float, ...]], float],
        net: nn.Module,
        device: torch.device,
        compiled: bool,
        fp32_slowdown: float,
        num_lengths: int,
        report: Callable[[dict[str, Any]], None],
        show: Callable[[str], None],
    ):
        self.step, self.predict, self.net, self.device, self.compiled = step, predict, net, device, compiled
        self.fp32_slowdown = fp32_slowdown
        self.num_lengths, self.num_graphs_before = num_lengths, _num_graphs()
        self.report, self.show = report, show

    def __call__(self, ratios: tuple[float, ...]) -> None:
        """Measure at the ratios of a step; where nothing bypasses there is nothing to compare."""
        predicted = self.predict(ratios)
        if predicted == 1:
            return
        dense = (0.0,) * len(ratios)
        steps = {"dense": lambda: self.step(dense), "routed": lambda: self.step(ratios)}
        try:
            seconds = interleaved_seconds(steps, self.device, REPEATS)
        except torch.OutOfMemoryError:
            self.net.zero_grad()
            self.show(
                "the speed-up was not measured: a dense step does not fit into the memory at this "
                "train.micro_batch_size"
            )
            return
        measured = speedup(seconds["dense"], seconds["routed"])
        found = {"ratios": list(ratios), "measured_speedup": measured, "predicted_speedup": predicted}
        self.report({"speed_check": found})
        at = ", ".join(f"{ratio:g}" for ratio in ratios)
        self.show(
            f"a forward and backward pass at ratio {at} is {measured:.2f}x as fast as a dense one "
            f"({predicted:.2f}x by FLOPs)"
        )
        if measured < MIN_SHARE * predicted:
            causes = "; ".join(self._likely_causes())
            self.show(
                f"That is less than {MIN_SHARE:.0%} of what the FLOPs promise. Likely causes: {causes}. "
                "To compare other routes: python -m benchmarks.advise run=..."
            )

    def _likely_causes(self) -> list[str]:
        num_bypassed = sum(route.end_layer_idx - route.start_layer_idx + 1 for route in self.net.routes)
        depth, hidden_size = len(self.net.blocks), self.net.blocks[0].attn.proj.in_features
        causes = []
        if num_bypassed < depth / 2:
            causes.append(f"a short window ({num_bypassed} of {depth} blocks)")
        if self.fp32_slowdown > 1:
            slowdown = f"{self.fp32_slowdown:.1f}x as long"
            causes.append(
                f"a block in fp32 after each route, where products take {slowdown} (model.fp32_after_route)"
            )
        if self.net.gradient_checkpointing:
            causes.append("gradient checkpointing, whose bookkeeping does not shrink with the tokens")
        if not self.compiled:
            causes.append("uncompiled blocks (train.compile=false)")
        num_graphs = _num_graphs() - self.num_graphs_before
        if num_graphs > most_graphs(self.num_lengths):
            causes.append(f"recompilation ({num_graphs} graphs)")
        if hidden_size < NARROW:
            causes.append(
                f"little work per token (hidden_size={hidden_size}): what does not shrink with the tokens "
                "weighs more"
            )
        return [*causes, "another program on this machine"]


def _num_graphs() -> int:
    return torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)
