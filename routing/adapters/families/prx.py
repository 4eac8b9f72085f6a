"""PRX: image tokens attend to image and text; the text passes through no block."""

import torch

from routing.adapters.adapter import Adapter, BlockList
from routing.adapters.families.parts import INPUTS, TEXT_DIM, Built, Family, Sizes, checked_by


def prx(sizes: Sizes) -> Built:
    """All blocks are alike."""
    from diffusers import PRXTransformer2DModel

    options = {"context_in_dim": TEXT_DIM, "hidden_size": sizes.width, "num_heads": sizes.num_heads}
    axes = [sizes.head_dim // 2, sizes.head_dim // 2]
    return PRXTransformer2DModel(**options, depth=sizes.depth, axes_dim=axes), {
        "hidden_states": sizes.image(16),
        "encoder_hidden_states": sizes.text,
        "attention_mask": sizes.text_mask,
        "timestep": torch.rand(sizes.batch),
    }


FAMILIES = {
    "PRXTransformer2DModel": Family(
        Adapter(
            block_lists=(
                BlockList(
                    "blocks",
                    by_token={
                        "image_rotary_emb": lambda table, kept: kept.gather(table, 2)
                    },  # (1, 1, T, ...)
                    shared=("encoder_hidden_states", "temb", "attention_mask"),
                ),
            ),
            accepts=(*INPUTS, "attention_mask"),  # of the text
            check=checked_by(("PRXAttnProcessor2_0",)),
        ),
        prx,
    ),
}
