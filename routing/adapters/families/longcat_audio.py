"""LongCat-AudioDiT: attention to the latents, then to the text; rotary positions."""

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
    "by_token": {"rope": joint_rotary, "mask": lambda mask, kept: gather_mask(mask, kept.gather)},
    "shared": ("timestep_embed", "cond", "cond_mask", "cond_rope", "adaln_global_out"),
}
PROCESSORS = ("AudioDiTSelfAttnProcessor", "AudioDiTCrossAttnProcessor")


def longcat_audio(sizes: Sizes) -> Built:
    """The first sample has less of text and of latents."""
    from diffusers import LongCatAudioDiTTransformer

    options = {"dit_dim": sizes.width, "dit_depth": sizes.depth, "dit_heads": sizes.num_heads}
    text_mask = torch.ones(sizes.batch, sizes.num_text, dtype=torch.bool)
    mask = torch.ones(sizes.batch, sizes.side**2, dtype=torch.bool)
    text_mask[0, -2:] = mask[0, -2:] = False
    return LongCatAudioDiTTransformer(**options, dit_text_dim=TEXT_DIM), {
        "hidden_states": sizes.tokens(64),
        "latent_cond": sizes.tokens(64),
        "attention_mask": mask,
        "encoder_hidden_states": sizes.text,
        "encoder_attention_mask": text_mask,
        "timestep": torch.rand(sizes.batch),
    }


FAMILIES = {
    "LongCatAudioDiTTransformer": Family(
        Adapter(
            block_lists=(BlockList("blocks", **BLOCK),),
            accepts=(*INPUTS, "encoder_attention_mask", "attention_mask", "latent_cond"),
            check=checked_by(PROCESSORS),
        ),
        longcat_audio,
    ),
}
