"""Step time of diffusers' transformers, routed against dense, beside what the FLOPs promise.

    python -m benchmarks.families OUT    every class that can be routed, at one width; it resumes

The stage `families` of `python -m benchmarks.gpu` takes five of them, at their published widths. The models
are of their real classes, with random weights: 12 blocks, 77 tokens of text; one route, blocks 2 to depth-4,
ratio 0.5. A step is a forward and a backward pass to all weights, in bf16 where the device is fast at it.
FLOPs are those of matrix products, attention included, as in models/cost.py; torch counts them while one step
of each kind runs.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from math import isqrt
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from benchmarks.results import Record, Rows, markdown
from routing import Route, Routing, attach
from routing.adapters.families import FAMILIES, Sizes, routable
from runtime.machine import has_fast_bf16, start_process
from runtime.provenance import environment
from runtime.tables import aligned
from training.speed import interleaved_seconds, speedup

DEPTH, NUM_TEXT = 12, 77
RATIO, ROUTE = 0.5, Route(0.5, 2, -4)
NUM_TOKENS, BATCH_TOKENS, REPEATS = (1024, 4096), 16384, 5  # of an image, of all samples
OF_ALL = Sizes(512, 8, DEPTH, 32, 2, NUM_TEXT)  # what two cores do in minutes
COLUMNS = {
    "setting": "{}",
    "parameters": "{:.3g}",
    "samples": "{}",
    "dense_sec": "{:.3f}",
    "routed_sec": "{:.3f}",
    "speedup": "{:.2f}x",
    "predicted_speedup": "{:.2f}x",
    "n": "{}",
    "failed": "{}",
}
# The width and the number of heads of each published configuration: FLUX.1, Stable Diffusion 3 medium,
# PixArt-alpha XL/2, AuraFlow, Wan 1.3B.
WIDTHS = {
    "FluxTransformer2DModel": (3072, 24),
    "SD3Transformer2DModel": (1536, 24),
    "PixArtTransformer2DModel": (1152, 16),
    "AuraFlowTransformer2DModel": (3072, 12),
    "WanTransformer3DModel": (1536, 12),
}


def main() -> None:
    """Time every class that is not in the record, and print it."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.families", None, __doc__, formatter_class=raw)
    parser.add_argument("out", type=Path, help="folder of the record")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal, at sizes that take seconds")
    asked = parser.parse_args()
    device = start_process().device
    asked.out.mkdir(parents=True, exist_ok=True)
    record = Record("families_all", asked.out, environment(device) | {"tiny": asked.tiny})
    sizes, repeats = (Sizes(depth=DEPTH), 1) if asked.tiny else (OF_ALL, REPEATS)
    for name in tqdm([name for name in routable() if name not in record.done()], unit="class"):
        try:
            record.add(name, measure(name, sizes, repeats, device))
        except (RuntimeError, ValueError, TypeError) as error:  # the same command tries again
            record.add(name, [{"failed": f"{type(error).__name__}: {error}"}])
    print(aligned(markdown(record.rows, COLUMNS)))
    sys.exit(record.done() != record.started())


def plan(device: torch.device, tiny: bool, out: Path) -> dict[str, Callable[[], Rows]]:
    """Return what measures each class at each length; see `benchmarks.gpu`."""
    settings = {}
    for num_tokens in (16,) if tiny else NUM_TOKENS:
        for name, size in WIDTHS.items():
            size, batch, repeats = ((64, 1), 1, 1) if tiny else (size, BATCH_TOKENS // num_tokens, REPEATS)
            sizes = Sizes(*size, DEPTH, isqrt(num_tokens), batch, NUM_TEXT)
            settings[f"{name}, {num_tokens} tokens"] = partial(measure, name, sizes, repeats, device)
    return settings


def measure(name: str, sizes: Sizes, repeats: int, device: torch.device) -> Rows:
    """Return the row of a class at a size."""
    torch.manual_seed(0)
    with device:  # billions of weights are drawn where they are needed
        model, inputs = FAMILIES[name].build(sizes)
    attach(model.train(), [ROUTE])
    steps = {ratio: partial(_step, model, inputs, device, ratio) for ratio in (0.0, RATIO)}
    flops = {}
    for ratio, step in steps.items():
        with FlopCounterMode(display=False) as counter:
            step()
        flops[ratio] = counter.get_total_flops()
    times = interleaved_seconds(steps, device, repeats)
    return [
        {
            "width": sizes.width,
            "num_tokens": sizes.side**2,
            "samples": sizes.batch,
            "precision": "bf16" if has_fast_bf16(device) else "fp32",
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "dense_sec": median(times[0.0]),
            "routed_sec": median(times[RATIO]),
            "speedup": speedup(times[0.0], times[RATIO]),
            "predicted_speedup": flops[0.0] / flops[RATIO],
            "n": repeats,
        }
    ]


def _step(model: nn.Module, inputs: dict[str, Any], device: torch.device, ratio: float) -> None:
    with torch.autocast(device.type, torch.bfloat16, enabled=has_fast_bf16(device)):
        outputs = tree_leaves(model(**inputs, routing=Routing(ratio)))  # Z-Image has one for each sample
    sum(x.float().square().mean() for x in outputs if isinstance(x, torch.Tensor)).backward()
    model.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
