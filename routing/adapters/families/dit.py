"""DiT: attention to the image, modulated by the class and the timestep; positions are added before."""

import torch

from routing.adapters.adapter import Adapter, BlockList
from routing.adapters.families.parts import Built, Family, Sizes, checked_by

ARGUMENTS = ("timestep", "class_labels")


def dit(sizes: Sizes) -> Built:
    """All blocks are alike."""
    from diffusers import DiTTransformer2DModel

    options = {"sample_size": 2 * sizes.side, "num_layers": sizes.depth}
    return DiTTransformer2DModel(**options, **sizes.heads), {
        "hidden_states": sizes.image(4),
        "timestep": torch.randint(1000, (sizes.batch,)),
        "class_labels": torch.randint(1000, (sizes.batch,)),
    }


FAMILIES = {
    "DiTTransformer2DModel": Family(
        Adapter(
            block_lists=(BlockList("transformer_blocks", shared=ARGUMENTS),),
            accepts=("hidden_states", *ARGUMENTS, "return_dict"),
            check=checked_by(("AttnProcessor", "AttnProcessor2_0")),
        ),
        dit,
    ),
}
