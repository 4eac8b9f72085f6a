"""Step time of diffusers' transformers, routed against dense, beside what the FLOPs promise.

    python -m benchmarks.families
    python -m benchmarks.families --families flux wan --num-tokens 256 --repeats 3
    python -m benchmarks.gpu OUT families                  at the width of the published models, on a GPU

The models are of their real classes, with random weights: width 512, 12 blocks, 77 tokens of text; one route,
blocks 2 to depth-4, ratio 0.5. A step is a forward and a backward pass to all weights, in bf16 where the
device is fast at it. FLOPs are those of matrix products, attention included, as in models/cost.py; torch
counts them while one step of each kind runs. The record goes to benchmarks/results/.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn as nn
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from benchmarks.results import markdown, write_results
from routing import Route, attach
from runtime.machine import has_fast_bf16, keep_freed_memory, start_process
from runtime.provenance import environment
from training.speed import interleaved_seconds, speedup

NUM_TEXT = 77
RATIO, ROUTE = 0.5, Route(0.5, 2, -4)
MEDIUM, TINY = (512, 8), (64, 1)  # width, heads
# FLUX.1, Stable Diffusion 3 medium, PixArt-alpha XL/2, AuraFlow, Wan 1.3B: as their published configurations
# have them.
PUBLISHED = {
    "flux": (3072, 24),
    "sd3": (1536, 24),
    "pixart": (1152, 16),
    "auraflow": (3072, 12),
    "wan": (1536, 12),
}
BATCH_TOKENS, GPU_BATCH_TOKENS = 2048, 16384  # of all samples together; one sample may have more
NUM_TOKENS, REPEATS = (256, 1024, 4096), 5
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
TEXT_DIM, POOLED_DIM = 768, 256


def flux(num_tokens: int, batch: int, width: int, heads: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """4 double blocks and 8 single ones."""
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        in_channels=64,
        num_layers=4,
        num_single_layers=8,
        attention_head_dim=width // heads,
        num_attention_heads=heads,
        joint_attention_dim=TEXT_DIM,
        pooled_projection_dim=POOLED_DIM,
        axes_dims_rope=tuple(width // heads * share // 16 for share in (2, 7, 7)),
    )
    side = int(num_tokens**0.5)
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    img_ids = torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).view(-1, 3).float()
    return model, {
        "hidden_states": torch.randn(batch, num_tokens, 64),
        "encoder_hidden_states": torch.randn(batch, NUM_TEXT, TEXT_DIM),
        "pooled_projections": torch.randn(batch, POOLED_DIM),
        "timestep": torch.rand(batch),
        "img_ids": img_ids,
        "txt_ids": torch.zeros(NUM_TEXT, 3),
    }


def sd3(num_tokens: int, batch: int, width: int, heads: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """12 joint blocks."""
    from diffusers import SD3Transformer2DModel

    side = int(num_tokens**0.5)
    model = SD3Transformer2DModel(
        sample_size=2 * side,
        num_layers=12,
        attention_head_dim=width // heads,
        num_attention_heads=heads,
        joint_attention_dim=TEXT_DIM,
        caption_projection_dim=width,
        pooled_projection_dim=POOLED_DIM,
        pos_embed_max_size=side,
    )
    return model, {
        "hidden_states": torch.randn(batch, 16, 2 * side, 2 * side),
        "encoder_hidden_states": torch.randn(batch, NUM_TEXT, TEXT_DIM),
        "pooled_projections": torch.randn(batch, POOLED_DIM),
        "timestep": 1000 * torch.rand(batch),
    }


def pixart(num_tokens: int, batch: int, width: int, heads: int) -> tuple[nn.Module, dict[str, Any]]:
    """12 blocks with cross-attention."""
    from diffusers import PixArtTransformer2DModel

    side = int(num_tokens**0.5)
    model = PixArtTransformer2DModel(
        num_attention_heads=heads,
        attention_head_dim=width // heads,
        num_layers=12,
        cross_attention_dim=width,
        sample_size=2 * side,
        caption_channels=TEXT_DIM,
        use_additional_conditions=False,
    )
    return model, {
        "hidden_states": torch.randn(batch, 4, 2 * side, 2 * side),
        "encoder_hidden_states": torch.randn(batch, NUM_TEXT, TEXT_DIM),
        "timestep": torch.randint(1000, (batch,)),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def auraflow(
    num_tokens: int, batch: int, width: int, heads: int
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """2 joint blocks and 10 single ones."""
    from diffusers import AuraFlowTransformer2DModel

    side = int(num_tokens**0.5)
    model = AuraFlowTransformer2DModel(
        sample_size=2 * side,
        num_mmdit_layers=2,
        num_single_dit_layers=10,
        attention_head_dim=width // heads,
        num_attention_heads=heads,
        joint_attention_dim=TEXT_DIM,
        caption_projection_dim=width,
        pos_embed_max_size=num_tokens,
    )
    return model, {
        "hidden_states": torch.randn(batch, 4, 2 * side, 2 * side),
        "encoder_hidden_states": torch.randn(batch, NUM_TEXT, TEXT_DIM),
        "timestep": torch.rand(batch),
    }


def wan(num_tokens: int, batch: int, width: int, heads: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """12 blocks with cross-attention, 4 frames."""
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        num_attention_heads=heads,
        attention_head_dim=width // heads,
        text_dim=TEXT_DIM,
        ffn_dim=4 * width,
        num_layers=12,
    )
    side = int(num_tokens**0.5)
    return model, {
        "hidden_states": torch.randn(batch, 16, 4, side, side),
        "timestep": torch.randint(1000, (batch,)),
        "encoder_hidden_states": torch.randn(batch, NUM_TEXT, TEXT_DIM),
    }


FAMILIES: dict[str, Callable[[int, int, int, int], tuple[nn.Module, dict[str, Any]]]] = {
    "flux": flux,
    "sd3": sd3,
    "pixart": pixart,
    "auraflow": auraflow,
    "wan": wan,
}


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.families",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument(
        "--num-tokens", nargs="+", type=int, default=NUM_TOKENS, help="of an image, each a square"
    )
    parser.add_argument("--repeats", type=int, default=REPEATS)
    arguments = parser.parse_args()
    device = start_process().device
    if device.type == "cpu":
        keep_freed_memory()
    found, rows = environment(device), []
    todo = [(name, num_tokens) for name in arguments.families for num_tokens in arguments.num_tokens]
    for name, num_tokens in tqdm(todo, desc="families"):
        row = measure(name, num_tokens, MEDIUM, BATCH_TOKENS, arguments.repeats, device)
        rows.append({"setting": f"{name}, {num_tokens} tokens"} | row)
        tqdm.write(markdown(rows[-1:], COLUMNS))
    write_results("families", rows, found)


def plan(device: torch.device, tiny: bool, out: Path) -> dict[str, Callable[[], list[dict[str, Any]]]]:
    """Return what measures each family at each length; see `benchmarks.gpu`."""

    def at(name: str, num_tokens: int) -> list[dict[str, Any]]:
        if tiny:
            return [measure(name, num_tokens, TINY, num_tokens, 1, device)]
        return [measure(name, num_tokens, PUBLISHED[name], GPU_BATCH_TOKENS, REPEATS, device)]

    return {
        f"{name}, {num_tokens} tokens": partial(at, name, num_tokens)
        for num_tokens in ((16,) if tiny else (1024, 4096))
        for name in FAMILIES
    }


def measure(
    name: str, num_tokens: int, size: tuple[int, int], batch_tokens: int, repeats: int, device: torch.device
) -> dict[str, Any]:
    """Return the row of one family at one length; size: width and heads."""
    torch.manual_seed(0)
    batch = max(1, batch_tokens // num_tokens)
    with device:  # billions of weights are drawn where they are needed
        model, inputs = FAMILIES[name](num_tokens, batch, *size)
    model.to(device).train()
    inputs = {
        key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in inputs.items()
    }
    attach(model, [ROUTE])
    step = partial(_step, model, inputs, device)
    flops = {ratio: _count(partial(step, ratio)) for ratio in (0.0, RATIO)}
    times = interleaved_seconds({ratio: partial(step, ratio) for ratio in (0.0, RATIO)}, device, repeats)
    return {
        "family": name,
        "width": size[0],
        "num_tokens": num_tokens,
        "samples": batch,
        "precision": "bf16" if has_fast_bf16(device) else "fp32",
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dense_sec": median(times[0.0]),
        "routed_sec": median(times[RATIO]),
        "speedup": speedup(times[0.0], times[RATIO]),
        "predicted_speedup": flops[0.0] / flops[RATIO],
        "n": repeats,
    }


def _step(model: nn.Module, inputs: dict[str, Any], device: torch.device, ratio: float) -> None:
    with torch.autocast(device.type, torch.bfloat16, enabled=has_fast_bf16(device)):
        output = model(**inputs, selection_ratio=ratio, return_dict=False)[0]
    output.float().square().mean().backward()
    model.zero_grad(set_to_none=True)


def _count(step: Callable[[], None]) -> int:
    """Return the FLOPs of a step's matrix products, attention included."""
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


if __name__ == "__main__":
    main()
