"""Transformers within U-Nets and DreamLite's: attention to the image, then to the text, no positions."""

import torch
import torch.nn as nn

from routing.adapters.adapter import Adapter, Arguments, BlockList
from routing.adapters.families.parts import TEXT_DIM, Built, Family, Sizes, checked_by

BLOCK = {"shared": ("encoder_hidden_states", "encoder_attention_mask")}
ACCEPTS = ("hidden_states", "encoder_hidden_states", "encoder_attention_mask", "return_dict")
PROCESSORS = ("AttnProcessor", "AttnProcessor2_0")
_check = checked_by(PROCESSORS)


def _check_continuous(model: nn.Module, arguments: Arguments) -> None:
    """Refuse patches and codes, which have norms and positions of their own."""
    _check(model, arguments)
    if not model.is_input_continuous:
        raise ValueError("Transformer2DModel goes together with routing for continuous inputs alone")


def _arguments(sizes: Sizes) -> dict:
    mask = torch.ones(sizes.batch, sizes.num_text)
    mask[0, -2:] = 0
    return {
        "hidden_states": sizes.image(sizes.width, patch_size=1),
        "encoder_hidden_states": sizes.text,
        "encoder_attention_mask": mask,
    }


def transformer_2d(sizes: Sizes) -> Built:
    """As in a U-Net: of features, not of patches."""
    from diffusers import Transformer2DModel

    options = {"num_layers": sizes.depth, "in_channels": sizes.width, "cross_attention_dim": TEXT_DIM}
    return Transformer2DModel(**options, **sizes.heads), _arguments(sizes)


def dreamlite(sizes: Sizes) -> Built:
    """Keys and values have half of the heads."""
    from diffusers import DreamLiteTransformer2DModel
    from diffusers.models.unets.unet_dreamlite import DreamLiteAttnProcessor2_0

    options = {"num_layers": sizes.depth, "in_channels": sizes.width, "cross_attention_dim": TEXT_DIM}
    options |= {"qk_norm": "rms_norm", "num_kv_heads": sizes.num_heads // 2}
    model = DreamLiteTransformer2DModel(**options, **sizes.heads)
    for block in model.transformer_blocks:  # as the U-Net does: the default one cannot group heads
        block.attn1.set_processor(DreamLiteAttnProcessor2_0())
        block.attn2.set_processor(DreamLiteAttnProcessor2_0())
    return model, _arguments(sizes)


FAMILIES = {
    "Transformer2DModel": Family(
        Adapter(
            block_lists=(BlockList("transformer_blocks", **BLOCK),), accepts=ACCEPTS, check=_check_continuous
        ),
        transformer_2d,
    ),
    "DreamLiteTransformer2DModel": Family(
        Adapter(
            block_lists=(BlockList("transformer_blocks", **BLOCK),),
            accepts=ACCEPTS,
            check=checked_by((*PROCESSORS, "DreamLiteAttnProcessor2_0")),
        ),
        dreamlite,
    ),
    "PriorTransformer": Family(refused="the image is a single token, the embedding that CLIP gives it"),
    "TransformerTemporalModel": Family(
        refused="the tokens of a row are frames at one place, and the places of an image are samples"
    ),
}
