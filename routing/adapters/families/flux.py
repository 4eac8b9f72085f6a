"""FLUX and Kontext: double blocks, then single ones, all with rotary positions."""

import torch

from routing.adapters.adapter import Adapter, BlockList
from routing.adapters.families.parts import (
    INPUTS,
    POOLED_DIM,
    TEXT_DIM,
    Built,
    Family,
    Sizes,
    axes_of,
    checked_by,
    double_and_single,
    joint_mask,
    joint_rotary,
    num_reference_tokens,
)

BLOCK = {
    "output": 1,
    "by_token": {"image_rotary_emb": joint_rotary, "joint_attention_kwargs": joint_mask},
    "shared": ("encoder_hidden_states", "temb"),
}
RESIDUALS = ("controlnet_block_samples", "controlnet_single_block_samples")


def flux(sizes: Sizes) -> Built:
    """A third of double blocks."""
    from diffusers import FluxTransformer2DModel

    options = double_and_single(sizes)
    options |= {"axes_dims_rope": axes_of(sizes.head_dim), "pooled_projection_dim": POOLED_DIM}
    return FluxTransformer2DModel(**options, **sizes.heads, joint_attention_dim=TEXT_DIM), {
        "hidden_states": sizes.tokens(64),
        "encoder_hidden_states": sizes.text,
        "pooled_projections": torch.randn(sizes.batch, POOLED_DIM),
        "timestep": torch.rand(sizes.batch),
        "img_ids": sizes.positions,
        "txt_ids": torch.zeros(sizes.num_text, 3),
    }


FAMILIES = {
    "FluxTransformer2DModel": Family(
        Adapter(
            block_lists=(
                BlockList("transformer_blocks", **BLOCK),
                BlockList("single_transformer_blocks", **BLOCK),
            ),
            accepts=(
                *(*INPUTS, "pooled_projections", "img_ids", "txt_ids", "guidance", "joint_attention_kwargs"),
                *(*RESIDUALS, "controlnet_blocks_repeat"),
            ),
            num_prefix_tokens=lambda model, arguments: arguments["encoder_hidden_states"].shape[1],
            num_suffix_tokens=num_reference_tokens(0),
            residuals=RESIDUALS,
            check=checked_by(("FluxAttnProcessor",), "joint_attention_kwargs", ("scale", "attention_mask")),
        ),
        flux,
    ),
}
