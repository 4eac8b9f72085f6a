"""Stable Diffusion 3: joint blocks, positions are added before."""

import torch

from routing.adapters.adapter import Adapter, BlockList
from routing.adapters.families.parts import INPUTS, POOLED_DIM, TEXT_DIM, Built, Family, Sizes, checked_by

BLOCK = {"output": 1, "shared": ("encoder_hidden_states", "temb", "joint_attention_kwargs")}
PROCESSORS = ("JointAttnProcessor2_0", "FusedJointAttnProcessor2_0")


def sd3(sizes: Sizes) -> Built:
    """All blocks are joint."""
    from diffusers import SD3Transformer2DModel

    options = {"sample_size": 2 * sizes.side, "pos_embed_max_size": sizes.side, "num_layers": sizes.depth}
    options |= {"joint_attention_dim": TEXT_DIM, "caption_projection_dim": sizes.width}
    return SD3Transformer2DModel(**options, **sizes.heads, pooled_projection_dim=POOLED_DIM), {
        "hidden_states": sizes.image(16),
        "encoder_hidden_states": sizes.text,
        "pooled_projections": torch.randn(sizes.batch, POOLED_DIM),
        "timestep": 1000 * torch.rand(sizes.batch),
    }


FAMILIES = {
    "SD3Transformer2DModel": Family(
        Adapter(
            block_lists=(BlockList("transformer_blocks", **BLOCK),),
            accepts=(
                *(*INPUTS, "pooled_projections", "joint_attention_kwargs"),
                "block_controlnet_hidden_states",
            ),
            residuals=("block_controlnet_hidden_states",),
            check=checked_by(PROCESSORS, "joint_attention_kwargs"),
        ),
        sd3,
    ),
}
