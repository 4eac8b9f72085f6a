"""Qwen-Image: joint blocks; the positions of image and text are two tables of complex numbers.

2.1 has one sequence: text and reference images, which do not see what comes after them, then the image.
"""

import math

import torch
import torch.nn as nn

from routing.adapters.adapter import Adapter, Arguments, BlockList
from routing.adapters.families.parts import (
    INPUTS,
    TEXT_DIM,
    Built,
    Family,
    Sizes,
    axes_of,
    checked_by,
    joint_table,
    rotary_beside_text,
)

BLOCK_21 = {
    "joint": True,
    "by_token": {
        "rotary_emb": joint_table,
        "key_valid": lambda mask, kept: kept.gather_joint(mask),  # (N, P + T)
        # (P + T,), of all samples: which tokens are those of the image.
        "target_token_mask": lambda mask, kept: mask[: kept.num_prefix_tokens + kept.ids.shape[1]],
    },
    "shared": ("modulation", "segments"),  # segments are those of the prefix
}


def _num_reference_tokens(model: nn.Module, arguments: Arguments) -> int:
    """Count the tokens of reference images; with layers, of the last entry, which they are taken from."""
    shapes = arguments["img_shapes"][0]  # as in the model, those of all samples
    others = shapes[1:] if isinstance(shapes, list) else []
    return sum(map(math.prod, others[-1:] if model.config.use_layer3d_rope else others))


def _num_condition_tokens(model: nn.Module, arguments: Arguments) -> int:
    """Count the tokens of text and reference images, which come before those of the image."""
    num_text_tokens = int((~arguments["img_mask"][0]).sum())  # SYNC: the model does the same
    num_target_tokens = math.prod(arguments["img_shapes"][0][-1])
    return num_text_tokens + arguments["hidden_states"].shape[1] - num_target_tokens


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


def qwen_image_21(sizes: Sizes) -> Built:
    """A reference image of four tokens within a text with padding."""
    from diffusers import QwenImage21Transformer2DModel

    options = {"num_layers": sizes.depth, "axes_dims_rope": axes_of(sizes.head_dim)}
    num_target_slots = sizes.side**2 // 4  # the text encoder has one for four tokens
    slots = torch.zeros(sizes.num_text + num_target_slots, dtype=torch.bool)
    slots[1], slots[sizes.num_text :] = True, True
    return QwenImage21Transformer2DModel(**options, **sizes.heads, context_in_dim=TEXT_DIM), {
        "hidden_states": torch.cat([torch.randn(sizes.batch, 4, 64), sizes.tokens(64)], dim=1),
        "encoder_hidden_states": sizes.text,
        "encoder_hidden_states_mask": sizes.text_mask,
        "timestep": torch.rand(sizes.batch),
        "img_shapes": [[(1, 2, 2), (1, sizes.side, sizes.side)]] * sizes.batch,
        "img_mask": slots.expand(sizes.batch, -1),
    }


FAMILIES = {
    "QwenImageTransformer2DModel": Family(
        Adapter(
            block_lists=(
                BlockList(
                    "transformer_blocks",
                    output=1,
                    by_token={
                        "image_rotary_emb": rotary_beside_text,
                        "modulate_index": lambda index, kept: kept.gather(index),  # (N, T + S)
                    },
                    shared=(
                        *("encoder_hidden_states", "encoder_hidden_states_mask", "temb"),
                        "joint_attention_kwargs",
                    ),
                ),
            ),
            accepts=(
                *(*INPUTS, "encoder_hidden_states_mask", "img_shapes", "additional_t_cond"),
                "attention_kwargs",
            ),
            num_suffix_tokens=_num_reference_tokens,
            check=checked_by(("QwenDoubleStreamAttnProcessor2_0",), "attention_kwargs"),
        ),
        qwen_image,
    ),
    "QwenImage21Transformer2DModel": Family(
        Adapter(
            block_lists=(BlockList("transformer_blocks", **BLOCK_21),),
            accepts=(*INPUTS, "encoder_hidden_states_mask", "img_shapes", "img_mask", "attention_kwargs"),
            num_prefix_tokens=_num_condition_tokens,
            # The processor for flex attention takes a block mask over all tokens at their places.
            check=checked_by(("QwenImage21AttnProcessor",), "attention_kwargs"),
        ),
        qwen_image_21,
    ),
}
