"""Chroma: FLUX without its modulations by pooled text; single blocks take text and image as one sequence."""

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
    double_and_single,
    joint_rotary,
    num_text_tokens,
)

GATHERED = {
    "image_rotary_emb": joint_rotary,
    "attention_mask": lambda mask, kept: kept.gather_joint(mask),  # (N, P + T)
}


def chroma(sizes: Sizes) -> Built:
    """A third of double blocks."""
    from diffusers import ChromaTransformer2DModel

    approximator = {"approximator_num_channels": 16, "approximator_hidden_dim": 32, "approximator_layers": 2}
    options = {**double_and_single(sizes), **approximator, "axes_dims_rope": axes_of(sizes.head_dim)}
    image = torch.ones(sizes.batch, sizes.side**2, dtype=torch.bool)
    return ChromaTransformer2DModel(**options, **sizes.heads, joint_attention_dim=TEXT_DIM), {
        "hidden_states": sizes.tokens(64),
        "encoder_hidden_states": sizes.text,
        "timestep": torch.rand(sizes.batch),
        "img_ids": sizes.positions,
        "txt_ids": torch.zeros(sizes.num_text, 3),
        "attention_mask": torch.cat([sizes.text_mask, image], dim=1),
    }


FAMILIES = {
    "ChromaTransformer2DModel": Family(
        Adapter(
            block_lists=(
                BlockList(
                    "transformer_blocks",
                    output=1,
                    by_token=GATHERED,
                    shared=("encoder_hidden_states", "temb", "joint_attention_kwargs"),
                ),
                BlockList(
                    "single_transformer_blocks",
                    joint=True,
                    by_token=GATHERED,
                    shared=("temb", "joint_attention_kwargs"),
                ),
            ),
            accepts=(*INPUTS, "img_ids", "txt_ids", "attention_mask", "joint_attention_kwargs"),
            num_prefix_tokens=num_text_tokens,
            check=checked_by(("FluxAttnProcessor",), "joint_attention_kwargs"),
        ),
        chroma,
    ),
}
