"""What a sample costs: evaluations of the denoiser, guided and not, in several precisions and batches, and
whole samples.

    python -m benchmarks.sampling                          DiT-S/2, batch 4, printed
    python -m benchmarks.sampling --size b_2 --batch 16
    python -m benchmarks.gpu OUT sample                    DiT-XL/2, batches of 4 to 512, on a GPU

On latents of 4x32x32 (256 tokens at patch 2; 1024 for the size tiny, whose patch is 1). Images per second are
those of a whole sample of 40 Heun steps, 79 evaluations; the last rows draw such samples.
"""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn as nn

from benchmarks.memory import peak_gib, reset_peak
from benchmarks.results import markdown, write_results
from benchmarks.runs import compose_config, perturb
from benchmarks.train_step import peak_flops
from builders.network import build_net, build_precond
from diffusion import edm_sampler, guided_denoiser
from evaluation.precision import strict_fp32
from models import cost_of
from runtime.config import run_main
from runtime.machine import start_process
from runtime.provenance import environment
from training.speed import interleaved_seconds, speedup

GUIDANCE_SCALE, NUM_STEPS = 1.5, 40
REPEATS, GPU_REPEATS = 15, 5
IMAGES_A_TURN = {"cpu": 1, "cuda": 128}
AGREE = {"bf16": 2e-2, "TF32": 3e-3, "fp32": 3e-5}  # one batched forward with two, of the norm
BATCHES, WHOLE_BATCH = (4, 32, 128, 512), 128
TINY = ("model.hidden_size=32", "model.num_heads=4", "model.depth=4", "model.patch_size=4")
PRECISIONS = {"cpu": ("bf16", "fp32"), "cuda": ("bf16", "TF32", "fp32")}
COLUMNS = {
    "setting": "{}",
    "evaluation": "{}",
    "ms": "{:.1f}",
    "images_per_sec": "{:.3f}",
    "hours_50k": "{:.2f}",
    "utilisation": "{:.1%}",
    "speedup_over_two": "{:.2f}x",
    "peak_memory_gib": "{:.1f}",
    "n": "{}",
    "failed": "{}",
}


def main() -> None:
    """Measure, print and record."""
    device = start_process().device
    found = environment(device)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sampling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--size", default="s_2", help="a file of configs/model/size")
    parser.add_argument("--batch", type=int, default=4, help="images drawn at once; default 4")
    parser.add_argument(
        "--record", help="name of the record, sampling for the committed one; default: none is written"
    )
    arguments = parser.parse_args()
    if arguments.batch < 1:
        parser.error(f"--batch {arguments.batch} must be at least 1")
    print(f"{arguments.size}, batch {arguments.batch}: some minutes on a CPU", flush=True)
    settings = settings_of(
        device, (f"model/size={arguments.size}",), (arguments.batch,), arguments.batch, REPEATS
    )
    rows = [{"setting": setting, **row} for setting, measure in settings.items() for row in measure()]
    print(markdown(rows, COLUMNS))
    if arguments.record:
        write_results(arguments.record, rows, found)


def plan(device: torch.device, tiny: bool, out: Path) -> dict[str, Callable[[], list[dict[str, Any]]]]:
    """Return what measures each setting; see `benchmarks.gpu`."""
    if tiny:
        return settings_of(device, TINY, (2,), 2, repeats=1)
    return settings_of(device, ("model/size=xl_2",), BATCHES, WHOLE_BATCH, GPU_REPEATS)


def settings_of(
    device: torch.device, size: tuple[str, ...], batches: tuple[int, ...], whole_batch: int, repeats: int
) -> dict[str, Callable[[], list[dict[str, Any]]]]:
    """Return what measures each precision, compiled and not, at each batch, and whole samples."""
    name = f"bf16, compiled, batch {whole_batch}, whole samples"
    settings: dict[str, Callable[[], list[dict[str, Any]]]] = {
        name: partial(whole_samples, size, whole_batch, device)
    }
    for precision in PRECISIONS[device.type]:
        for compiled in (True, False):
            for batch in batches:
                name = f"{precision}, {'compiled' if compiled else 'eager'}, batch {batch}"
                settings[name] = partial(evaluations, size, batch, precision, compiled, repeats, device)
    return settings


def build(size: tuple[str, ...], device: torch.device, compiled: bool) -> nn.Module:
    """Return a dense network in its preconditioning, with random weights, for latents of 4x32x32; size: keys
    of its model.
    """
    config = compose_config(
        ("model=dit", "data=synthetic", "data.input_size=32", "data.num_classes=1000", *size)
    )
    torch.manual_seed(0)
    with device:  # weights are drawn where they are needed
        net = build_net(config).to(device)
    perturb(net)
    if compiled:
        torch._dynamo.reset()
        for block in net.blocks:
            block.compile(dynamic=False)
    return build_precond(config, net).eval().requires_grad_(False)


