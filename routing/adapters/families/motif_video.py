"""Motif-Video: double blocks, then single ones; in attention the text comes last, and is seen once more."""

import torch
import torch.nn as nn

from routing.adapters.adapter import Adapter, Arguments, BlockList
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
    mask_before_text,
    rotary,
)

BLOCK = {
    "output": 0,
    "by_token": {"image_rotary_emb": rotary, "attention_mask": mask_before_text},
    "shared": ("encoder_hidden_states", "temb", "image_embed_seq_len"),
}
PROCESSORS = ("MotifVideoAttnProcessor2_0", "MotifVideoCrossAttnProcessor2_0")


def _check(model: nn.Module, arguments: Arguments) -> None:
    checked_by(PROCESSORS, "attention_kwargs")(model, arguments)
    if model.num_decoder_layers:  # they start from the tokens before all blocks
        raise ValueError(
            "num_decoder_layers of MotifVideoTransformer3DModel does not go together with routing"
        )


def motif_video(sizes: Sizes) -> Built:
    """A third of double blocks; 4 frames of half the side, and a reference image."""
    from diffusers import MotifVideoTransformer3DModel

    options = double_and_single(sizes)
    options |= {"rope_axes_dim": axes_of(sizes.head_dim), "text_embed_dim": TEXT_DIM}
    options |= {"image_embed_dim": POOLED_DIM}
    options |= {"enable_text_cross_attention_dual": True, "enable_text_cross_attention_single": True}
    model = MotifVideoTransformer3DModel(**options, **sizes.heads)
    # It casts timesteps to half precision alone; a model in double precision needs them in that.
    embedder = model.time_text_embed.timestep_embedder
    embedder.register_forward_pre_hook(lambda module, args: args[0].to(module.linear_1.weight.dtype))
    return model, {
        "hidden_states": sizes.image(33, patch_size=1, frames=4),
        "encoder_hidden_states": sizes.text,
        "encoder_attention_mask": sizes.text_mask,
        "image_embeds": torch.randn(sizes.batch, 3, POOLED_DIM),
        "timestep": torch.randint(1000, (sizes.batch,)),
    }


FAMILIES = {
    "MotifVideoTransformer3DModel": Family(
        Adapter(
            block_lists=(
                BlockList("transformer_blocks", **BLOCK),
                BlockList("single_transformer_blocks", **BLOCK),
            ),
            accepts=(*INPUTS, "encoder_attention_mask", "image_embeds", "attention_kwargs"),
            check=_check,
        ),
        motif_video,
    ),
}
