"""Tiny models of five classes of diffusers with random weights, and inputs for them in all their variants."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch

NUM_SAMPLES, NUM_TOKENS, NUM_TEXT, HIDDEN_SIZE = 3, 16, 5, 32
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
FOUR_CHANNELS = {"in_channels": 4, "out_channels": 4}
JOINT = {"joint_attention_dim": 12, "caption_projection_dim": HIDDEN_SIZE, "sample_size": 8}


@dataclass(frozen=True)
class Family:
    kind: str
    options: dict[str, Any]
    arguments: Callable
    block_lists: tuple[str, ...] = ("transformer_blocks",)

    def build(self):
        torch.manual_seed(0)
        model = getattr(diffusers, self.kind)(**HEADS, **self.options)
        with torch.no_grad():  # biases and tables that start at 0 could hide a mistake
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        return model.train()

    def layers(self, model):
        return [block for name in self.block_lists for block in getattr(model, name)]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed))


def residuals(count, num_tokens=NUM_TOKENS, seed=4):
    """Of a ControlNet."""
    return [randn(NUM_SAMPLES, num_tokens, HIDDEN_SIZE, seed=seed + i) for i in range(count)]


def image_and_text(scale=1):
    """Latents of 8 x 8, a text, and times below `scale`."""
    return {
        "hidden_states": randn(NUM_SAMPLES, 4, 8, 8, seed=1),
        "encoder_hidden_states": randn(NUM_SAMPLES, NUM_TEXT, 12, seed=2),
        "timestep": scale * torch.tensor([0.2, 0.5, 0.9]),
    }


def positions(num_tokens, image=0):
    places = torch.arange(num_tokens)
    return torch.stack([torch.full_like(places, image), places // 4, places % 4], dim=1).float()


def flux_arguments(num_reference_tokens=0, controlnet=False, mask=False):
    N, L = NUM_SAMPLES, NUM_TOKENS + num_reference_tokens
    arguments = image_and_text() | {
        "hidden_states": randn(N, L, 4, seed=1),
        "pooled_projections": randn(N, 8, seed=3),
        "guidance": torch.tensor([3.0, 3.5, 4.0]),
        "img_ids": torch.cat([positions(NUM_TOKENS), positions(num_reference_tokens, image=1)]),
        "txt_ids": torch.zeros(NUM_TEXT, 3),
    }
    if controlnet:
        arguments["controlnet_block_samples"] = residuals(2, L)
        arguments["controlnet_single_block_samples"] = residuals(4, L, seed=6)
    if mask:
        seen = randn(N, 1, NUM_TEXT + L, NUM_TEXT + L, seed=10) > -0.5
        seen |= torch.eye(NUM_TEXT + L, dtype=torch.bool)
        arguments["joint_attention_kwargs"] = {"attention_mask": seen}
    return arguments


def sd3_arguments(controlnet=False):
    further = {"block_controlnet_hidden_states": residuals(2)} if controlnet else {}
    return {**image_and_text(1000), "pooled_projections": randn(NUM_SAMPLES, 8, seed=3), **further}


def pixart_arguments(mask=False):
    further = {"attention_mask": (randn(NUM_SAMPLES, NUM_TOKENS, seed=4) > -0.5).float()} if mask else {}
    return image_and_text() | {
        "timestep": torch.tensor([200, 500, 900]),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        **further,
    }


def wan_arguments(timestep_per_token=False):
    per_token = 100 * torch.arange(NUM_SAMPLES)[:, None] + torch.arange(NUM_TOKENS)
    return image_and_text() | {
        "hidden_states": randn(NUM_SAMPLES, 4, 4, 4, 4, seed=1),  # 4 frames of 2 * 2 tokens
        "timestep": per_token if timestep_per_token else torch.tensor([200, 500, 900]),
    }


FAMILIES = {
    "flux": Family(
        "FluxTransformer2DModel",
        {
            **{"num_layers": 3, "num_single_layers": 4, "in_channels": 4, "axes_dims_rope": (4, 4, 8)},
            **{"joint_attention_dim": 12, "pooled_projection_dim": 8, "guidance_embeds": True},
        },
        flux_arguments,
        ("transformer_blocks", "single_transformer_blocks"),
    ),
    "sd3": Family(
        "SD3Transformer2DModel",
        {
            **{"num_layers": 5, **FOUR_CHANNELS, **JOINT, "pooled_projection_dim": 8},
            **{"pos_embed_max_size": 8, "dual_attention_layers": (0, 2), "qk_norm": "rms_norm"},
        },
        sd3_arguments,
    ),
    "pixart": Family(
        "PixArtTransformer2DModel",
        {"num_layers": 5, "cross_attention_dim": HIDDEN_SIZE, "sample_size": 8, "caption_channels": 12},
        pixart_arguments,
    ),
    "auraflow": Family(
        "AuraFlowTransformer2DModel",
        {"num_mmdit_layers": 2, "num_single_dit_layers": 4, **JOINT, "pos_embed_max_size": 16},
        image_and_text,
        ("joint_transformer_blocks", "single_transformer_blocks"),
    ),
    "wan": Family(
        "WanTransformer3DModel",
        {
            **{"num_layers": 5, **FOUR_CHANNELS, "text_dim": 12, "freq_dim": 16, "ffn_dim": 64},
            "rope_max_seq_len": 32,
        },
        wan_arguments,
        ("blocks",),
    ),
}
