"""CogView 3 Plus, CogView 4 and GLM-Image: joint blocks; positions are added before, or rotary since 4."""

import torch

from routing.adapters.adapter import Adapter, BlockList
from routing.adapters.families.parts import INPUTS, TEXT_DIM, Built, Family, Sizes, checked_by, rotary

# The mask (N, P) is of the text alone.
BLOCK = {
    "output": 0,
    "by_token": {"image_rotary_emb": rotary},
    "shared": ("encoder_hidden_states", "temb", "attention_mask", "attention_kwargs"),
}
RESOLUTION = ("target_size", "crop_coords")
ATTENTION = ("attention_mask", "attention_kwargs")
CONDITION_DIM = 8


def _options(sizes: Sizes) -> dict[str, int]:
    dims = {"text_embed_dim": TEXT_DIM, "time_embed_dim": sizes.width, "condition_dim": CONDITION_DIM}
    return {"num_layers": sizes.depth, **dims, **sizes.heads}


def _inputs(sizes: Sizes) -> dict[str, torch.Tensor]:
    return {
        "hidden_states": sizes.image(16),
        "encoder_hidden_states": sizes.text,
        "timestep": torch.randint(1000, (sizes.batch,)),
        "target_size": torch.full((sizes.batch, 2), 16.0 * sizes.side),
        "crop_coords": torch.zeros(sizes.batch, 2),
    }


def cogview3(sizes: Sizes) -> Built:
    """Text without padding: the model takes no mask."""
    from diffusers import CogView3PlusTransformer2DModel

    inputs = _inputs(sizes)
    model = CogView3PlusTransformer2DModel(**_options(sizes), pos_embed_max_size=sizes.side)
    return model, {**inputs, "original_size": inputs["target_size"]}


def cogview4(sizes: Sizes) -> Built:
    """Text with padding."""
    from diffusers import CogView4Transformer2DModel

    inputs = _inputs(sizes)
    inputs |= {"original_size": inputs["target_size"], "attention_mask": sizes.text_mask}
    return CogView4Transformer2DModel(**_options(sizes)), inputs


def glm(sizes: Sizes) -> Built:
    """Text with padding, and a token of the prior for each of the image."""
    from diffusers import GlmImageTransformer2DModel

    num_codes = 32
    prior = torch.randint(num_codes, (sizes.batch, sizes.side**2))
    model = GlmImageTransformer2DModel(**_options(sizes), prior_vq_quantizer_codebook_size=num_codes)
    return model, {
        **_inputs(sizes),
        "prior_token_id": prior,
        "prior_token_drop": torch.zeros_like(prior, dtype=torch.bool),
        "attention_mask": sizes.text_mask,
    }


FAMILIES = {
    "CogView3PlusTransformer2DModel": Family(
        Adapter(
            block_lists=(BlockList("transformer_blocks", output=0, shared=("encoder_hidden_states", "emb")),),
            accepts=(*INPUTS, "original_size", *RESOLUTION),
            check=checked_by(("CogVideoXAttnProcessor2_0",)),
        ),
        cogview3,
    ),
    "CogView4Transformer2DModel": Family(
        Adapter(
            block_lists=(BlockList("transformer_blocks", **BLOCK),),
            accepts=(*INPUTS, "original_size", *RESOLUTION, *ATTENTION),
            check=checked_by(("CogView4AttnProcessor",), "attention_kwargs"),
        ),
        cogview4,
    ),
    "GlmImageTransformer2DModel": Family(
        Adapter(
            block_lists=(BlockList("transformer_blocks", **BLOCK),),
            accepts=(*INPUTS, "prior_token_id", "prior_token_drop", *RESOLUTION, "attention_mask"),
            check=checked_by(("GlmImageAttnProcessor",)),
        ),
        glm,
    ),
}
