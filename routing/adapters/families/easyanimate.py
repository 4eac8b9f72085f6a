"""EasyAnimate: joint blocks with rotary positions."""

import torch

from routing.adapters.adapter import Adapter, BlockList
from routing.adapters.families.parts import INPUTS, TEXT_DIM, Built, Family, Sizes, checked_by, rotary

BLOCK = {
    "output": 0,
    "by_token": {"image_rotary_emb": rotary},
    "shared": ("encoder_hidden_states", "temb"),
}


def easyanimate(sizes: Sizes) -> Built:
    """4 frames of half the side; all blocks have parameters of their own for the text."""
    from diffusers import EasyAnimateTransformer3DModel

    options = {"num_layers": sizes.depth, "mmdit_layers": sizes.depth, "text_embed_dim": TEXT_DIM}
    options |= {"in_channels": 16, "out_channels": 16, "patch_size": 2}
    return EasyAnimateTransformer3DModel(**options, **sizes.heads), {
        "hidden_states": sizes.image(16, patch_size=1, frames=4),
        "encoder_hidden_states": sizes.text,
        "timestep": torch.randint(1000, (sizes.batch,)),
    }


FAMILIES = {
    "EasyAnimateTransformer3DModel": Family(
        Adapter(
            block_lists=(BlockList("transformer_blocks", **BLOCK),),
            accepts=INPUTS,
            check=checked_by(("EasyAnimateAttnProcessor2_0",)),
        ),
        easyanimate,
    ),
}
