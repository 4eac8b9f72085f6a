"""Allegro: attention to the video, then to the text; the coordinates of tokens are looked up in tables."""

from typing import Any

import torch

from routing.adapters.adapter import Adapter, BlockList, TokenSelection
from routing.adapters.families.parts import INPUTS, TEXT_DIM, Built, Family, Sizes, checked_by, gather_each


def _rotary(tables_and_coordinates: tuple[Any, Any], kept: TokenSelection) -> tuple[Any, Any]:
    tables, coordinates = tables_and_coordinates  # three (1, T)
    return tables, gather_each(coordinates, kept)


BLOCK = {
    "by_token": {"image_rotary_emb": _rotary},
    "shared": ("encoder_hidden_states", "temb", "encoder_attention_mask"),
}


def _positions(sizes: Sizes) -> tuple[Any, Any]:
    """Tables for each axis, and the coordinates of 4 frames of half the side."""
    axes = [torch.arange(4), torch.arange(sizes.side // 2), torch.arange(sizes.side // 2)]
    coordinates = [grid.reshape(1, -1) for grid in torch.meshgrid(*axes, indexing="ij")]
    tables = []
    for axis, channels in zip(axes, torch.ones(sizes.head_dim).chunk(3), strict=True):
        angles = torch.randn(len(axis), len(channels) // 2).repeat(1, 2)
        tables.append((angles.cos(), angles.sin()))
    return tables, coordinates


def allegro(sizes: Sizes) -> Built:
    """4 frames of half the side."""
    from diffusers import AllegroTransformer3DModel

    options = {"num_layers": sizes.depth, "caption_channels": TEXT_DIM, "cross_attention_dim": sizes.width}
    options |= {"sample_height": sizes.side, "sample_width": sizes.side}
    return AllegroTransformer3DModel(**options, **sizes.heads), {
        "hidden_states": sizes.image(4, patch_size=1, frames=4),
        "encoder_hidden_states": sizes.text,
        "encoder_attention_mask": sizes.text_mask,
        "timestep": torch.randint(1000, (sizes.batch,)),
        "image_rotary_emb": _positions(sizes),
    }


FAMILIES = {
    "AllegroTransformer3DModel": Family(
        Adapter(
            block_lists=(BlockList("transformer_blocks", **BLOCK),),
            accepts=(*INPUTS, "encoder_attention_mask", "image_rotary_emb"),
            check=checked_by(("AllegroAttnProcessor2_0",)),
        ),
        allegro,
    ),
}
