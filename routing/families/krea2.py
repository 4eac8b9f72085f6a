"""Krea 2: one sequence of text and image, with states of several layers of the text encoder."""

import torch

from routing.adapter import Adapter, BlockList
from routing.families.parts import (
    INPUTS,
    TEXT_DIM,
    Built,
    Family,
    Sizes,
    checked_by,
    joint_rotary,
    num_text_tokens,
    text_mask,
)

NUM_TEXT_LAYERS = 3


def krea2(sizes: Sizes) -> Built:
    """All blocks are single ones."""
    from diffusers import Krea2Transformer2DModel

    text = {"text_hidden_dim": TEXT_DIM, "num_text_layers": NUM_TEXT_LAYERS, "text_intermediate_size": 32}
    text |= {"text_num_attention_heads": 2, "text_num_key_value_heads": 2}
    text |= {"num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1, "timestep_embed_dim": 16}
    quarter = sizes.head_dim // 4
    options = {"num_layers": sizes.depth, "num_key_value_heads": sizes.num_heads, **text}
    options |= {"intermediate_size": 2 * sizes.width, "axes_dims_rope": (2 * quarter, quarter, quarter)}
    return Krea2Transformer2DModel(**options, **sizes.heads), {
        "hidden_states": sizes.tokens(64),
        "encoder_hidden_states": torch.randn(sizes.batch, sizes.num_text, NUM_TEXT_LAYERS, TEXT_DIM),
        "encoder_attention_mask": text_mask(sizes),
        "timestep": torch.rand(sizes.batch),
        "position_ids": torch.cat([torch.zeros(sizes.num_text, 3), sizes.positions]),
    }


FAMILIES = {
    "Krea2Transformer2DModel": Family(
        Adapter(
            block_lists=(
                BlockList(
                    "transformer_blocks",
                    joint=True,
                    by_token={
                        "image_rotary_emb": joint_rotary,
                        "attention_mask": lambda mask, kept: kept.gather_joint(mask, -1),  # (N, 1, 1, P + T)
                    },
                    shared=("temb",),
                ),
            ),
            accepts=(*INPUTS, "encoder_attention_mask", "position_ids"),
            num_prefix_tokens=num_text_tokens,
            check=checked_by(("Krea2AttnProcessor",)),
        ),
        krea2,
    ),
}
