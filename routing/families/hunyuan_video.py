"""HunyuanVideo: double and single blocks, which take image and text apart; masks have the image first."""

import torch

from routing.adapter import Adapter, BlockList
from routing.families.parts import (
    INPUTS,
    POOLED_DIM,
    TEXT_DIM,
    Built,
    Family,
    Sizes,
    axes_of,
    checked_by,
    double_and_single,
    rotary,
    text_mask,
)

SHARED = ("encoder_hidden_states", "temb", "args")
PROCESSORS = ("HunyuanVideoAttnProcessor2_0", "AttnProcessor2_0")  # the second refines the text


def hunyuan_video(sizes: Sizes) -> Built:
    """A third of double blocks, one frame."""
    from diffusers import HunyuanVideoTransformer3DModel

    options = {**double_and_single(sizes), "num_refiner_layers": 1, "text_embed_dim": TEXT_DIM}
    options |= {"pooled_projection_dim": POOLED_DIM, "rope_axes_dim": axes_of(sizes.head_dim)}
    return HunyuanVideoTransformer3DModel(**options, **sizes.heads), {
        "hidden_states": sizes.image(16, frames=1),
        "encoder_hidden_states": sizes.text,
        "encoder_attention_mask": text_mask(sizes),
        "timestep": 1000 * torch.rand(sizes.batch),
        "pooled_projections": torch.randn(sizes.batch, POOLED_DIM),
        "guidance": torch.full((sizes.batch,), 6.0),
    }


def _block(positions: str) -> dict:
    mask = lambda mask, kept: kept.gather_leading(mask, -1)  # noqa: E731  (N, 1, 1, T + P)
    return {"output": 0, "by_token": {positions: rotary, "attention_mask": mask}, "shared": SHARED}


FAMILIES = {
    "HunyuanVideoTransformer3DModel": Family(
        Adapter(
            block_lists=(
                BlockList("transformer_blocks", **_block("freqs_cis")),
                BlockList("single_transformer_blocks", **_block("image_rotary_emb")),
            ),
            accepts=(*INPUTS, "encoder_attention_mask", "pooled_projections", "guidance"),
            check=checked_by(PROCESSORS),
        ),
        hunyuan_video,
    ),
}
