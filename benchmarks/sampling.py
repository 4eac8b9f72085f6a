"""What a sample costs: an evaluation of the guided denoiser as one batched forward and as two, and whole samples.

    python -m benchmarks.sampling                          DiT-XL/2 on a GPU, DiT-S/2 on a CPU; batch 4
    python -m benchmarks.sampling --size b_2 --batch 16

In fp32, as sample.py draws unless told otherwise, and in bf16, on latents of 4x32x32 (256 tokens at patch 2; 1024 for the size
tiny, whose patch is 1). With --record NAME the record goes to benchmarks/results/.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from benchmarks.results import measured, write_results
from benchmarks.runs import compose_config, perturb
from diffusion import edm_sampler, guided_denoiser
from training import config as configuration
from training.machine import start_process
from training.provenance import environment
from training.speed import interleaved_seconds

GUIDANCE_SCALE, NUM_STEPS = 1.5, 40
REPEATS, SAMPLING_REPEATS = 15, 1


def main() -> None:
    """Measure, print and record."""
    device = start_process().device
    found = environment(device)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sampling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="xl_2" if device.type == "cuda" else "s_2", help="a file of configs/model/size")
    parser.add_argument("--batch", type=int, default=4, help="images drawn at once; default 4")
    parser.add_argument("--record", help="name of the record, sampling for the committed one; default: none is written")
    arguments = parser.parse_args()
    if arguments.batch < 1:
        parser.error(f"--batch {arguments.batch} must be at least 1")
    precond = build(arguments.size).to(device).eval().requires_grad_(False)
    setting = {"size": arguments.size, "batch": arguments.batch}
    print(f"{arguments.size}, {precond.net.num_tokens} tokens, batch {arguments.batch}: some minutes on a CPU", flush=True)
    print("| precision | what | median | least | most | n |\n|---|---|--:|--:|--:|--:|", flush=True)
    rows = []
    for precision in ("fp32", "bf16"):
        for row in measure(precond, arguments.batch, precision, device):
            values = " | ".join(f"{row[key]:.4g} {row['unit']}" for key in ("median", "least", "most"))
            print(f"| {precision} | {row['what']} | {values} | {row['n']} |", flush=True)
            rows.append(setting | row)
    if arguments.record:
        write_results(arguments.record, rows, found)


def build(size: str) -> nn.Module:
    """Return a dense network of a size in its preconditioning, with random weights, for latents of 4x32x32."""
    data = ("data=synthetic", "data.input_size=32", "data.num_classes=1000")
    config = compose_config(("model=dit", *data, f"model/size={size}"))
    torch.manual_seed(0)
    net = configuration.build_net(config)
    perturb(net)
    return configuration.build_precond(config, net)


@torch.no_grad()
def measure(precond: nn.Module, num_samples: int, precision: str, device: torch.device) -> list[dict[str, Any]]:
    """Time one evaluation in each way, in turn, and whole samples; return a row for each."""
    net = precond.net
    shape = (num_samples, net.in_channels, net.input_size, net.input_size)
    generator = torch.Generator(device).manual_seed(0)
    noise = torch.randn(shape, generator=generator, device=device)
    labels = torch.arange(num_samples, device=device) % net.num_classes
    null = torch.full_like(labels, net.num_classes)
    sigma = torch.ones((), device=device)
    batched = guided_denoiser(precond, labels, net.num_classes, GUIDANCE_SCALE)

    def twice(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        D_cond, D_uncond = precond(x, sigma, labels), precond(x, sigma, null)
        return D_uncond + GUIDANCE_SCALE * (D_cond - D_uncond)

    def within(denoise: Callable[..., torch.Tensor], *arguments: torch.Tensor) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                return denoise(*arguments)

        return run

    ways = {
        "guided, one batched forward": within(batched, noise, sigma),
        "guided, two forwards": within(twice, noise, sigma),
        "no guidance": within(lambda x, sigma: precond(x, sigma, labels), noise, sigma),
    }
    one, two = (ways[name]() for name in list(ways)[:2])
    torch.testing.assert_close(one, two, rtol=1e-2, atol=1e-2 if precision == "bf16" else 1e-4)
    seconds = interleaved_seconds(ways, device, REPEATS)
    draw = within(lambda z: edm_sampler(batched, z, num_steps=NUM_STEPS), noise)
    drawing = interleaved_seconds({"draw": draw}, device, SAMPLING_REPEATS)["draw"]
    one, two, _ = seconds.values()
    rows = [measured(name, "ms", [1000 * t for t in times]) for name, times in seconds.items()]
    rows.append(measured("two forwards against one batched", "x", [a / b for a, b in zip(two, one, strict=True)]))
    per_sec = [num_samples / t for t in drawing]
    rows.append(measured(f"guided samples, {NUM_STEPS} Heun steps ({2 * NUM_STEPS - 1} evaluations)", "images/s", per_sec))
    return [{"precision": precision} | row for row in rows]


if __name__ == "__main__":
    configuration.run(main)
