"""Nucleus: the image attends to itself and the text at once; experts choose among the tokens of a window."""

from typing import Any

import torch
import torch.nn as nn

from routing.adapters.adapter import Adapter, BlockList, TokenSelection
from routing.adapters.families.parts import (
    INPUTS,
    TEXT_DIM,
    Built,
    Family,
    Sizes,
    axes_of,
    checked_by,
    rotary_beside_text,
)


def _mask(attention_kwargs: dict[str, Any], kept: TokenSelection) -> dict[str, Any]:
    mask = attention_kwargs.get("attention_mask")  # (N, T + P)
    if mask is None:
        return attention_kwargs
    return {**attention_kwargs, "attention_mask": kept.gather_leading(mask)}


BLOCK = {
    "by_token": {"image_rotary_emb": rotary_beside_text, "attention_kwargs": _mask},
    "shared": ("encoder_hidden_states", "temb"),
}
NUM_EXPERTS = 8  # each takes all tokens: as many for a token as in the published model, which has 128


def nucleus(sizes: Sizes) -> Built:
    """Text with padding; the first three blocks and the last one have no experts."""
    from diffusers import NucleusMoEImageTransformer2DModel

    options = {"num_layers": sizes.depth, "in_channels": 64, "joint_attention_dim": TEXT_DIM}
    options |= {"num_experts": NUM_EXPERTS, "capacity_factors": float(NUM_EXPERTS)}
    options |= {"moe_intermediate_dim": sizes.width, "axes_dims_rope": axes_of(sizes.head_dim)}
    options |= {"mlp_ratio": max(4.0, 192 / sizes.width)}  # the layers in between are of multiples of 128
    model = NucleusMoEImageTransformer2DModel(**options, **sizes.heads, patch_size=1)
    for block in model.transformer_blocks:
        for parameter in block.img_mlp.experts.parameters() if block.moe_enabled else ():
            nn.init.normal_(parameter, std=0.1)  # diffusers leaves them as they are in memory
    return model, {
        "hidden_states": sizes.tokens(64),
        "encoder_hidden_states": sizes.text,
        "encoder_hidden_states_mask": sizes.text_mask,
        "timestep": torch.rand(sizes.batch),
        "img_shapes": [(1, sizes.side, sizes.side)] * sizes.batch,
    }


FAMILIES = {
    "NucleusMoEImageTransformer2DModel": Family(
        Adapter(
            block_lists=(BlockList("transformer_blocks", **BLOCK),),
            accepts=(*INPUTS, "encoder_hidden_states_mask", "img_shapes", "attention_kwargs"),
            check=checked_by(("NucleusMoEAttnProcessor2_0",), "attention_kwargs"),
        ),
        nucleus,
    ),
}
