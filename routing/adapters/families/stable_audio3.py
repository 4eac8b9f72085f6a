"""Stable Audio 3: memory tokens come before the latents; rotary positions over both."""

import torch

from routing.adapters.adapter import Adapter, BlockList
from routing.adapters.families.parts import INPUTS, TEXT_DIM, Built, Family, Sizes, checked_by, joint_table

NUM_MEMORY_TOKENS = 3
PROCESSORS = ("StableAudio3SelfAttnProcessor", "StableAudio3CrossAttnProcessor")


def stable_audio3(sizes: Sizes) -> Built:
    """With what is painted in, which each block adds to the latents."""
    from diffusers import StableAudio3DiTModel

    options = {"embed_dim": sizes.width, "depth": sizes.depth, "num_heads": sizes.num_heads}
    options |= {"cond_token_dim": TEXT_DIM, "global_cond_dim": TEXT_DIM}
    mask = torch.ones(sizes.batch, sizes.num_text, dtype=torch.bool)
    mask[0, -2:] = False
    return StableAudio3DiTModel(**options, num_memory_tokens=NUM_MEMORY_TOKENS), {
        "hidden_states": sizes.tokens(256).transpose(1, 2),
        "encoder_hidden_states": sizes.text,
        "encoder_attention_mask": mask,
        "global_hidden_states": torch.randn(sizes.batch, TEXT_DIM),
        "local_add_cond": sizes.tokens(257).transpose(1, 2),
        "timestep": torch.rand(sizes.batch),
    }


FAMILIES = {
    "StableAudio3DiTModel": Family(
        Adapter(
            block_lists=(
                BlockList(
                    "transformer_blocks",
                    joint=True,
                    by_token={
                        "rope": joint_table,
                        "local_seq": lambda states, kept: kept.gather(states),
                    },
                    shared=("context", "global_modulation", "num_memory_tokens"),
                ),
            ),
            accepts=(*INPUTS, "encoder_attention_mask", "global_hidden_states", "local_add_cond"),
            num_prefix_tokens=lambda model, arguments: model.config.num_memory_tokens,
            check=checked_by(PROCESSORS),
        ),
        stable_audio3,
    ),
}
