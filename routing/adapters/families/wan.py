"""Wan, ChronoEdit and SkyReels: rotary positions over frames, rows and columns; a timestep for each token
where it is asked for.
"""

import torch
import torch.nn as nn

from routing.adapters.adapter import Adapter, BlockList
from routing.adapters.families.parts import (
    INPUTS,
    TEXT_DIM,
    Built,
    Family,
    Sizes,
    checked_by,
    gather_each,
    gather_mask,
)

BLOCK = {
    "by_token": {
        "rotary_emb": gather_each,  # (1, T, 1, d)
        # (N, T, 6, D) where each token has its own timestep, else (N, 6, D).
        "temb": lambda temb, kept: kept.gather(temb) if temb.ndim == 4 else temb,
    },
    "shared": ("encoder_hidden_states",),
}


SKYREELS_BLOCK = {
    "by_token": {
        "rotary_emb": gather_each,
        # (N, 6, T, D) where each frame has its own timestep, else (N, 6, D).
        "temb": lambda temb, kept: kept.gather(temb, 2) if temb.ndim == 4 else temb,
        "attention_mask": lambda mask, kept: gather_mask(mask, kept.gather),
    },
    "shared": ("encoder_hidden_states",),
}
ACCEPTS = (*INPUTS, "attention_kwargs")


def _built(kind: type[nn.Module], sizes: Sizes) -> Built:
    """4 frames of half the side."""
    options = {"num_layers": sizes.depth, "text_dim": TEXT_DIM, "ffn_dim": 4 * sizes.width}
    return kind(**options, **sizes.heads), {
        "hidden_states": sizes.image(16, patch_size=1, frames=4),
        "encoder_hidden_states": sizes.text,
        "timestep": torch.randint(1000, (sizes.batch,)),
    }


def wan(sizes: Sizes) -> Built:
    """All blocks are alike."""
    from diffusers import WanTransformer3DModel

    return _built(WanTransformer3DModel, sizes)


def chronoedit(sizes: Sizes) -> Built:
    """All blocks are alike."""
    from diffusers import ChronoEditTransformer3DModel

    return _built(ChronoEditTransformer3DModel, sizes)


def skyreels(sizes: Sizes) -> Built:
    """Diffusion forcing: pairs of frames see those before, and each frame has its own timestep."""
    from diffusers import SkyReelsV2Transformer3DModel

    model, arguments = _built(SkyReelsV2Transformer3DModel, sizes)
    model.register_to_config(num_frame_per_block=2)
    timestep = torch.randint(1000, (sizes.batch, 4))
    return model, {**arguments, "timestep": timestep, "enable_diffusion_forcing": True}


FAMILIES = {
    "WanTransformer3DModel": Family(
        Adapter(
            block_lists=(BlockList("blocks", **BLOCK),),
            accepts=(*ACCEPTS, "encoder_hidden_states_image"),
            check=checked_by(("WanAttnProcessor",), "attention_kwargs"),
        ),
        wan,
    ),
    "ChronoEditTransformer3DModel": Family(
        Adapter(
            block_lists=(BlockList("blocks", **BLOCK),),
            accepts=ACCEPTS,
            check=checked_by(("WanAttnProcessor",), "attention_kwargs"),
        ),
        chronoedit,
    ),
    "SkyReelsV2Transformer3DModel": Family(
        Adapter(
            block_lists=(BlockList("blocks", **SKYREELS_BLOCK),),
            accepts=(*ACCEPTS, "enable_diffusion_forcing"),
            check=checked_by(("SkyReelsV2AttnProcessor",), "attention_kwargs"),
        ),
        skyreels,
    ),
    "WanVACETransformer3DModel": Family(
        refused="its control blocks give hints for all tokens, which it adds between its other blocks"
    ),
    "WanAnimateTransformer3DModel": Family(
        refused="between its blocks the tokens of each frame attend to the face of that frame"
    ),
    "WanAnimate2Transformer3DModel": Family(
        refused="its attention lays tokens out by frame, and masks them by their places"
    ),
}
