"""LTX-Video: attention to the video, then to the text; rotary positions."""

import torch

from routing.adapter import Adapter, BlockList
from routing.families.parts import INPUTS, TEXT_DIM, Built, Family, Sizes, checked_by, text_mask


def ltx(sizes: Sizes) -> Built:
    """One frame."""
    from diffusers import LTXVideoTransformer3DModel

    options = {"num_layers": sizes.depth, "cross_attention_dim": sizes.width, "caption_channels": TEXT_DIM}
    return LTXVideoTransformer3DModel(**options, **sizes.heads), {
        "hidden_states": sizes.tokens(128),
        "encoder_hidden_states": sizes.text,
        "encoder_attention_mask": text_mask(sizes),
        "timestep": 1000 * torch.rand(sizes.batch),
        **{"num_frames": 1, "height": sizes.side, "width": sizes.side},
    }


FAMILIES = {
    "LTXVideoTransformer3DModel": Family(
        Adapter(
            block_lists=(
                BlockList(
                    "transformer_blocks",
                    by_token={
                        "image_rotary_emb": lambda tables, kept: tuple(kept.gather(table) for table in tables)
                    },
                    # temb is (N, 1, 6 D): a timestep for each token is refused, as it has another length.
                    shared=("encoder_hidden_states", "temb", "encoder_attention_mask"),
                ),
            ),
            accepts=(*INPUTS, "encoder_attention_mask", "num_frames", "height", "width"),
            check=checked_by(("LTXVideoAttnProcessor",)),
        ),
        ltx,
    ),
}
