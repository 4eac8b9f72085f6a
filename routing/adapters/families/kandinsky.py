"""Kandinsky 5 and 6: attention to the video, then to the text; rotary positions, one matrix for each pair."""

from typing import Any

import torch
import torch.nn as nn

from routing.adapters.adapter import Adapter, BlockList, TokenSelection
from routing.adapters.families.parts import (
    INPUTS,
    POOLED_DIM,
    TEXT_DIM,
    Built,
    Family,
    Sizes,
    axes_of,
    checked_by,
)

BLOCK_5 = {
    "tokens": "visual_embed",
    "by_token": {"rope": lambda table, kept: kept.gather(table)},  # (N, T, 1, d, 2, 2)
    "shared": ("text_embed", "time_embed"),
}


def _rope_of_all(table: torch.Tensor, kept: TokenSelection) -> torch.Tensor:
    return kept.gather(table.unsqueeze(0))  # (T, 1, d, 2, 2) -> (N, K, 1, d, 2, 2)


# Without sound, whose queries attend to the video: the proof does not see them.
BLOCK_6 = {
    "tokens": "vis",
    "output": 0,
    "by_token": {"vis_rope": _rope_of_all},
    "shared": ("text_v", "text_a", "time_embed", "attn_mask"),
}
FRAMES = 4


def _options(sizes: Sizes) -> dict[str, Any]:
    options = {"model_dim": sizes.width, "ff_dim": 4 * sizes.width, "time_dim": sizes.width}
    options |= {"num_text_blocks": 1, "num_visual_blocks": sizes.depth, "axes_dims": axes_of(sizes.head_dim)}
    return {**options, "in_text_dim": TEXT_DIM, "in_text_dim2": POOLED_DIM}


def _inputs(sizes: Sizes, channels: int) -> dict[str, torch.Tensor]:
    """4 frames of half the side."""
    return {
        "hidden_states": sizes.image(channels, patch_size=1, frames=FRAMES).movedim(1, -1),
        "encoder_hidden_states": sizes.text,
        "pooled_projections": torch.randn(sizes.batch, POOLED_DIM),
        "timestep": 1000 * torch.rand(sizes.batch),
    }


def _in_type_of_weights(layer: nn.Linear, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    return (args[0].to(layer.weight.dtype),)


def kandinsky5(sizes: Sizes) -> Built:
    """Text without padding: the model takes no mask."""
    from diffusers import Kandinsky5Transformer3DModel

    model = Kandinsky5Transformer3DModel(**_options(sizes))
    # It embeds the timestep in float32, whatever the type of its weights.
    model.time_embeddings.in_layer.register_forward_pre_hook(_in_type_of_weights)
    return model, {
        **_inputs(sizes, channels=4),
        "visual_rope_pos": tuple(torch.arange(n) for n in (FRAMES, sizes.side // 2, sizes.side // 2)),
        "text_rope_pos": torch.arange(sizes.num_text),
    }


def kandinsky6(sizes: Sizes) -> Built:
    """Video without sound; text with padding."""
    from diffusers import Kandinsky6Transformer3DModel

    options = {"text_token_padding": True, "ca_rope": True, "cross_gates": True, "fix_modulation": True}
    return Kandinsky6Transformer3DModel(**_options(sizes), **options), {
        **_inputs(sizes, channels=33),  # the latent, that of the condition, and a mask
        "encoder_attention_mask": sizes.text_mask,
    }


FAMILIES = {
    "Kandinsky5Transformer3DModel": Family(
        Adapter(
            block_lists=(BlockList("visual_transformer_blocks", **BLOCK_5),),
            accepts=(*INPUTS, "pooled_projections", "visual_rope_pos", "text_rope_pos"),
            check=checked_by(("Kandinsky5AttnProcessor",)),
        ),
        kandinsky5,
    ),
    "Kandinsky6Transformer3DModel": Family(
        Adapter(
            block_lists=(BlockList("visual_transformer_blocks", **BLOCK_6),),
            accepts=(*INPUTS, "pooled_projections", "encoder_attention_mask"),
            check=checked_by(("Kandinsky6AttnProcessor",)),
        ),
        kandinsky6,
    ),
    "Kandinsky6SRTransformer3DModel": Family(refused="its attention chooses among tiles of 8 x 8 tokens"),
}
