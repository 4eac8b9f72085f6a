"""Step time of diffusers' transformers, routed against dense, beside what the FLOPs promise. The stage
`families` of `python -m benchmarks.gpu`.

The models are of their real classes, at their published widths, with random weights: 12 blocks, 77 tokens of
text; one route, blocks 2 to depth-4, ratio 0.5. A step is a forward and a backward pass to all weights, in
bf16 where the device is fast at it. FLOPs are those of matrix products, attention included, as in
models/cost.py; torch counts them while one step of each kind runs.
"""

from collections.abc import Callable, Mapping
from functools import partial
from math import isqrt
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn as nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.results import Rows
from routing import Route, Routing, attach
from runtime.machine import has_fast_bf16
from training.speed import interleaved_seconds, speedup

NUM_TEXT, TEXT_DIM, POOLED_DIM = 77, 768, 256
POOLED = {"pooled_projection_dim": POOLED_DIM}
RATIO, ROUTE = 0.5, Route(0.5, 2, -4)
NUM_TOKENS, BATCH_TOKENS, REPEATS = (1024, 4096), 16384, 5  # of an image, of all samples
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
Built = tuple[nn.Module, dict[str, Any]]  # a model, and inputs for it


def flux(side: int, batch: int, heads: Mapping[str, int]) -> Built:
    """4 double blocks and 8 single ones."""
    from diffusers import FluxTransformer2DModel

    axes = tuple(heads["attention_head_dim"] * share // 16 for share in (2, 7, 7))
    options = {"num_layers": 4, "num_single_layers": 8, "axes_dims_rope": axes, **POOLED}
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    return FluxTransformer2DModel(**options, **heads, joint_attention_dim=TEXT_DIM), {
        "hidden_states": torch.randn(batch, side**2, 64),
        "pooled_projections": torch.randn(batch, POOLED_DIM),
        "timestep": torch.rand(batch),
        "img_ids": torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).view(-1, 3).float(),
        "txt_ids": torch.zeros(NUM_TEXT, 3),
    }


def sd3(side: int, batch: int, heads: Mapping[str, int]) -> Built:
    """12 joint blocks."""
    from diffusers import SD3Transformer2DModel

    options = {"sample_size": 2 * side, "pos_embed_max_size": side, "num_layers": 12, **POOLED}
    options |= {"joint_attention_dim": TEXT_DIM, "caption_projection_dim": _width(heads)}
    return SD3Transformer2DModel(**options, **heads), {
        "hidden_states": torch.randn(batch, 16, 2 * side, 2 * side),
        "pooled_projections": torch.randn(batch, POOLED_DIM),
        "timestep": 1000 * torch.rand(batch),
    }


def pixart(side: int, batch: int, heads: Mapping[str, int]) -> Built:
    """12 blocks with cross-attention."""
    from diffusers import PixArtTransformer2DModel

    options = {"sample_size": 2 * side, "num_layers": 12, "use_additional_conditions": False}
    options |= {"cross_attention_dim": _width(heads), "caption_channels": TEXT_DIM}
    return PixArtTransformer2DModel(**options, **heads), {
        "hidden_states": torch.randn(batch, 4, 2 * side, 2 * side),
        "timestep": torch.randint(1000, (batch,)),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


def auraflow(side: int, batch: int, heads: Mapping[str, int]) -> Built:
    """2 joint blocks and 10 single ones."""
    from diffusers import AuraFlowTransformer2DModel

    options = {"sample_size": 2 * side, "pos_embed_max_size": side**2}
    options |= {"num_mmdit_layers": 2, "num_single_dit_layers": 10}
    options |= {"joint_attention_dim": TEXT_DIM, "caption_projection_dim": _width(heads)}
    return AuraFlowTransformer2DModel(**options, **heads), {
        "hidden_states": torch.randn(batch, 4, 2 * side, 2 * side),
        "timestep": torch.rand(batch),
    }


def wan(side: int, batch: int, heads: Mapping[str, int]) -> Built:
    """12 blocks with cross-attention, 4 frames."""
    from diffusers import WanTransformer3DModel

    options = {"num_layers": 12, "text_dim": TEXT_DIM, "ffn_dim": 4 * _width(heads)}
    return WanTransformer3DModel(**options, **heads), {
        "hidden_states": torch.randn(batch, 16, 4, side, side),
        "timestep": torch.randint(1000, (batch,)),
    }


def _width(heads: Mapping[str, int]) -> int:
    return heads["num_attention_heads"] * heads["attention_head_dim"]


# The width and the number of heads of each published configuration: FLUX.1, Stable Diffusion 3 medium,
# PixArt-alpha XL/2, AuraFlow, Wan 1.3B.
FAMILIES: dict[str, tuple[Callable[..., Built], int, int]] = {
    "flux": (flux, 3072, 24),
    "sd3": (sd3, 1536, 24),
    "pixart": (pixart, 1152, 16),
    "auraflow": (auraflow, 3072, 12),
    "wan": (wan, 1536, 12),
}


def plan(device: torch.device, tiny: bool, out: Path) -> dict[str, Callable[[], Rows]]:
    """Return what measures each family at each length; see `benchmarks.gpu`."""
    settings = {}
    for num_tokens in (16,) if tiny else NUM_TOKENS:
        for name, (build, *size) in FAMILIES.items():
            size, batch, repeats = ((64, 1), 1, 1) if tiny else (size, BATCH_TOKENS // num_tokens, REPEATS)
            settings[f"{name}, {num_tokens} tokens"] = partial(
                measure, build, num_tokens, batch, *size, repeats, device
            )
    return settings


def measure(
    build: Callable[..., Built],
    num_tokens: int,
    batch: int,
    width: int,
    num_heads: int,
    repeats: int,
    device: torch.device,
) -> Rows:
    """Return the row of one family at one length."""
    torch.manual_seed(0)
    with device:  # billions of weights are drawn where they are needed
        heads = {"num_attention_heads": num_heads, "attention_head_dim": width // num_heads}
        model, inputs = build(isqrt(num_tokens), batch, heads)
        inputs["encoder_hidden_states"] = torch.randn(batch, NUM_TEXT, TEXT_DIM)
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
            "width": width,
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
    ]


def _step(model: nn.Module, inputs: dict[str, Any], device: torch.device, ratio: float) -> None:
    with torch.autocast(device.type, torch.bfloat16, enabled=has_fast_bf16(device)):
        output = model(**inputs, routing=Routing(ratio), return_dict=False)[0]
    output.float().square().mean().backward()
    model.zero_grad(set_to_none=True)
