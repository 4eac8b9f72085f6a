"""Step time of diffusers' transformers, routed against dense, compared with the prediction from FLOPs.

The stage `families` of `python -m benchmarks.gpu`: five classes at their published widths, with random
weights, 12 blocks and 77 tokens of text; one route, blocks 2 to depth-4, ratio 0.5. A step is a forward and a
backward pass to all weights, in bf16 if the device is fast at it. FLOPs count matrix products, attention
included, as in models/cost.py; torch counts them during one step of each kind.
"""

from collections.abc import Callable
from functools import partial
from math import isqrt
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.results import Rows
from routing import Route, Routing, attach
from runtime.machine import has_fast_bf16
from training.speed import seconds_of, speedup

DEPTH, NUM_TEXT, TEXT_DIM, POOLED_DIM = 12, 77, 48, 24
RATIO, ROUTE = 0.5, Route(0.5, 2, -4)
NUM_TOKENS, BATCH_TOKENS, REPEATS = (1024, 4096), 16384, 5  # tokens of an image, of a batch
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
# Width and number of heads of each published configuration, from small to large: PixArt-alpha XL/2, Wan 1.3B,
# Stable Diffusion 3 medium, AuraFlow, FLUX.1.
WIDTHS = {
    "PixArtTransformer2DModel": (1152, 16),
    "WanTransformer3DModel": (1536, 12),
    "SD3Transformer2DModel": (1536, 24),
    "AuraFlowTransformer2DModel": (3072, 12),
    "FluxTransformer2DModel": (3072, 24),
}


class Size(NamedTuple):
    """The sizes of a model and of a batch."""

    width: int
    num_heads: int
    depth: int
    side: int  # an image has side x side tokens
    batch: int
    num_text: int


def plan(device: torch.device, tiny: bool) -> dict[str, Callable[[], Rows]]:
    """Plan a measurement of each class at each length; see `benchmarks.gpu`."""
    settings = {}
    for num_tokens in (16,) if tiny else NUM_TOKENS:
        for name, width in WIDTHS.items():
            width, batch, repeats = ((64, 1), 1, 1) if tiny else (width, BATCH_TOKENS // num_tokens, REPEATS)
            size = Size(*width, DEPTH, isqrt(num_tokens), batch, NUM_TEXT)
            settings[f"{name}, {num_tokens} tokens"] = partial(measure, name, size, repeats, device)
    return settings


def options_and_inputs(name: str, size: Size) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the published options of a class, with fewer blocks and narrower texts, and forward inputs."""
    width, num_heads, depth, side, N, num_text = size
    # FLUX: 16, 56 and 56 of 128 channels rotate by plane, row and column.
    first = width // num_heads // (8 if width // num_heads % 32 == 0 else 4)
    heads = {"num_attention_heads": num_heads, "attention_head_dim": width // num_heads}
    deep, pooled = {**heads, "num_layers": depth}, {"pooled_projections": torch.randn(N, POOLED_DIM)}
    text, time = {"encoder_hidden_states": torch.randn(N, num_text, TEXT_DIM)}, torch.rand(N)
    if name == "FluxTransformer2DModel":
        options = {**heads, "num_layers": depth // 3, "num_single_layers": depth - depth // 3}
        options |= {"joint_attention_dim": TEXT_DIM, "pooled_projection_dim": POOLED_DIM}
        options["axes_dims_rope"] = (first, *((width // num_heads - first) // 2,) * 2)
        ids = torch.cartesian_prod(torch.zeros(1), *(torch.arange(float(side)),) * 2)  # (T, 3)
        inputs = {"hidden_states": torch.randn(N, side**2, 64), "timestep": time, **pooled}
        inputs |= {"img_ids": ids, "txt_ids": torch.zeros(num_text, 3)}
    elif name == "SD3Transformer2DModel":
        options = {**deep, "sample_size": 2 * side, "pos_embed_max_size": side}
        options |= {"joint_attention_dim": TEXT_DIM, "caption_projection_dim": width}
        options["pooled_projection_dim"] = POOLED_DIM
        inputs = {"hidden_states": torch.randn(N, 16, 2 * side, 2 * side), "timestep": 1000 * time, **pooled}
    elif name == "PixArtTransformer2DModel":
        options = {**deep, "sample_size": 2 * side, "use_additional_conditions": False}
        options |= {"cross_attention_dim": width, "caption_channels": TEXT_DIM}
        inputs = {"hidden_states": torch.randn(N, 4, 2 * side, 2 * side), "timestep": 1000 * time}
        inputs["added_cond_kwargs"] = {"resolution": None, "aspect_ratio": None}
    elif name == "AuraFlowTransformer2DModel":
        options = {**heads, "num_mmdit_layers": depth // 6, "num_single_dit_layers": depth - depth // 6}
        options |= {"sample_size": 2 * side, "pos_embed_max_size": side**2}
        options |= {"joint_attention_dim": TEXT_DIM, "caption_projection_dim": width}
        inputs = {"hidden_states": torch.randn(N, 4, 2 * side, 2 * side), "timestep": time}
    else:  # Wan: 4 frames of half the side
        options = {**deep, "text_dim": TEXT_DIM, "ffn_dim": 4 * width}
        inputs = {"hidden_states": torch.randn(N, 16, 4, side, side), "timestep": 1000 * time}
    return options, inputs | text


def measure(name: str, size: Size, repeats: int, device: torch.device) -> Rows:
    """Time a step of a class, dense and routed in turn. Return one row."""
    import diffusers

    torch.manual_seed(0)
    with device:  # draw billions of weights on the device itself
        options, inputs = options_and_inputs(name, size)
        model = getattr(diffusers, name)(**options)
    attach(model.train(), [ROUTE])
    steps = {ratio: partial(_step, model, inputs, device, ratio) for ratio in (0.0, RATIO)}
    steps[0.0]()  # the first step may run products that later ones do not
    flops = {}  # of matrix products, attention included
    for ratio, step in steps.items():
        with FlopCounterMode(display=False) as counter:
            step()
        flops[ratio] = counter.get_total_flops()
    times = {ratio: [] for ratio in steps}
    for _ in range(repeats + 1):  # in turns, so that a busy machine slows both
        for ratio, step in steps.items():
            times[ratio].append(seconds_of(step, device))
    dense, routed = (times[ratio][1:] for ratio in steps)  # without the warm-up
    return [
        {
            "width": size.width,
            "num_tokens": size.side**2,
            "samples": size.batch,
            "precision": "bf16" if has_fast_bf16(device) else "fp32",
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "dense_sec": median(dense),
            "routed_sec": median(routed),
            "speedup": speedup(dense, routed),
            "predicted_speedup": flops[0.0] / flops[RATIO],
            "n": repeats,
        }
    ]


def _step(model: nn.Module, inputs: dict[str, Any], device: torch.device, ratio: float) -> None:
    with torch.autocast(device.type, torch.bfloat16, enabled=has_fast_bf16(device)):
        output = model(**inputs, routing=Routing(ratio)).sample
    output.float().square().mean().backward()
    model.zero_grad(set_to_none=True)
