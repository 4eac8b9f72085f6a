"""MiniMax Music 3: the timestep is a token before the latents; rotary positions over both."""

import torch

from routing.adapters.adapter import Adapter, BlockList
from routing.adapters.families.parts import INPUTS, TEXT_DIM, Built, Family, Sizes, checked_by, joint_rotary


def minimax_music3(sizes: Sizes) -> Built:
    """Half of a head rotates; each latent has a condition of its own, which is added before."""
    from diffusers import MiniMaxMusic3Transformer1DModel

    options = {"num_layers": sizes.depth, "ff_inner_dim": 4 * sizes.width, "rotary_dim": sizes.head_dim // 2}
    return MiniMaxMusic3Transformer1DModel(**options, **sizes.heads, condition_dim=TEXT_DIM), {
        "hidden_states": sizes.tokens(128).transpose(1, 2),
        "encoder_hidden_states": sizes.tokens(TEXT_DIM),
        "timestep": torch.rand(sizes.batch),
    }


FAMILIES = {
    "MiniMaxMusic3Transformer1DModel": Family(
        Adapter(
            block_lists=(BlockList("transformer_blocks", joint=True, by_token={"rotary_emb": joint_rotary}),),
            accepts=INPUTS,
            num_prefix_tokens=lambda model, arguments: 1,
            check=checked_by(("MiniMaxMusic3AttnProcessor",)),
        ),
        minimax_music3,
    ),
    "MiniMaxMusic3RVQDepthDecoder": Family(
        refused="it predicts the codes of one audio frame one after another: its tokens are codebooks"
    ),
}
