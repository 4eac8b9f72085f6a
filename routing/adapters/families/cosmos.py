"""Cosmos: rotary and learned positions, the latter added in each block; timesteps by frame if asked for."""

import torch

from routing.adapters.adapter import Adapter, BlockList, TokenSelection
from routing.adapters.families.parts import INPUTS, TEXT_DIM, Built, Family, Sizes, checked_by, rotary


def _timesteps(temb: torch.Tensor, kept: TokenSelection) -> torch.Tensor:
    """Gather (N, T, D) where frames have timesteps of their own, not (N, D)."""
    return kept.gather(temb) if temb.ndim == 3 else temb


BLOCK = {
    "by_token": {
        "image_rotary_emb": rotary,
        "extra_pos_emb": lambda positions, kept: kept.gather(positions),
        "embedded_timestep": _timesteps,
        "temb": _timesteps,
    },
    "shared": ("encoder_hidden_states", "attention_mask"),
}


def cosmos(sizes: Sizes) -> Built:
    """Cosmos 2, of 4 frames of half the side, each with its own timestep."""
    from diffusers import CosmosTransformer3DModel

    options = {"in_channels": 17, "num_layers": sizes.depth, "text_embed_dim": TEXT_DIM}
    options |= {"extra_pos_embed_type": None}  # that of Cosmos 1 does not run in double precision
    latents = sizes.image(16, patch_size=1, frames=4)
    return CosmosTransformer3DModel(**options, **sizes.heads), {
        "hidden_states": latents,
        "encoder_hidden_states": sizes.text,
        "attention_mask": sizes.text_mask.bool(),
        "timestep": torch.rand(sizes.batch, 1, 4, 1, 1),
        "condition_mask": torch.ones_like(latents[:, :1]),
        "padding_mask": torch.zeros(1, 1, *latents.shape[-2:]),
        "fps": 16,
    }


FAMILIES = {
    "CosmosTransformer3DModel": Family(
        Adapter(
            block_lists=(BlockList("transformer_blocks", **BLOCK),),
            accepts=(*INPUTS, "attention_mask", "condition_mask", "padding_mask", "fps"),
            check=checked_by(("CosmosAttnProcessor2_0",)),
        ),
        cosmos,
    ),
    "Cosmos3OmniTransformer": Family(
        refused="its tokens are packed in one row, without a dimension of samples"
    ),
}
