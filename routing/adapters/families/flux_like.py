"""Models built like FLUX: Bria, LongCat-Image, Ovis-Image."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn as nn

from routing.adapters.adapter import Adapter, BlockList
from routing.adapters.families.parts import (
    INPUTS,
    TEXT_DIM,
    Built,
    Family,
    Sizes,
    axes_of,
    checked_by,
    double_and_single,
    joint_rotary,
    num_reference_tokens,
    num_text_tokens,
)

BLOCK = {"output": 1, "by_token": {"image_rotary_emb": joint_rotary}}
IMAGE_PLANE = 1  # of LongCat-Image: text is in plane 0, references are in plane 2


def like_flux(name: str, timestep: float, plane: float = 0) -> Callable[[Sizes], Built]:
    """Return what builds a model of a class; a third of its blocks are double.

    Args:
        timestep: the largest.
        plane: the first coordinate of the image.
    """

    def build(sizes: Sizes) -> Built:
        import diffusers

        options = {**double_and_single(sizes), "axes_dims_rope": axes_of(sizes.head_dim)}
        model: nn.Module = getattr(diffusers, name)(**options, **sizes.heads, joint_attention_dim=TEXT_DIM)
        return model, {
            "hidden_states": sizes.tokens(64),
            "encoder_hidden_states": sizes.text,
            "timestep": timestep * torch.rand(sizes.batch),
            "img_ids": sizes.positions + torch.tensor([plane, 0.0, 0.0]),
            "txt_ids": torch.zeros(sizes.num_text, 3),
        }

    return build


def adapter(processor: str, attention_kwargs: str, in_blocks: str) -> Adapter:
    """Return the adapter of a class, by its processor and what it and its blocks call further arguments."""
    shared = ("encoder_hidden_states", "temb", *([in_blocks] if in_blocks else []))
    return Adapter(
        block_lists=(
            BlockList("transformer_blocks", shared=shared, **BLOCK),
            BlockList("single_transformer_blocks", shared=shared, **BLOCK),
        ),
        accepts=(*INPUTS, "img_ids", "txt_ids", *([attention_kwargs] if attention_kwargs else [])),
        num_prefix_tokens=num_text_tokens,
        check=checked_by((processor,), attention_kwargs),
    )


FAMILIES = {
    "BriaTransformer2DModel": Family(
        adapter("BriaAttnProcessor", "attention_kwargs", "attention_kwargs"),
        like_flux("BriaTransformer2DModel", 1000.0),
    ),
    "LongCatImageTransformer2DModel": Family(
        replace(
            adapter("LongCatImageAttnProcessor", "", ""), num_suffix_tokens=num_reference_tokens(IMAGE_PLANE)
        ),
        like_flux("LongCatImageTransformer2DModel", 1.0, IMAGE_PLANE),
    ),
    "OvisImageTransformer2DModel": Family(
        adapter("OvisImageAttnProcessor", "joint_attention_kwargs", "joint_attention_kwargs"),
        like_flux("OvisImageTransformer2DModel", 1.0),
    ),
}
