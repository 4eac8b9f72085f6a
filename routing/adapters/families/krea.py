"""Krea 2: the text comes first in one sequence, all of it with rotary positions."""

import torch

from routing.adapters.adapter import Adapter, BlockList
from routing.adapters.families.parts import (
    INPUTS,
    TEXT_DIM,
    Built,
    Family,
    Sizes,
    axes_of,
    checked_by,
    gather_mask,
    joint_rotary,
)

BLOCK = {
    "joint": True,
    "by_token": {
        "image_rotary_emb": joint_rotary,
        "attention_mask": lambda mask, kept: gather_mask(mask, kept.gather_joint),  # (N, 1, 1, P + T)
    },
    "shared": ("temb",),
}
NUM_TEXT_LAYERS = 3


def krea2(sizes: Sizes) -> Built:
    """Text of a few layers, with padding; all heads have keys of their own."""
    from diffusers import Krea2Transformer2DModel

    options = {"num_layers": sizes.depth, "num_key_value_heads": sizes.num_heads}
    options |= {"intermediate_size": 4 * sizes.width, "axes_dims_rope": axes_of(sizes.head_dim)}
    options |= {"num_text_layers": NUM_TEXT_LAYERS, "text_hidden_dim": TEXT_DIM, "text_intermediate_size": 32}
    options |= {"text_num_attention_heads": 2, "text_num_key_value_heads": 2}
    return Krea2Transformer2DModel(**options, **sizes.heads), {
        "hidden_states": sizes.tokens(64),
        "encoder_hidden_states": torch.stack([sizes.text for _ in range(NUM_TEXT_LAYERS)], dim=2),
        "timestep": torch.rand(sizes.batch),
        "position_ids": torch.cat([torch.zeros(sizes.num_text, 3), sizes.positions]),
        "encoder_attention_mask": sizes.text_mask,
    }


FAMILIES = {
    "Krea2Transformer2DModel": Family(
        Adapter(
            block_lists=(BlockList("transformer_blocks", **BLOCK),),
            accepts=(*INPUTS, "position_ids", "encoder_attention_mask", "attention_kwargs"),
            num_prefix_tokens=lambda model, arguments: arguments["encoder_hidden_states"].shape[1],
            check=checked_by(("Krea2AttnProcessor",), "attention_kwargs"),
        ),
        krea2,
    ),
}
