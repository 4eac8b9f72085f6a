"""Nucleus: the image attends to itself and the text at once; experts choose among the tokens of a window."""

from typing import Any

import torch
import torch.nn as nn

from routing.adapter import Adapter, BlockList, Kept
from routing.families.parts import INPUTS, TEXT_DIM, Built, Family, Sizes, axes_of, checked_by


class _TablePerSample:
    """A rotary table (N, K, d) in place of one (T, d), of which diffusers makes (T, 1, d)."""

    def __init__(self, table: torch.Tensor):
        self.table = table

    def unsqueeze(self, dim: int) -> torch.Tensor:
        if dim != 1:
            raise ValueError(f"a rotary table that gets dimension {dim} does not go together with routing")
        return self.table.unsqueeze(2)  # (N, K, 1, d)


def _rotary(tables: tuple[torch.Tensor, torch.Tensor], kept: Kept) -> tuple[Any, torch.Tensor]:
    image, text = tables  # (T, d), (P, d)
    return _TablePerSample(kept.gather(image.unsqueeze(0))), text


def _mask(attention_kwargs: dict[str, Any], kept: Kept) -> dict[str, Any]:
    mask = attention_kwargs.get("attention_mask")  # (N, T + P)
    if mask is None:
        return attention_kwargs
    T = kept.num_tokens
    return {**attention_kwargs, "attention_mask": torch.cat([kept.gather(mask[:, :T]), mask[:, T:]], dim=1)}


BLOCK = {
    "by_token": {"image_rotary_emb": _rotary, "attention_kwargs": _mask},
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
            check=checked_by(("NucleusMoEAttnProcessor2_0",), "attention_kwargs", ("scale",)),
        ),
        nucleus,
    ),
}
