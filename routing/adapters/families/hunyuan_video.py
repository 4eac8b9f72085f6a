"""HunyuanVideo: double blocks, then single ones (1.5 has none); in attention the text comes last.

FramePack's tokens of earlier frames come before those that are generated.
"""

import math

import torch
import torch.nn as nn

from routing.adapters.adapter import Adapter, Arguments, BlockList
from routing.adapters.families.parts import (
    INPUTS,
    POOLED_DIM,
    TEXT_DIM,
    Built,
    Family,
    Sizes,
    axes_of,
    checked_by,
    double_and_single,
    joint_rotary,
    mask_before_text,
    mask_between_text,
    rotary,
)

# Blocks take what others do with the first frame as `args`, and leave it alone.
SHARED = ("encoder_hidden_states", "temb", "args")
PROCESSORS = ("HunyuanVideoAttnProcessor2_0", "AttnProcessor2_0")
# Of FramePack's earlier frames, and how many latents one of their tokens covers along each axis.
HISTORY = {"clean": (1, 2, 2), "history_2x": (2, 4, 4), "history_4x": (4, 8, 8)}


def _num_history_tokens(model: nn.Module, arguments: Arguments) -> int:
    given = {name: arguments.get(f"latents_{name}") for name in HISTORY}  # (N, C, frames, height, width)
    return sum(
        math.prod(-(-size // stride) for size, stride in zip(x.shape[2:], HISTORY[name], strict=True))
        for name, x in given.items()
        if x is not None
    )


def hunyuan_video(sizes: Sizes) -> Built:
    """A third of double blocks; 4 frames of half the side."""
    from diffusers import HunyuanVideoTransformer3DModel

    options = double_and_single(sizes)
    options |= {"rope_axes_dim": axes_of(sizes.head_dim), "pooled_projection_dim": POOLED_DIM}
    return HunyuanVideoTransformer3DModel(**options, **sizes.heads, text_embed_dim=TEXT_DIM), {
        "hidden_states": sizes.image(16, patch_size=1, frames=4),
        "encoder_hidden_states": sizes.text,
        "encoder_attention_mask": sizes.text_mask,
        "pooled_projections": torch.randn(sizes.batch, POOLED_DIM),
        "timestep": torch.randint(1000, (sizes.batch,)),
        "guidance": torch.full((sizes.batch,), 6000.0),
    }


def hunyuan_video_15(sizes: Sizes) -> Built:
    """4 frames of half the side, with a second text and a reference image."""
    from diffusers import HunyuanVideo15Transformer3DModel

    options = {"num_layers": sizes.depth, "text_embed_dim": TEXT_DIM, "text_embed_2_dim": TEXT_DIM}
    options |= {"rope_axes_dim": axes_of(sizes.head_dim), "image_embed_dim": POOLED_DIM}
    latents = torch.randn(sizes.batch, 65, 4, sizes.side // 2, sizes.side // 2)
    return HunyuanVideo15Transformer3DModel(**options, **sizes.heads), {
        "hidden_states": latents,
        "encoder_hidden_states": sizes.text,
        "encoder_attention_mask": sizes.text_mask,
        "encoder_hidden_states_2": sizes.text,
        "encoder_attention_mask_2": sizes.text_mask,
        "image_embeds": torch.randn(sizes.batch, 3, POOLED_DIM),
        "timestep": 1000 * torch.rand(sizes.batch),
    }


def framepack(sizes: Sizes) -> Built:
    """4 frames of half the side, after 1, 2 and 4 frames at three resolutions."""
    from diffusers import HunyuanVideoFramepackTransformer3DModel

    options = double_and_single(sizes)
    options |= {"rope_axes_dim": axes_of(sizes.head_dim), "pooled_projection_dim": POOLED_DIM}
    options |= {"has_image_proj": True, "image_proj_dim": POOLED_DIM, "has_clean_x_embedder": True}
    arguments = {
        "hidden_states": sizes.image(16, patch_size=1, frames=4),
        "encoder_hidden_states": sizes.text,
        "encoder_attention_mask": sizes.text_mask,
        "pooled_projections": torch.randn(sizes.batch, POOLED_DIM),
        "image_embeds": torch.randn(sizes.batch, 3, POOLED_DIM),
        "timestep": torch.randint(1000, (sizes.batch,)),
        "guidance": torch.full((sizes.batch,), 6000.0),
        "indices_latents": torch.arange(7, 11),
    }
    for name, first, frames in (("history_4x", 0, 4), ("history_2x", 4, 2), ("clean", 6, 1)):
        arguments[f"latents_{name}"] = sizes.image(16, patch_size=1, frames=frames)
        arguments[f"indices_latents_{name}"] = torch.arange(first, first + frames)
    model = HunyuanVideoFramepackTransformer3DModel(**options, **sizes.heads, text_embed_dim=TEXT_DIM)
    return model, arguments


FAMILIES = {
    "HunyuanVideoTransformer3DModel": Family(
        Adapter(
            block_lists=(
                BlockList(
                    "transformer_blocks",
                    output=0,
                    by_token={"freqs_cis": rotary, "attention_mask": mask_before_text},
                    shared=SHARED,
                ),
                BlockList(
                    "single_transformer_blocks",
                    output=0,
                    by_token={"image_rotary_emb": rotary, "attention_mask": mask_before_text},
                    shared=SHARED,
                ),
            ),
            accepts=(*INPUTS, "encoder_attention_mask", "pooled_projections", "guidance", "attention_kwargs"),
            check=checked_by(PROCESSORS, "attention_kwargs"),
        ),
        hunyuan_video,
    ),
    "HunyuanVideo15Transformer3DModel": Family(
        Adapter(
            block_lists=(
                BlockList(
                    "transformer_blocks",
                    output=0,
                    by_token={"freqs_cis": rotary},
                    shared=("encoder_hidden_states", "temb", "attention_mask"),  # a mask of the text alone
                ),
            ),
            accepts=(
                *(*INPUTS, "encoder_attention_mask", "encoder_hidden_states_2", "encoder_attention_mask_2"),
                *("image_embeds", "attention_kwargs"),
            ),
            check=checked_by(("HunyuanVideo15AttnProcessor2_0", "AttnProcessor2_0"), "attention_kwargs"),
        ),
        hunyuan_video_15,
    ),
    "HunyuanVideoFramepackTransformer3DModel": Family(
        Adapter(
            block_lists=(
                BlockList(
                    "transformer_blocks",
                    output=0,
                    joint=True,
                    by_token={
                        "freqs_cis": joint_rotary,
                        "attention_mask": mask_between_text,
                    },
                    shared=SHARED,
                ),
                BlockList(
                    "single_transformer_blocks",
                    output=0,
                    joint=True,
                    by_token={
                        "image_rotary_emb": joint_rotary,
                        "attention_mask": mask_between_text,
                    },
                    shared=SHARED,
                ),
            ),
            accepts=(
                *(*INPUTS, "encoder_attention_mask", "pooled_projections", "guidance", "attention_kwargs"),
                *("image_embeds", "indices_latents"),
                *(f"{kind}latents_{name}" for name in HISTORY for kind in ("", "indices_")),
            ),
            num_prefix_tokens=_num_history_tokens,
            check=checked_by(PROCESSORS, "attention_kwargs"),
        ),
        framepack,
    ),
}
