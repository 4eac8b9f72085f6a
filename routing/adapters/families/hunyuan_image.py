"""HunyuanImage: double blocks, then single ones; in attention the text comes after the image."""

import torch

from routing.adapters.adapter import Adapter, BlockList
from routing.adapters.families.parts import (
    INPUTS,
    TEXT_DIM,
    Built,
    Family,
    Sizes,
    checked_by,
    double_and_single,
    mask_before_text,
    rotary,
)

BLOCK = {
    "output": 0,
    "by_token": {"image_rotary_emb": rotary, "attention_mask": mask_before_text},
    "shared": ("encoder_hidden_states", "temb"),
}
PROCESSORS = ("HunyuanImageAttnProcessor", "AttnProcessor2_0")  # of the image, and of the text before


def hunyuan_image(sizes: Sizes) -> Built:
    """A third of double blocks; text with padding."""
    from diffusers import HunyuanImageTransformer2DModel

    options = double_and_single(sizes)
    options |= {"rope_axes_dim": (sizes.head_dim // 2,) * 2, "text_embed_dim": TEXT_DIM}
    return HunyuanImageTransformer2DModel(**options, **sizes.heads), {
        "hidden_states": sizes.image(64, patch_size=1),
        "encoder_hidden_states": sizes.text,
        "timestep": 1000 * torch.rand(sizes.batch),
        "encoder_attention_mask": sizes.text_mask,
    }


FAMILIES = {
    "HunyuanImageTransformer2DModel": Family(
        Adapter(
            block_lists=(
                BlockList("transformer_blocks", **BLOCK),
                BlockList("single_transformer_blocks", **BLOCK),
            ),
            accepts=(*INPUTS, "encoder_attention_mask", "attention_kwargs"),
            check=checked_by(PROCESSORS, "attention_kwargs"),
        ),
        hunyuan_image,
    ),
}
