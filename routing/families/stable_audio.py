"""Stable Audio: a sequence of latents behind one token of the global states; attention to the text apart."""

import torch

from routing.adapter import Adapter, BlockList
from routing.families.parts import POOLED_DIM, TEXT_DIM, Built, Family, Sizes, checked_by, joint_rotary


def stable_audio(sizes: Sizes) -> Built:
    """All blocks are alike; side x side latents."""
    from diffusers import StableAudioDiTModel

    length = sizes.side**2
    options = {"sample_size": length, "num_layers": sizes.depth, "cross_attention_input_dim": TEXT_DIM}
    options |= {"num_key_value_attention_heads": sizes.num_heads, "cross_attention_dim": sizes.width}
    tables = torch.randn(2, 1 + length, sizes.head_dim // 2)
    return StableAudioDiTModel(**options, **sizes.heads, global_states_input_dim=POOLED_DIM), {
        "hidden_states": torch.randn(sizes.batch, 64, length),
        "encoder_hidden_states": sizes.text,
        "global_hidden_states": torch.randn(sizes.batch, 1, POOLED_DIM),
        "timestep": torch.rand(sizes.batch),
        "rotary_embedding": (tables[0], tables[1]),
    }


FAMILIES = {
    "StableAudioDiTModel": Family(
        Adapter(
            block_lists=(
                BlockList(
                    "transformer_blocks",
                    joint=True,
                    by_token={"rotary_embedding": joint_rotary},
                    shared=("encoder_hidden_states",),
                ),
            ),
            accepts=(
                *("hidden_states", "encoder_hidden_states", "global_hidden_states", "timestep"),
                *("rotary_embedding", "return_dict"),
            ),
            num_prefix_tokens=lambda model, arguments: arguments["global_hidden_states"].shape[1],
            check=checked_by(("StableAudioAttnProcessor2_0",)),
        ),
        stable_audio,
    ),
}
