"""CogVideoX, CogView 3 Plus and 4: joint blocks; positions are added before, or rotary ones of the image."""

import torch

from routing.adapter import Adapter, BlockList
from routing.families.parts import INPUTS, TEXT_DIM, Built, Family, Sizes, checked_by, rotary

SHARED = ("encoder_hidden_states", "temb")


def cogvideox(sizes: Sizes) -> Built:
    """One frame, positions are added before."""
    from diffusers import CogVideoXTransformer3DModel

    options = {"num_layers": sizes.depth, "text_embed_dim": TEXT_DIM, "time_embed_dim": 32}
    options |= {"sample_width": 2 * sizes.side, "sample_height": 2 * sizes.side, "sample_frames": 1}
    return CogVideoXTransformer3DModel(**options, **sizes.heads, max_text_seq_length=sizes.num_text), {
        "hidden_states": sizes.image(16)[:, None],
        "encoder_hidden_states": sizes.text,
        "timestep": torch.randint(1000, (sizes.batch,)),
    }


def cogview(name: str, sizes: Sizes) -> Built:
    """All blocks are joint."""
    import diffusers

    options = {
        "num_layers": sizes.depth,
        "text_embed_dim": TEXT_DIM,
        "time_embed_dim": 32,
        "condition_dim": 16,
    }
    options |= {"sample_size": 2 * sizes.side, "pos_embed_max_size": 2 * sizes.side}
    size = torch.full((sizes.batch, 2), 2.0 * sizes.side)
    return getattr(diffusers, name)(**options, **sizes.heads), {
        "hidden_states": sizes.image(16),
        "encoder_hidden_states": sizes.text,
        "timestep": 1000 * torch.rand(sizes.batch),
        **{"original_size": size, "target_size": size, "crop_coords": torch.zeros_like(size)},
    }


OF_SIZES = (*INPUTS, "original_size", "target_size", "crop_coords")
FAMILIES = {
    "CogVideoXTransformer3DModel": Family(
        Adapter(
            block_lists=(BlockList("transformer_blocks", output=0, shared=SHARED),),
            accepts=INPUTS,
            check=checked_by(("CogVideoXAttnProcessor2_0",)),
        ),
        cogvideox,
    ),
    "CogView3PlusTransformer2DModel": Family(
        Adapter(
            block_lists=(BlockList("transformer_blocks", output=0, shared=("encoder_hidden_states", "emb")),),
            accepts=OF_SIZES,
            check=checked_by(("CogVideoXAttnProcessor2_0",)),
        ),
        lambda sizes: cogview("CogView3PlusTransformer2DModel", sizes),
    ),
    "CogView4Transformer2DModel": Family(
        Adapter(
            block_lists=(
                BlockList(
                    "transformer_blocks",
                    output=0,
                    by_token={"image_rotary_emb": rotary},
                    shared=SHARED,
                ),
            ),
            accepts=OF_SIZES,
            check=checked_by(("CogView4AttnProcessor",)),
        ),
        lambda sizes: cogview("CogView4Transformer2DModel", sizes),
    ),
}
