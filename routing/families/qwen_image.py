"""Qwen-Image: joint blocks; the positions of image and text are two tables of complex numbers."""

import torch

from routing.adapter import Adapter, BlockList
from routing.families.parts import (
    INPUTS,
    TEXT_DIM,
    Built,
    Family,
    Sizes,
    axes_of,
    checked_by,
    rotary_beside_text,
)


def qwen_image(sizes: Sizes) -> Built:
    """All blocks are joint."""
    from diffusers import QwenImageTransformer2DModel

    options = {"num_layers": sizes.depth, "axes_dims_rope": axes_of(sizes.head_dim)}
    return QwenImageTransformer2DModel(**options, **sizes.heads, joint_attention_dim=TEXT_DIM), {
        "hidden_states": sizes.tokens(64),
        "encoder_hidden_states": sizes.text,
        "encoder_hidden_states_mask": sizes.text_mask,
        "timestep": torch.rand(sizes.batch),
        "img_shapes": [[(1, sizes.side, sizes.side)]] * sizes.batch,
    }


FAMILIES = {
    "QwenImageTransformer2DModel": Family(
        Adapter(
            block_lists=(
                BlockList(
                    "transformer_blocks",
                    output=1,
                    by_token={"image_rotary_emb": rotary_beside_text},
                    shared=(
                        *("encoder_hidden_states", "encoder_hidden_states_mask", "temb"),
                        "joint_attention_kwargs",
                    ),
                ),
            ),
            accepts=(*INPUTS, "encoder_hidden_states_mask", "img_shapes"),
            check=checked_by(("QwenDoubleStreamAttnProcessor2_0",)),
        ),
        qwen_image,
    ),
}
