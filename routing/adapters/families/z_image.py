"""Z-Image: one sequence of the image, its padding, and the text; the refiners before it are not routed."""

import torch
import torch.nn as nn

from routing.adapters.adapter import Adapter, Arguments, BlockList
from routing.adapters.families.parts import TEXT_DIM, Built, Family, Sizes, axes_of, checked_by, gather_mask

BLOCK = {
    "tokens": "x",
    "by_token": {
        "freqs_cis": lambda table, kept: kept.gather(table),  # (N, T + S, d)
        "attn_mask": lambda mask, kept: gather_mask(mask, kept.gather),  # (N, T + S)
    },
    "shared": ("adaln_input",),
}
PATCH_SIZE = 2  # of the model's own argument, which is not accepted
MULTIPLE = 32  # image and text are padded to multiples of this many tokens


def _padded(num_tokens: int) -> int:
    return -(-num_tokens // MULTIPLE) * MULTIPLE


def _num_suffix_tokens(model: nn.Module, arguments: Arguments) -> int:
    """Count the padding of the image and the longest text, in a batch of images of one size."""
    images, texts = arguments["x"], arguments["cap_feats"]
    if any(not isinstance(image, torch.Tensor) or image.shape != images[0].shape for image in images):
        raise ValueError("x: routing takes one image a sample, all of one size")
    _, frames, height, width = images[0].shape
    num_tokens = frames * (height // PATCH_SIZE) * (width // PATCH_SIZE)
    return _padded(num_tokens) - num_tokens + max(_padded(len(text)) for text in texts)


def z_image(sizes: Sizes) -> Built:
    """Every second text is longer by 32 tokens, and the others are padded."""
    from diffusers import ZImageTransformer2DModel

    options = {"dim": sizes.width, "n_layers": sizes.depth, "cap_feat_dim": TEXT_DIM}
    options |= {
        "n_heads": sizes.num_heads,
        "n_kv_heads": sizes.num_heads,
        "axes_dims": axes_of(sizes.head_dim),
    }
    lengths = [sizes.num_text + MULTIPLE * (i % 2) for i in range(sizes.batch)]
    return ZImageTransformer2DModel(**options), {
        "x": [*sizes.image(16, frames=1)],
        "t": torch.rand(sizes.batch),
        "cap_feats": [torch.randn(length, TEXT_DIM) for length in lengths],
    }


FAMILIES = {
    "ZImageTransformer2DModel": Family(
        Adapter(
            block_lists=(BlockList("layers", **BLOCK),),
            accepts=("x", "t", "cap_feats", "return_dict", "joint_attention_kwargs"),
            num_suffix_tokens=_num_suffix_tokens,
            check=checked_by(("ZSingleStreamAttnProcessor",), "joint_attention_kwargs"),
        ),
        z_image,
    ),
}
