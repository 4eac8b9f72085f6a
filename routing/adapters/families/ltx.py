"""LTX-Video, LTX-2 and SANA-WM's refiner: rotary positions over frames, rows and columns."""

import torch

from routing.adapters.adapter import Adapter, BlockList, TokenSelection
from routing.adapters.families.parts import INPUTS, TEXT_DIM, Built, Family, Sizes, checked_by, gather_each


def _timesteps(temb: torch.Tensor, kept: TokenSelection) -> torch.Tensor:
    """Gather (N, T, D) where each token has its own timestep, not (N, 1, D)."""
    return kept.gather(temb) if temb.shape[1] > 1 else temb


def _heads_rotary(
    tables: tuple[torch.Tensor, torch.Tensor], kept: TokenSelection
) -> tuple[torch.Tensor, ...]:
    """Gather (N, T, D), or (N, heads, T, d)."""
    return tuple(kept.gather(table, table.ndim - 2) for table in tables)


BLOCK = {
    "by_token": {"image_rotary_emb": gather_each, "temb": _timesteps},
    "shared": ("encoder_hidden_states", "encoder_attention_mask"),
}
BLOCK_2 = {
    "output": 0,
    "by_token": {
        **dict.fromkeys(("video_rotary_emb", "ca_video_rotary_emb"), _heads_rotary),
        **dict.fromkeys(("temb", "temb_ca_scale_shift", "temb_ca_gate"), _timesteps),
    },
    "shared": (
        *("audio_hidden_states", "encoder_hidden_states", "audio_encoder_hidden_states"),
        *("encoder_attention_mask", "audio_encoder_attention_mask"),
        *("temb_audio", "temb_ca_audio_scale_shift", "temb_ca_audio_gate"),
        *("audio_rotary_emb", "ca_audio_rotary_emb"),
        *("use_a2v_cross_attention", "use_v2a_cross_attention", "all_perturbed"),
    ),
}
REFINER_BLOCK = {
    "by_token": {"video_rotary_emb": _heads_rotary, "temb": _timesteps},
    "shared": ("encoder_hidden_states", "encoder_attention_mask"),
}
GRID = ("num_frames", "height", "width")


def _text(sizes: Sizes) -> dict[str, torch.Tensor]:
    return {"encoder_hidden_states": sizes.text, "encoder_attention_mask": sizes.text_mask}


def _grid(sizes: Sizes) -> dict[str, int]:
    """4 frames of half the side."""
    return dict(zip(GRID, (4, sizes.side // 2, sizes.side // 2), strict=True))


def ltx(sizes: Sizes) -> Built:
    """All blocks are alike; each token has its own timestep, as where images are given."""
    from diffusers import LTXVideoTransformer3DModel

    options = {"num_layers": sizes.depth, "caption_channels": TEXT_DIM, "cross_attention_dim": sizes.width}
    return LTXVideoTransformer3DModel(**options, **sizes.heads), {
        **{"hidden_states": sizes.tokens(128), **_text(sizes), **_grid(sizes)},
        "timestep": torch.randint(1000, (sizes.batch, sizes.side**2)),
    }


def ltx_2(sizes: Sizes) -> Built:
    """Video with a timestep for each token, and 3 tokens of audio, which are never routed."""
    from diffusers import LTX2VideoTransformer3DModel

    audio_dim = sizes.width // 2
    options = {"num_layers": sizes.depth, "caption_channels": TEXT_DIM, "cross_attention_dim": sizes.width}
    options |= {"audio_num_attention_heads": sizes.num_heads, "rope_type": "split"}
    options |= {"audio_attention_head_dim": sizes.head_dim // 2, "audio_cross_attention_dim": audio_dim}
    return LTX2VideoTransformer3DModel(**options, **sizes.heads), {
        **{"hidden_states": sizes.tokens(128), **_text(sizes), **_grid(sizes)},
        "timestep": torch.randint(1000, (sizes.batch, sizes.side**2)),
        "audio_hidden_states": torch.randn(sizes.batch, 3, 128),
        "audio_encoder_hidden_states": sizes.text,
        "audio_encoder_attention_mask": sizes.text_mask,
        "audio_timestep": torch.randint(1000, (sizes.batch,)),
        "audio_num_frames": 3,
        "isolate_modalities": True,
    }


def sana_wm_refiner(sizes: Sizes) -> Built:
    """All blocks are alike; without earlier frames."""
    from diffusers import SanaWMLTX2RefinerTransformer3DModel

    options = {"num_layers": sizes.depth, "caption_channels": TEXT_DIM, "cross_attention_dim": sizes.width}
    angles = torch.randn(1, sizes.side**2, sizes.width // 2).repeat_interleave(2, dim=2)
    return SanaWMLTX2RefinerTransformer3DModel(**options, **sizes.heads), {
        **{"hidden_states": sizes.tokens(128), **_text(sizes)},
        "timestep": torch.randint(1000, (sizes.batch, sizes.side**2)),
        "video_rotary_emb": (angles.cos(), angles.sin()),
    }


FAMILIES = {
    "LTXVideoTransformer3DModel": Family(
        Adapter(
            block_lists=(BlockList("transformer_blocks", **BLOCK),),
            accepts=(*INPUTS, "encoder_attention_mask", *GRID, "attention_kwargs"),
            check=checked_by(("LTXVideoAttnProcessor",), "attention_kwargs"),
        ),
        ltx,
    ),
    "LTX2VideoTransformer3DModel": Family(
        Adapter(
            block_lists=(BlockList("transformer_blocks", **BLOCK_2),),
            accepts=(
                *(*INPUTS, "encoder_attention_mask", *GRID, "attention_kwargs"),
                *("audio_hidden_states", "audio_encoder_hidden_states", "audio_encoder_attention_mask"),
                *("audio_timestep", "audio_num_frames", "isolate_modalities"),
            ),
            check=checked_by(("LTX2AudioVideoAttnProcessor",), "attention_kwargs"),
        ),
        ltx_2,
    ),
    "SanaWMLTX2RefinerTransformer3DModel": Family(
        Adapter(
            block_lists=(BlockList("transformer_blocks", **REFINER_BLOCK),),
            accepts=(*INPUTS, "encoder_attention_mask", "video_rotary_emb", "attention_kwargs"),
            check=checked_by(
                ("SanaWMLTX2RefinerAttnProcessor", "SanaWMLTX2AudioVideoAttnProcessor"), "attention_kwargs"
            ),
        ),
        sana_wm_refiner,
    ),
}
