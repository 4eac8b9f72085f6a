"""OmniGen: text with reference images, the timestep, and the image in one sequence."""

import torch
import torch.nn as nn

from routing.adapters.adapter import Adapter, Arguments, BlockList
from routing.adapters.families.parts import Built, Family, Sizes, checked_by, gather_mask, joint_rotary

BLOCK = {
    "joint": True,
    "by_token": {
        "attention_mask": lambda mask, kept: gather_mask(mask, kept.gather_joint),  # (N, 1, P + T, P + T)
        "image_rotary_emb": joint_rotary,
    },
}
CONDITION = ("input_ids", "input_img_latents", "input_image_sizes", "attention_mask", "position_ids")
NUM_WORDS = 32


def _num_prefix_tokens(model: nn.Module, arguments: Arguments) -> int:
    return arguments["input_ids"].shape[1] + 1  # that of the timestep


def _mask(sizes: Sizes) -> torch.Tensor:
    """Return which keys a query sees (N, L, L): text those before it, the rest all, none the padding."""
    length = sizes.num_text + 1 + sizes.side**2
    sees = torch.ones(length, length, dtype=torch.bool).tril()
    sees[sizes.num_text :] = True
    is_text = sizes.text_mask.flip(1)  # the padding comes first
    is_token = torch.cat([is_text, is_text.new_ones(sizes.batch, 1 + sizes.side**2)], dim=1)
    return (sees & is_token.unsqueeze(1)).float()


def omnigen(sizes: Sizes) -> Built:
    """Text with padding; the first has a reference image of one token."""
    from diffusers import OmniGenTransformer2DModel

    options = {"hidden_size": sizes.width, "num_layers": sizes.depth, "intermediate_size": 4 * sizes.width}
    options |= {"num_attention_heads": sizes.num_heads, "num_key_value_heads": sizes.num_heads}
    factors = [1.0] * (sizes.head_dim // 2)
    options |= {"rope_scaling": {"short_factor": factors, "long_factor": factors}}
    options |= {"vocab_size": NUM_WORDS, "pad_token_id": 0, "pos_embed_max_size": sizes.side}
    return OmniGenTransformer2DModel(**options), {
        "hidden_states": sizes.image(4),
        "timestep": torch.rand(sizes.batch),
        "input_ids": torch.randint(1, NUM_WORDS, (sizes.batch, sizes.num_text)),
        "input_img_latents": [torch.randn(1, 4, 2, 2)],
        "input_image_sizes": {0: [[1, 2]]},
        "attention_mask": _mask(sizes),
        "position_ids": torch.arange(sizes.num_text + 1 + sizes.side**2).expand(sizes.batch, -1),
    }


FAMILIES = {
    "OmniGenTransformer2DModel": Family(
        Adapter(
            block_lists=(BlockList("layers", **BLOCK),),
            accepts=("hidden_states", "timestep", *CONDITION, "return_dict"),
            num_prefix_tokens=_num_prefix_tokens,
            check=checked_by(("OmniGenAttnProcessor2_0",)),
        ),
        omnigen,
    ),
}
