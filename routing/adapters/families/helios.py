"""Helios: the tokens of earlier frames come first, and a timestep for each token."""

import math

import torch
import torch.nn as nn

from routing.adapters.adapter import Adapter, Arguments, BlockList
from routing.adapters.families.parts import INPUTS, TEXT_DIM, Built, Family, Sizes, checked_by

HISTORY = {"short": 1, "mid": 2, "long": 4}  # how many patches a patch of it covers along each axis


BLOCK = {
    "joint": True,
    "by_token": {
        "rotary_emb": lambda table, kept: kept.gather_joint(table),  # (N, P + T, d)
        "temb": lambda temb, kept: kept.gather_joint(temb),  # (N, P + T, 6, D)
        "original_context_length": lambda length, kept: kept.ids.shape[1],
    },
    "shared": ("encoder_hidden_states",),
}


def _num_history_tokens(model: nn.Module, arguments: Arguments) -> int:
    count = 0
    for name, stride in HISTORY.items():
        latents = arguments.get(f"latents_history_{name}")
        if latents is not None and arguments.get(f"indices_latents_history_{name}") is not None:
            patches = zip(latents.shape[2:], model.config.patch_size, strict=True)
            count += math.prod(math.ceil(size / (stride * patch)) for size, patch in patches)
    return count


def helios(sizes: Sizes) -> Built:
    """4 frames of half the side, after 1 + 2 + 4 frames at three resolutions."""
    from diffusers import HeliosTransformer3DModel

    options = {"num_layers": sizes.depth, "text_dim": TEXT_DIM, "ffn_dim": 4 * sizes.width}
    rows = sizes.head_dim // 3 // 2 * 2
    options |= {"rope_dim": (sizes.head_dim - 2 * rows, rows, rows), "is_amplify_history": True}
    arguments = {
        "hidden_states": sizes.image(16, patch_size=1, frames=4),
        "encoder_hidden_states": sizes.text,
        "timestep": torch.randint(1000, (sizes.batch,)),
        "indices_hidden_states": torch.arange(7, 11).expand(sizes.batch, -1),
    }
    for name, first, frames in (("long", 0, 4), ("mid", 4, 2), ("short", 6, 1)):
        indices = torch.arange(first, first + frames).expand(sizes.batch, -1)
        arguments[f"latents_history_{name}"] = sizes.image(16, patch_size=1, frames=frames)
        arguments[f"indices_latents_history_{name}"] = indices
    return HeliosTransformer3DModel(**options, **sizes.heads), arguments


FAMILIES = {
    "HeliosTransformer3DModel": Family(
        Adapter(
            block_lists=(BlockList("blocks", **BLOCK),),
            accepts=(
                *(*INPUTS, "indices_hidden_states", "attention_kwargs"),
                *(f"{kind}latents_history_{name}" for name in HISTORY for kind in ("", "indices_")),
            ),
            num_prefix_tokens=_num_history_tokens,
            check=checked_by(("HeliosAttnProcessor",), "attention_kwargs"),
        ),
        helios,
    ),
}
