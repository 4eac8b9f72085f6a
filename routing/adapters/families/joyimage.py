"""JoyImage: joint blocks, rotary positions of the image; with references that come after it (Plus)."""

import torch
import torch.nn as nn

from routing.adapters.adapter import Adapter, Arguments, BlockList, TokenSelection
from routing.adapters.families.parts import (
    INPUTS,
    TEXT_DIM,
    Built,
    Family,
    Sizes,
    axes_of,
    checked_by,
    gather_each,
    mask_before_text,
    rotary,
)

SHARED = ("encoder_hidden_states", "temb")
_check = checked_by(("JoyImageAttnProcessor",))


def _check_items(model: nn.Module, arguments: Arguments) -> None:
    """Refuse images that are given in a row (N, items, C, frames, H, W)."""
    _check(model, arguments)
    if arguments["hidden_states"].ndim != 5:
        raise ValueError("hidden_states: reference items of JoyImage do not go together with routing")


def _rotary(tables: tuple, kept: TokenSelection) -> tuple:
    image, text = tables
    return rotary(image, kept), text


def _num_reference_tokens(model: nn.Module, arguments: Arguments) -> int:
    """Count references and padding, which come after the image: the first shape of each sample."""
    lengths = {frames * height * width for (frames, height, width), *_ in arguments["shape_list"]}
    if len(lengths) != 1:
        raise ValueError(f"shape_list: images of one batch must have as many tokens, found {sorted(lengths)}")
    return arguments["hidden_states"].shape[1] - lengths.pop()


def _options(sizes: Sizes) -> dict:
    options = {"hidden_size": sizes.width, "num_attention_heads": sizes.num_heads, "text_dim": TEXT_DIM}
    return {**options, "num_layers": sizes.depth, "rope_dim_list": list(axes_of(sizes.head_dim))}


def joyimage_edit(sizes: Sizes) -> Built:
    """One frame."""
    from diffusers import JoyImageEditTransformer3DModel

    return JoyImageEditTransformer3DModel(**_options(sizes)), {
        "hidden_states": sizes.image(16, frames=1),
        "encoder_hidden_states": sizes.text,
        "timestep": 1000 * torch.rand(sizes.batch),
    }


def joyimage_edit_plus(sizes: Sizes) -> Built:
    """A reference of one row, two for the last sample; the others are padded."""
    from diffusers import JoyImageEditPlusTransformer3DModel

    image, row = (1, sizes.side, sizes.side), (1, 1, sizes.side)
    mask = torch.ones(sizes.batch, sizes.num_text)
    mask[0, -2:] = 0
    return JoyImageEditPlusTransformer3DModel(**_options(sizes)), {
        "hidden_states": torch.randn(sizes.batch, sizes.side * (sizes.side + 2), 16, 1, 2, 2),
        "encoder_hidden_states": sizes.text,
        "encoder_hidden_states_mask": mask,
        "timestep": 1000 * torch.rand(sizes.batch),
        "shape_list": [*[[image, row]] * (sizes.batch - 1), [image, row, row]],
    }


FAMILIES = {
    "JoyImageEditTransformer3DModel": Family(
        Adapter(
            block_lists=(
                BlockList("double_blocks", output=0, by_token={"image_rotary_emb": _rotary}, shared=SHARED),
            ),
            accepts=INPUTS,
            check=_check_items,
        ),
        joyimage_edit,
    ),
    "JoyImageEditPlusTransformer3DModel": Family(
        Adapter(
            block_lists=(
                BlockList(
                    "double_blocks",
                    output=0,
                    by_token={"image_rotary_emb": gather_each, "attention_mask": mask_before_text},
                    shared=SHARED,
                ),
            ),
            accepts=(*INPUTS, "encoder_hidden_states_mask", "shape_list"),
            num_suffix_tokens=_num_reference_tokens,
            check=checked_by(("JoyImageEditPlusAttnProcessor",)),
        ),
        joyimage_edit_plus,
    ),
}
