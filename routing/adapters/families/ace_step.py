"""ACE-Step: every second block attends within a window of positions, by a mask; rotary positions."""

import torch
import torch.nn as nn

from routing.adapters.adapter import Adapter, Arguments, BlockList
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
        "position_embeddings": joint_rotary,
        "attention_mask": lambda mask, kept: gather_mask(mask, kept.gather),
    },
    "shared": ("temb", "encoder_hidden_states"),
}
_check = checked_by(("AceStepAttnProcessor2_0",), "attention_kwargs")


def _check_backend(model: nn.Module, arguments: Arguments) -> None:
    """Refuse backends that find the window by the place of a token in the sequence."""
    _check(model, arguments)
    for layer in model.layers:
        if (backend := layer.self_attn.processor._attention_backend) is not None:
            raise ValueError(f"the attention backend {backend} of AceStep does not go together with routing")


def ace_step(sizes: Sizes) -> Built:
    """The window is of the side to both sides."""
    from diffusers import AceStepTransformer1DModel

    options = {"hidden_size": sizes.width, "intermediate_size": 3 * sizes.width, "head_dim": sizes.head_dim}
    options |= {"num_attention_heads": sizes.num_heads, "num_key_value_heads": sizes.num_heads // 2}
    options |= {
        "num_hidden_layers": sizes.depth,
        "encoder_hidden_size": TEXT_DIM,
        "sliding_window": sizes.side,
    }
    length = 2 * sizes.side**2
    return AceStepTransformer1DModel(**options), {
        "hidden_states": torch.randn(sizes.batch, length, 64),
        "context_latents": torch.randn(sizes.batch, length, 128),
        "encoder_hidden_states": sizes.text,
        "timestep": torch.rand(sizes.batch),
        "timestep_r": torch.rand(sizes.batch),
    }


FAMILIES = {
    "AceStepTransformer1DModel": Family(
        Adapter(
            block_lists=(BlockList("layers", **BLOCK),),
            accepts=(*INPUTS, "context_latents", "timestep_r", "attention_kwargs"),
            check=_check_backend,
        ),
        ace_step,
    ),
}
