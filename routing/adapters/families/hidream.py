"""HiDream: double blocks, then single ones; behind the image come two texts, and a third for each block.

The model cuts off the text of a block, and at last all text, at places that it counted with all tokens.
"""

import torch
import torch.nn as nn

from routing.adapters.adapter import Adapter, Arguments, BlockList
from routing.adapters.families.parts import POOLED_DIM, TEXT_DIM, Built, Family, Sizes, checked_by

BY_TOKEN = {
    "image_rotary_emb": lambda table, kept: kept.gather_leading(table),  # (N, T + text, 1, d / 2, 2, 2)
    "hidden_states_masks": lambda mask, kept: kept.gather(mask),  # (N, T + S)
}
SHARED = ("encoder_hidden_states", "temb")


def _num_padding_tokens(model: nn.Module, arguments: Arguments) -> int:
    """Count the padding behind the image: a square has none, others are as long as the largest."""
    height, width = arguments["hidden_states"].shape[-2:]
    return 0 if height == width else model.max_seq - height * width // model.config.patch_size**2


def _num_others(model: nn.Module, arguments: Arguments) -> int:
    """Count the padding, the text of T5, and two of Llama: one for all blocks, one for each."""
    num_t5 = arguments["encoder_hidden_states_t5"].shape[-2]
    num_llama = arguments["encoder_hidden_states_llama3"][0].shape[-2]
    return _num_padding_tokens(model, arguments) + num_t5 + 2 * num_llama


def hidream(sizes: Sizes) -> Built:
    """A third of double blocks; a second text of three tokens."""
    from diffusers import HiDreamImageTransformer2DModel

    num_double = sizes.depth // 3
    options = {"num_layers": num_double, "num_single_layers": sizes.depth - num_double, "patch_size": 2}
    options |= {"caption_channels": [TEXT_DIM, TEXT_DIM], "text_emb_dim": POOLED_DIM}
    options |= {"axes_dims_rope": (sizes.head_dim // 2, sizes.head_dim // 4, sizes.head_dim // 4)}
    options |= {"llama_layers": list(range(sizes.depth)), "max_resolution": (4 * sizes.side, 4 * sizes.side)}
    return HiDreamImageTransformer2DModel(**options, **sizes.heads, in_channels=16), {
        "hidden_states": sizes.image(16),
        "timesteps": torch.randint(1000, (sizes.batch,)),
        "encoder_hidden_states_t5": sizes.text,
        "encoder_hidden_states_llama3": torch.randn(sizes.depth, sizes.batch, 3, TEXT_DIM),
        "pooled_embeds": torch.randn(sizes.batch, POOLED_DIM),
    }


FAMILIES = {
    "HiDreamImageTransformer2DModel": Family(
        Adapter(
            block_lists=(
                BlockList(
                    "double_stream_blocks",
                    output=0,
                    by_token=BY_TOKEN,
                    shared=SHARED,
                    num_suffix_tokens=_num_padding_tokens,
                ),
                BlockList(
                    "single_stream_blocks", by_token=BY_TOKEN, shared=SHARED, num_suffix_tokens=_num_others
                ),
            ),
            accepts=(
                *("hidden_states", "timesteps", "encoder_hidden_states_t5", "encoder_hidden_states_llama3"),
                *("pooled_embeds", "return_dict", "attention_kwargs"),
            ),
            check=checked_by(("HiDreamAttnProcessor",), "attention_kwargs"),
            whole_between_blocks=True,
        ),
        hidream,
    ),
}