@torch.no_grad()
def evaluations(
    size: tuple[str, ...], batch: int, precision: str, compiled: bool, repeats: int, device: torch.device
) -> list[dict[str, Any]]:
    """Time one evaluation in each way, in turn; return a row for each."""
    precond = build(size, device, compiled)
    noise, labels = inputs(precond, batch, device)
    sigma = torch.ones((), device=device)
    batched = guided_denoiser(precond, labels, precond.net.num_classes, GUIDANCE_SCALE)
    null = torch.full_like(labels, precond.net.num_classes)

    def twice(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        D_cond, D_uncond = precond(x, sigma, labels), precond(x, sigma, null)
        return D_uncond + GUIDANCE_SCALE * (D_cond - D_uncond)

    ways = {
        "guided": within(precision, device, batched, noise, sigma),
        "guided, two forwards": within(precision, device, twice, noise, sigma),
        "unguided": within(precision, device, lambda x, sigma: precond(x, sigma, labels), noise, sigma),
    }
    one, two = (ways[name]() for name in list(ways)[:2])
    error = ((one - two).norm() / two.norm()).item()
    assert error <= AGREE[precision], f"one batched forward and two differ by {error:.1e} of their norm"
    num_calls = max(
        1, IMAGES_A_TURN[device.type] // batch
    )  # small batches are over before a clock is sure of them
    turns = interleaved_seconds(
        {name: partial(repeated, way, num_calls) for name, way in ways.items()}, device, repeats
    )
    seconds = {name: [sec / num_calls for sec in times] for name, times in turns.items()}
    flops = cost_of(precond.net).dense_forward_flops * batch
    peak, _ = peak_flops("bf16", device) if precision == "bf16" else (None, "")
    rows = []
    for name, times in seconds.items():
        row = {
            "evaluation": name,
            "ms": 1000 * median(times),
            "ms_least": 1000 * min(times),
            "ms_most": 1000 * max(times),
        }
        reset_peak(device)
        ways[name]()
        row |= rate(batch, (2 * NUM_STEPS - 1) * median(times)) | {
            "n": repeats,
            "peak_memory_gib": peak_gib(device),
        }
        if peak:
            row["utilisation"] = (1 if name == "unguided" else 2) * flops / median(times) / peak
        rows.append(row)
    rows[0]["speedup_over_two"] = speedup(seconds["guided, two forwards"], seconds["guided"])
    return rows


@torch.no_grad()
def whole_samples(size: tuple[str, ...], batch: int, device: torch.device) -> list[dict[str, Any]]:
    """Time guided samples, once, after one evaluation that compiles."""
    precond = build(size, device, compiled=True)
    noise, labels = inputs(precond, batch, device)
    denoise = guided_denoiser(precond, labels, precond.net.num_classes, GUIDANCE_SCALE)
    within("bf16", device, denoise, noise, torch.ones((), device=device))()
    draw = within("bf16", device, lambda z: edm_sampler(denoise, z, num_steps=NUM_STEPS), noise)
    ((sec,),) = interleaved_seconds({"draw": draw}, device, repeats=1).values()
    return [{"evaluation": "guided, 40 Heun steps", "ms": 1000 * sec, **rate(batch, sec), "n": 1}]


def repeated(function: Callable[[], Any], count: int) -> None:
    """Call a function so many times."""
    for _ in range(count):
        function()


def inputs(precond: nn.Module, batch: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noise (batch, C, H, W) and labels (batch,)."""
    net, generator = precond.net, torch.Generator(device).manual_seed(0)
    noise = torch.randn(
        batch, net.in_channels, net.input_size, net.input_size, generator=generator, device=device
    )
    return noise, torch.arange(batch, device=device) % net.num_classes


def within(
    precision: str, device: torch.device, function: Callable[..., Any], *arguments: Any
) -> Callable[[], Any]:
    """Return what calls a function in a precision."""

    def call() -> Any:
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
        with autocast, strict_fp32() if precision == "fp32" else nullcontext():
            return function(*arguments)

    return call


def rate(num_images: int, sec: float) -> dict[str, float]:
    """Return images per second, and hours for 50,000."""
    return {"images_per_sec": num_images / sec, "hours_50k": 50_000 * sec / num_images / 3600}


if __name__ == "__main__":
    run_main(main)
