"""Lumina-Next and Lumina 2: attention to image and text one after the other, or to one sequence of both."""

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
    gather_mask,
)

NEXT_BLOCK = {
    "by_token": {
        "attention_mask": lambda mask, kept: gather_mask(mask, kept.gather),  # (N, T)
        "image_rotary_emb": lambda table, kept: kept.gather(table),  # (1, T, d)
    },
    "shared": ("encoder_hidden_states", "encoder_mask", "temb", "cross_attention_kwargs"),
}
BLOCK_2 = {
    "joint": True,
    "by_token": {"image_rotary_emb": lambda table, kept: kept.gather_joint(table)},  # (N, P + T, d)
    "shared": ("temb",),
}


def _num_prefix_tokens(model: nn.Module, arguments: Arguments) -> int:
    """Count the tokens of the text without its padding, which the model leaves out before its blocks."""
    lengths = arguments["encoder_attention_mask"].sum(dim=1).tolist()  # SYNC: the model does the same
    if len(set(lengths)) > 1:
        raise ValueError(
            f"encoder_attention_mask: texts of {lengths} tokens leave the images of a batch at different "
            "places, routing takes texts of one length"
        )
    return int(lengths[0])


def lumina_next(sizes: Sizes) -> Built:
    """Text with padding."""
    from diffusers import LuminaNextDiT2DModel
    from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

    options = {"hidden_size": sizes.width, "num_layers": sizes.depth, "cross_attention_dim": TEXT_DIM}
    options |= {"num_attention_heads": sizes.num_heads, "num_kv_heads": sizes.num_heads, "multiple_of": 8}
    return LuminaNextDiT2DModel(**options), {
        "hidden_states": sizes.image(4),
        "encoder_hidden_states": sizes.text,
        "timestep": torch.rand(sizes.batch),
        "encoder_mask": sizes.text_mask,
        "image_rotary_emb": get_2d_rotary_pos_embed_lumina(sizes.head_dim, sizes.side, sizes.side),
        "cross_attention_kwargs": {},  # the model needs it
    }


def lumina2(sizes: Sizes) -> Built:
    """Texts of one length, with one token of padding."""
    from diffusers import Lumina2Transformer2DModel

    options = {"hidden_size": sizes.width, "num_layers": sizes.depth, "cap_feat_dim": TEXT_DIM}
    options |= {"num_attention_heads": sizes.num_heads, "num_kv_heads": sizes.num_heads, "multiple_of": 8}
    mask = torch.arange(sizes.num_text).expand(sizes.batch, -1) < sizes.num_text - 1
    return Lumina2Transformer2DModel(**options, axes_dim_rope=axes_of(sizes.head_dim)), {
        "hidden_states": sizes.image(16),
        "encoder_hidden_states": sizes.text,
        "timestep": torch.rand(sizes.batch),
        "encoder_attention_mask": mask,
    }


FAMILIES = {
    "LuminaNextDiT2DModel": Family(
        Adapter(
            block_lists=(BlockList("layers", **NEXT_BLOCK),),
            accepts=(*INPUTS, "encoder_mask", "image_rotary_emb", "cross_attention_kwargs"),
            # base_sequence_length would change how sharply a window attends.
            check=checked_by(("LuminaAttnProcessor2_0",), "cross_attention_kwargs"),
        ),
        lumina_next,
    ),
    "Lumina2Transformer2DModel": Family(
        Adapter(
            block_lists=(BlockList("layers", **BLOCK_2),),
            accepts=(*INPUTS, "encoder_attention_mask", "attention_kwargs"),
            num_prefix_tokens=_num_prefix_tokens,
            check=checked_by(("Lumina2AttnProcessor2_0",), "attention_kwargs"),
        ),
        lumina2,
    ),
}
