"""FLUX.2: double blocks with modulations that all share, then single ones on text and image together."""

import torch
from torch.nn.functional import pad

from routing.adapters.adapter import Adapter, BlockList
from routing.adapters.families.parts import (
    INPUTS,
    TEXT_DIM,
    Built,
    Family,
    Sizes,
    checked_by,
    double_and_single,
    joint_rotary,
    num_reference_tokens,
    num_text_tokens,
)

PROCESSORS = ("Flux2AttnProcessor", "Flux2ParallelSelfAttnProcessor")


def flux2(sizes: Sizes) -> Built:
    """A third of double blocks."""
    from diffusers import Flux2Transformer2DModel

    options = {**double_and_single(sizes), "axes_dims_rope": (sizes.head_dim // 4,) * 4}
    return Flux2Transformer2DModel(**options, **sizes.heads, joint_attention_dim=TEXT_DIM), {
        "hidden_states": sizes.tokens(128),
        "encoder_hidden_states": sizes.text,
        "timestep": torch.rand(sizes.batch),
        "img_ids": pad(sizes.positions, (0, 1)),
        "txt_ids": pad(torch.arange(float(sizes.num_text))[:, None], (3, 0)),
        "guidance": torch.full((sizes.batch,), 4.0),
    }


FAMILIES = {
    "Flux2Transformer2DModel": Family(
        Adapter(
            block_lists=(
                BlockList(
                    "transformer_blocks",
                    output=1,
                    by_token={"image_rotary_emb": joint_rotary},
                    shared=(
                        "encoder_hidden_states",
                        "temb_mod_img",
                        "temb_mod_txt",
                        "joint_attention_kwargs",
                    ),
                ),
                BlockList(
                    "single_transformer_blocks",
                    joint=True,
                    by_token={"image_rotary_emb": joint_rotary},
                    shared=("temb_mod",),
                ),
            ),
            accepts=(*INPUTS, "img_ids", "txt_ids", "guidance"),
            num_prefix_tokens=num_text_tokens,
            num_suffix_tokens=num_reference_tokens(0),
            check=checked_by(PROCESSORS),
        ),
        flux2,
    ),
}
