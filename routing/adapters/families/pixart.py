"""PixArt: attention to the image, then to the text; positions are added before."""

import torch

from routing.adapters.adapter import Adapter, BlockList
from routing.adapters.families.parts import INPUTS, TEXT_DIM, Built, Family, Sizes, checked_by, gather_mask

BLOCK = {
    "by_token": {"attention_mask": lambda mask, kept: gather_mask(mask, kept.gather)},
    "shared": ("encoder_hidden_states", "encoder_attention_mask", "timestep", "cross_attention_kwargs"),
}
PROCESSORS = ("AttnProcessor", "AttnProcessor2_0", "FusedAttnProcessor2_0")


def pixart(sizes: Sizes) -> Built:
    """All blocks are alike."""
    from diffusers import PixArtTransformer2DModel

    options = {"sample_size": 2 * sizes.side, "num_layers": sizes.depth, "use_additional_conditions": False}
    options |= {"cross_attention_dim": sizes.width, "caption_channels": TEXT_DIM}
    return PixArtTransformer2DModel(**options, **sizes.heads), {
        "hidden_states": sizes.image(4),
        "encoder_hidden_states": sizes.text,
        "timestep": torch.randint(1000, (sizes.batch,)),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }


FAMILIES = {
    "PixArtTransformer2DModel": Family(
        Adapter(
            block_lists=(BlockList("transformer_blocks", **BLOCK),),
            accepts=(
                *(*INPUTS, "added_cond_kwargs", "cross_attention_kwargs"),
                *("attention_mask", "encoder_attention_mask"),
            ),
            check=checked_by(PROCESSORS, "cross_attention_kwargs"),
        ),
        pixart,
    ),
}
