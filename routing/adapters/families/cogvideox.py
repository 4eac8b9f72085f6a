"""CogVideoX and ConsisID: joint blocks, with rotary positions or positions that are added before."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn as nn

from routing.adapters.adapter import Adapter, BlockList
from routing.adapters.families.parts import (
    INPUTS,
    POOLED_DIM,
    TEXT_DIM,
    Built,
    Family,
    Sizes,
    checked_by,
    rotary,
)

BLOCK = {
    "output": 0,
    "by_token": {"image_rotary_emb": rotary},
}
SHARED = ("encoder_hidden_states", "temb")
PROCESSORS = ("CogVideoXAttnProcessor2_0", "FusedCogVideoXAttnProcessor2_0")


def _built(kind: Callable[..., nn.Module], sizes: Sizes) -> Built:
    """4 frames of half the side."""
    options = {"num_layers": sizes.depth, "text_embed_dim": TEXT_DIM, "sample_frames": 13}
    options |= {
        "sample_width": sizes.side,
        "sample_height": sizes.side,
        "max_text_seq_length": sizes.num_text,
    }
    angles = torch.randn(sizes.side**2, sizes.head_dim // 2).repeat_interleave(2, dim=1)
    return kind(**options, **sizes.heads, use_rotary_positional_embeddings=True), {
        "hidden_states": sizes.image(16, patch_size=1, frames=4).transpose(1, 2),
        "encoder_hidden_states": sizes.text,
        "timestep": torch.randint(1000, (sizes.batch,)),
        "image_rotary_emb": (angles.cos(), angles.sin()),
    }


def cogvideox(sizes: Sizes) -> Built:
    """All blocks are alike."""
    from diffusers import CogVideoXTransformer3DModel

    return _built(CogVideoXTransformer3DModel, sizes)


def consisid(sizes: Sizes) -> Built:
    """All blocks are alike; a face is attended to after every second one."""
    from diffusers import ConsisIDTransformer3DModel

    face = {"LFE_id_dim": POOLED_DIM, "LFE_vit_dim": POOLED_DIM, "LFE_depth": 5, "LFE_num_scale": 5}
    face |= {"LFE_output_dim": int(sizes.width / 3 * 2), "cross_attn_num_heads": sizes.num_heads}
    face |= {"is_train_face": True, "cross_attn_dim_head": sizes.head_dim}
    kind = partial(ConsisIDTransformer3DModel, **face)
    model, arguments = _built(kind, sizes)
    images = [torch.randn(sizes.batch, 3, POOLED_DIM) for _ in range(5)]
    return model, {**arguments, "id_cond": torch.randn(sizes.batch, POOLED_DIM), "id_vit_hidden": images}


FAMILIES = {
    "CogVideoXTransformer3DModel": Family(
        Adapter(
            block_lists=(BlockList("transformer_blocks", **BLOCK, shared=(*SHARED, "attention_kwargs")),),
            accepts=(*INPUTS, "image_rotary_emb", "attention_kwargs"),
            check=checked_by(PROCESSORS, "attention_kwargs"),
        ),
        cogvideox,
    ),
    "ConsisIDTransformer3DModel": Family(
        Adapter(
            block_lists=(BlockList("transformer_blocks", **BLOCK, shared=SHARED),),
            accepts=(*INPUTS, "image_rotary_emb", "attention_kwargs", "id_cond", "id_vit_hidden"),
            check=checked_by(PROCESSORS, "attention_kwargs"),
        ),
        consisid,
    ),
}
