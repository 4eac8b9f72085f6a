"""Wan, ChronoEdit, SkyReels 2: rotary positions, and a timestep for each token where it is asked for."""

from functools import partial

import torch

from routing.adapter import Adapter, BlockList
from routing.families.parts import INPUTS, TEXT_DIM, Built, Family, Sizes, checked_by

BLOCK = {
    "by_token": {
        "rotary_emb": lambda tables, kept: tuple(kept.gather(table) for table in tables),  # (1, T, 1, d)
        # (N, T, 6, D) where each token has its own timestep, else (N, 6, D).
        "temb": lambda temb, kept: kept.gather(temb) if temb.ndim == 4 else temb,
    },
    "shared": ("encoder_hidden_states",),
}


def wan(name: str, sizes: Sizes) -> Built:
    """4 frames of half the side."""
    import diffusers

    options = {"num_layers": sizes.depth, "text_dim": TEXT_DIM, "ffn_dim": 4 * sizes.width}
    return getattr(diffusers, name)(**options, **sizes.heads), {
        "hidden_states": sizes.image(16, patch_size=1, frames=4),
        "encoder_hidden_states": sizes.text,
        "timestep": torch.randint(1000, (sizes.batch,)),
    }


def _family(name: str, processor: str, block: dict) -> Family:
    adapter = Adapter(
        block_lists=(BlockList("blocks", **block),),
        accepts=(*INPUTS, "encoder_hidden_states_image", "attention_kwargs"),
        check=checked_by((processor,), "attention_kwargs"),
    )
    return Family(adapter, partial(wan, name))


FAMILIES = {
    "WanTransformer3DModel": _family("WanTransformer3DModel", "WanAttnProcessor", BLOCK),
    "ChronoEditTransformer3DModel": _family("ChronoEditTransformer3DModel", "WanAttnProcessor", BLOCK),
    "SkyReelsV2Transformer3DModel": _family("SkyReelsV2Transformer3DModel", "SkyReelsV2AttnProcessor", BLOCK),
}
