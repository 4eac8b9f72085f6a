"""FLUX.3: blocks of the image alone, then blocks on text, image and reference images together."""

import torch
import torch.nn as nn
from torch.nn.functional import pad

from routing.adapters.adapter import Adapter, Arguments, BlockList
from routing.adapters.families.parts import (
    INPUTS,
    TEXT_DIM,
    Built,
    Family,
    Sizes,
    checked_by,
    double_and_single,
    joint_rotary,
    num_text_tokens,
    rotary,
)

REFERENCE = ("image_cond_hidden_states", "image_cond_ids")


def _num_reference_tokens(model: nn.Module, arguments: Arguments) -> int:
    reference = arguments.get(REFERENCE[0])
    return 0 if reference is None else reference.shape[1]


def flux3(sizes: Sizes) -> Built:
    """A third of the blocks for the image alone; a reference image of three tokens."""
    from diffusers import Flux3Transformer2DModel

    options = {**double_and_single(sizes), "axes_dims_rope": (sizes.head_dim // 4,) * 4}
    return Flux3Transformer2DModel(**options, **sizes.heads, joint_attention_dim=TEXT_DIM), {
        "hidden_states": sizes.tokens(128),
        "encoder_hidden_states": sizes.text,
        "timestep": torch.rand(sizes.batch),
        "img_ids": pad(sizes.positions, (0, 1)),
        "txt_ids": pad(torch.arange(float(sizes.num_text))[:, None], (3, 0)),
        "image_cond_hidden_states": torch.randn(sizes.batch, 3, 128),
        "image_cond_ids": pad(sizes.positions[:3], (0, 1)) + torch.tensor([10.0, 0, 0, 0]),
    }


FAMILIES = {
    "Flux3Transformer2DModel": Family(
        Adapter(
            block_lists=(
                BlockList(
                    "mode_blocks.image",
                    by_token={
                        "temb_mod": lambda temb, kept: kept.gather(temb),  # (N, T, 3 D)
                        "image_rotary_emb": rotary,
                    },
                ),
                BlockList(
                    "single_transformer_blocks",
                    output=1,
                    by_token={
                        "temb_mod": lambda temb, kept: kept.gather(temb),  # (N, T + S, 3 D)
                        "image_rotary_emb": joint_rotary,
                    },
                    shared=("encoder_hidden_states", "temb_mod_context"),
                    num_suffix_tokens=_num_reference_tokens,
                ),
            ),
            accepts=(*INPUTS, "img_ids", "txt_ids", *REFERENCE, "target_timestep", "attention_kwargs"),
            num_prefix_tokens=num_text_tokens,
            check=checked_by(("Flux3AttnProcessor",), "attention_kwargs"),
        ),
        flux3,
    ),
}
