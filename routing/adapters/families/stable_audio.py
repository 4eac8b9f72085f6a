"""Stable Audio: global states come before the latents; rotary positions over both."""

import torch

from routing.adapters.adapter import Adapter, BlockList
from routing.adapters.families.parts import (
    INPUTS,
    TEXT_DIM,
    Built,
    Family,
    Sizes,
    checked_by,
    gather_mask,
    joint_rotary,
)

BLOCK = {
    "by_token": {
        "rotary_embedding": joint_rotary,
        "attention_mask": lambda mask, kept: gather_mask(mask, kept.gather_joint),
    },
    "shared": ("encoder_hidden_states", "encoder_attention_mask"),
}


def stable_audio(sizes: Sizes) -> Built:
    """Half of a head rotates; keys and values of the text have half of the heads."""
    from diffusers import StableAudioDiTModel
    from diffusers.models.embeddings import get_1d_rotary_pos_embed

    options = {"num_layers": sizes.depth, "num_key_value_attention_heads": sizes.num_heads // 2}
    options |= {"cross_attention_dim": sizes.width // 2, "cross_attention_input_dim": TEXT_DIM}
    length = 1 + sizes.side**2
    text_mask = torch.ones(sizes.batch, sizes.num_text, dtype=torch.bool)
    mask = torch.ones(sizes.batch, length - 1, dtype=torch.bool)
    text_mask[0, -2:] = mask[0, -2:] = False
    return StableAudioDiTModel(**options, **sizes.heads, global_states_input_dim=TEXT_DIM), {
        "hidden_states": sizes.tokens(64).transpose(1, 2),
        "encoder_hidden_states": sizes.text,
        "global_hidden_states": torch.randn(sizes.batch, 1, TEXT_DIM),
        "attention_mask": mask,
        "encoder_attention_mask": text_mask,
        "timestep": torch.rand(sizes.batch),
        "rotary_embedding": get_1d_rotary_pos_embed(
            sizes.head_dim // 2, length, use_real=True, repeat_interleave_real=False
        ),
    }


FAMILIES = {
    "StableAudioDiTModel": Family(
        Adapter(
            block_lists=(BlockList("transformer_blocks", joint=True, **BLOCK),),
            accepts=(
                *INPUTS,
                "global_hidden_states",
                "rotary_embedding",
                "attention_mask",
                "encoder_attention_mask",
            ),
            num_prefix_tokens=lambda model, arguments: arguments["global_hidden_states"].shape[1],
            check=checked_by(("StableAudioAttnProcessor2_0",)),
        ),
        stable_audio,
    ),
}
