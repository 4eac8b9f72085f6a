"""ERNIE-Image: one sequence of the image and the text behind it, with samples in the second dimension."""

import torch

from routing.adapters.adapter import Adapter, BlockList, TokenSelection
from routing.adapters.families.parts import TEXT_DIM, Built, Family, Sizes, axes_of, checked_by, gather_mask


def _modulation(temb: list[torch.Tensor], kept: TokenSelection) -> list[torch.Tensor]:
    """Cut (T + S, N, D), which are the same for all tokens of a sample."""
    return [each[: kept.ids.shape[1]] for each in temb]


BLOCK = {
    "tokens": "x",
    "sequence_first": True,
    "by_token": {
        "rotary_pos_emb": lambda table, kept: kept.gather(table),  # (N, T + S, 1, d)
        "temb": _modulation,
        "attention_mask": lambda mask, kept: gather_mask(mask, kept.gather),  # (N, 1, 1, T + S)
    },
}


def ernie_image(sizes: Sizes) -> Built:
    """Text with padding."""
    from diffusers import ErnieImageTransformer2DModel

    options = {"hidden_size": sizes.width, "num_attention_heads": sizes.num_heads, "num_layers": sizes.depth}
    options |= {"ffn_hidden_size": 4 * sizes.width, "rope_axes_dim": axes_of(sizes.head_dim)}
    return ErnieImageTransformer2DModel(**options, text_in_dim=TEXT_DIM), {
        "hidden_states": sizes.image(128, patch_size=1),
        "timestep": torch.randint(1000, (sizes.batch,)),
        "text_bth": sizes.text,
        "text_lens": sizes.text_mask.sum(dim=1),
    }


FAMILIES = {
    "ErnieImageTransformer2DModel": Family(
        Adapter(
            block_lists=(BlockList("layers", **BLOCK),),
            accepts=("hidden_states", "timestep", "text_bth", "text_lens", "return_dict"),
            num_suffix_tokens=lambda model, arguments: arguments["text_bth"].shape[1],
            check=checked_by(("ErnieImageSingleStreamAttnProcessor",)),
        ),
        ernie_image,
    ),
}
