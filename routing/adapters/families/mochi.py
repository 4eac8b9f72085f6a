"""Mochi: joint blocks, with learned rotary positions of each head."""

import torch

from routing.adapters.adapter import Adapter, BlockList
from routing.adapters.families.parts import INPUTS, TEXT_DIM, Built, Family, Sizes, checked_by


def mochi(sizes: Sizes) -> Built:
    """One frame."""
    from diffusers import MochiTransformer3DModel

    options = {"num_layers": sizes.depth, "text_embed_dim": TEXT_DIM, "time_embed_dim": 32}
    options |= {"pooled_projection_dim": sizes.width // 2, "max_sequence_length": sizes.num_text}
    return MochiTransformer3DModel(**options, **sizes.heads), {
        "hidden_states": sizes.image(12, frames=1),
        "encoder_hidden_states": sizes.text,
        "encoder_attention_mask": sizes.text_mask,
        "timestep": 1000 * torch.rand(sizes.batch),
    }


FAMILIES = {
    "MochiTransformer3DModel": Family(
        Adapter(
            block_lists=(
                BlockList(
                    "transformer_blocks",
                    output=0,
                    by_token={  # (T, heads, d / 2)
                        "image_rotary_emb": lambda tables, kept: tuple(
                            kept.gather(table.unsqueeze(0)) for table in tables
                        )
                    },
                    shared=("encoder_hidden_states", "temb", "encoder_attention_mask"),
                ),
            ),
            accepts=(*INPUTS, "encoder_attention_mask"),
            check=checked_by(("MochiAttnProcessor2_0",)),
        ),
        mochi,
    ),
}
