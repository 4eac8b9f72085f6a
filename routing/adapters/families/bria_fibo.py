"""Bria FIBO: double blocks, then single ones on text and image together, with a text of its own for each.

FIBO 2 has one sequence: tokens that sum up the text, the image, and those of images to edit.
"""

import torch
import torch.nn as nn

from routing.adapters.adapter import Adapter, Arguments, BlockList
from routing.adapters.families.parts import (
    INPUTS,
    TEXT_DIM,
    Built,
    Family,
    Sizes,
    axes_of,
    checked_by,
    double_and_single,
    gather_mask,
    joint_mask,
    joint_rotary,
    num_reference_tokens,
    num_text_tokens,
)

GIST = ("min_num_gist_tokens", "max_num_gist_tokens", "gist_step", "gist_min_text_len", "gist_max_text_len")
BY_TOKEN = {"image_rotary_emb": joint_rotary, "joint_attention_kwargs": joint_mask}
BLOCK_2 = {
    "tokens": "x",
    "joint": True,
    "by_token": {
        "attn_mask": lambda mask, kept: gather_mask(mask, kept.gather_joint),  # (N, P + T + S)
        "freqs_cis": lambda table, kept: kept.gather_joint(table),  # (1, P + T + S, d)
        "noise_mask": lambda mask, kept: kept.gather_joint(mask),  # (N, P + T + S)
    },
    "shared": (
        *("adaln_input", "adaln_noisy", "adaln_clean"),
        *("encoder_hidden_states", "encoder_attention_mask"),
    ),
}


def _gist_counts(model: nn.Module, arguments: Arguments) -> list[int]:
    """Return how many tokens sum up the text of each sample."""
    from diffusers.models.transformers.transformer_bria_fibo2 import compute_gist_count

    text, mask = arguments["encoder_hidden_states"], arguments.get("encoder_attention_mask")
    # SYNC: the model does the same
    lengths = [text.shape[2]] * text.shape[0] if mask is None else mask.sum(dim=1).tolist()
    return compute_gist_count(lengths, *(model.config[key] for key in GIST))


def _num_prefix_tokens(model: nn.Module, arguments: Arguments) -> int:
    """Count the tokens of the text, which come last where they are padded."""
    counts = _gist_counts(model, arguments)
    return counts[0] if len(set(counts)) == 1 else 0


def _num_suffix_tokens(model: nn.Module, arguments: Arguments) -> int:
    """Count the tokens of images to edit, and those of the text where they come last."""
    counts, patch_size = _gist_counts(model, arguments), model.config.patch_size
    num_context_tokens = sum(
        (latents.shape[2] // patch_size) * (latents.shape[3] // patch_size)
        for latents in arguments.get("context_latents") or ()
    )
    return num_context_tokens + (max(counts) if len(set(counts)) > 1 else 0)


def fibo(sizes: Sizes) -> Built:
    """A third of double blocks; a mask of text with padding."""
    from diffusers import BriaFiboTransformer2DModel

    options = double_and_single(sizes)
    options |= {"axes_dims_rope": axes_of(sizes.head_dim), "joint_attention_dim": TEXT_DIM}
    image_mask = torch.ones(sizes.batch, sizes.side**2, dtype=torch.bool)
    mask = torch.cat([sizes.text_mask, image_mask], dim=1)
    return BriaFiboTransformer2DModel(**options, **sizes.heads, text_encoder_dim=TEXT_DIM), {
        "hidden_states": sizes.tokens(64),
        "encoder_hidden_states": sizes.text,
        "text_encoder_layers": [sizes.text for _ in range(sizes.depth)],
        "timestep": 1000 * torch.rand(sizes.batch),
        "img_ids": sizes.positions,
        "txt_ids": torch.zeros(sizes.num_text, 3),
        "joint_attention_kwargs": {"attention_mask": mask[:, None, None]},
    }


def fibo_2(sizes: Sizes) -> Built:
    """An image to edit, of two tokens; one block reads the text."""
    from diffusers import BriaFibo2Transformer2DModel

    options = {"dim": sizes.width, "n_layers": sizes.depth, "n_heads": sizes.num_heads, "patch_size": 2}
    options |= {"injection_layer_ids": (sizes.depth // 2,), "axes_dims": axes_of(sizes.head_dim)}
    options |= {"min_num_gist_tokens": 3, "max_num_gist_tokens": 3, "gist_step": 1, "axes_lens": (64, 64, 64)}
    model = BriaFibo2Transformer2DModel(**options, cap_feat_dim=TEXT_DIM)
    return model, {
        "hidden_states": sizes.image(32),
        "encoder_hidden_states": torch.stack([sizes.text, sizes.text], dim=1),
        "encoder_attention_mask": sizes.text_mask,
        "timestep": torch.rand(sizes.batch),
        "context_latents": [torch.randn(sizes.batch, 32, 2, 4)],
    }


FAMILIES = {
    "BriaFiboTransformer2DModel": Family(
        Adapter(
            block_lists=(
                BlockList(
                    "transformer_blocks",
                    output=1,
                    by_token=BY_TOKEN,
                    shared=("encoder_hidden_states", "temb"),
                ),
                BlockList("single_transformer_blocks", joint=True, by_token=BY_TOKEN, shared=("temb",)),
            ),
            accepts=(
                *(*INPUTS, "text_encoder_layers", "img_ids", "txt_ids", "guidance"),
                "joint_attention_kwargs",
            ),
            num_prefix_tokens=num_text_tokens,
            num_suffix_tokens=num_reference_tokens(0),
            check=checked_by(
                ("BriaFiboAttnProcessor", "BriaAttnProcessor"),
                "joint_attention_kwargs",
                ("scale", "attention_mask"),
            ),
        ),
        fibo,
    ),
    "BriaFibo2Transformer2DModel": Family(
        Adapter(
            block_lists=(BlockList("layers", **BLOCK_2),),
            accepts=(*INPUTS, "encoder_attention_mask", "context_latents"),
            num_prefix_tokens=_num_prefix_tokens,
            num_suffix_tokens=_num_suffix_tokens,
            check=checked_by(("BriaFibo2AttnProcessor",)),
        ),
        fibo_2,
    ),
}
