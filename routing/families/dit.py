"""DiT as diffusers has it: classes instead of text, positions are added before."""

import torch

from routing.adapter import Adapter, BlockList
from routing.families.parts import Built, Family, Sizes, checked_by


def dit(sizes: Sizes) -> Built:
    """All blocks are alike."""
    from diffusers import DiTTransformer2DModel

    options = {"num_layers": sizes.depth, "sample_size": 2 * sizes.side, "num_embeds_ada_norm": 1000}
    return DiTTransformer2DModel(**options, **sizes.heads), {
        "hidden_states": sizes.image(4),
        "timestep": torch.randint(1000, (sizes.batch,)),
        "class_labels": torch.arange(sizes.batch),
    }


FAMILIES = {
    "DiTTransformer2DModel": Family(
        Adapter(
            block_lists=(BlockList("transformer_blocks", shared=("timestep", "class_labels")),),
            accepts=("hidden_states", "timestep", "class_labels", "return_dict"),
            check=checked_by(("AttnProcessor2_0",)),
        ),
        dit,
    ),
}
