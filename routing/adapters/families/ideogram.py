"""Ideogram 4: one sequence, padding and text in front of the image; each token has its own role and place."""

import torch
import torch.nn as nn

from routing.adapters.adapter import Adapter, Arguments, BlockList, TokenSelection
from routing.adapters.families.parts import INPUTS, TEXT_DIM, Built, Family, Sizes, checked_by, gather_mask

IMAGE, TEXT = 2, 3  # the role of a token, as the model counts them


def _joint_each(tables: tuple[torch.Tensor, torch.Tensor], kept: TokenSelection) -> tuple[torch.Tensor, ...]:
    return tuple(kept.gather_joint(table) for table in tables)


BLOCK = {
    "joint": True,
    "by_token": {
        "image_rotary_emb": _joint_each,  # (N, P + T, d)
        "attention_mask": lambda mask, kept: gather_mask(mask, kept.gather_joint),  # (N, 1, P + T, P + T)
        # (N, P + T, D) where each token has its own timestep, else (N, 1, D).
        "adaln_input": lambda temb, kept: kept.gather_joint(temb) if temb.shape[1] > 1 else temb,
    },
}


def _num_prefix_tokens(model: nn.Module, arguments: Arguments) -> int:
    """Count the tokens before the image, which must come last, at one place in all samples."""
    is_image = arguments["indicator"] == IMAGE  # (N, P + T)
    num_image_tokens = int(is_image[0].sum())  # SYNC: shapes depend on it
    first = is_image.shape[1] - num_image_tokens
    if not num_image_tokens or is_image[:, :first].any() or not is_image[:, first:].all():
        raise ValueError("indicator: the tokens of the image must come last, as many in all samples")
    return first


def ideogram4(sizes: Sizes) -> Built:
    """Every second text is shorter by a token, with padding before it."""
    from diffusers import Ideogram4Transformer2DModel

    text, image = sizes.num_text, sizes.side**2
    positions = torch.cat([torch.arange(float(text))[:, None].expand(-1, 3), 65536 + sizes.positions])
    is_padding = torch.zeros(sizes.batch, text + image, dtype=torch.bool)
    is_padding[1::2, 0] = True
    roles = torch.tensor([TEXT] * text + [IMAGE] * image)
    rows = sizes.head_dim // 6
    options = {"num_layers": sizes.depth, "intermediate_size": 4 * sizes.width, "adaln_dim": sizes.width}
    options |= {"llm_features_dim": TEXT_DIM, "mrope_section": (sizes.head_dim // 2 - 2 * rows, rows, rows)}
    return Ideogram4Transformer2DModel(**options, **sizes.heads), {
        "hidden_states": torch.randn(sizes.batch, text + image, 128),
        "encoder_hidden_states": torch.randn(sizes.batch, text + image, TEXT_DIM),
        "timestep": torch.rand(sizes.batch),
        "position_ids": positions.long().expand(sizes.batch, -1, -1),
        "segment_ids": torch.where(is_padding, -1, 1),
        "indicator": torch.where(is_padding, 0, roles),
    }


FAMILIES = {
    "Ideogram4Transformer2DModel": Family(
        Adapter(
            block_lists=(BlockList("layers", **BLOCK),),
            accepts=(*INPUTS, "position_ids", "segment_ids", "indicator", "attention_kwargs"),
            num_prefix_tokens=_num_prefix_tokens,
            check=checked_by(("Ideogram4AttnProcessor",), "attention_kwargs"),
        ),
        ideogram4,
    ),
}
