"""Tiny models of five classes of diffusers with random weights, and inputs for them in all their variants."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from diffusers import (
    AuraFlowTransformer2DModel,
    FluxTransformer2DModel,
    PixArtTransformer2DModel,
    SD3Transformer2DModel,
    WanTransformer3DModel,
)

NUM_SAMPLES, NUM_TOKENS, NUM_TEXT, HIDDEN_SIZE = 3, 16, 5, 32
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}


@dataclass(frozen=True)
class Family:
    build: Callable
    arguments: Callable
    block_lists: tuple[str, ...]

    def layers(self, model):
        return [block for name in self.block_lists for block in getattr(model, name)]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def filled(build):
    def filled_build():
        torch.manual_seed(0)
        model = build()
        with torch.no_grad():  # biases and tables that start at 0 could hide a mistake
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        return model.train()

    return filled_build


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@filled
def flux():
    return FluxTransformer2DModel(
        in_channels=4,
        num_layers=3,
        num_single_layers=4,
        **HEADS,
        joint_attention_dim=12,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )


def positions(num_tokens, image=0):
    ids = torch.zeros(num_tokens, 3)
    ids[:, 0], ids[:, 1], ids[:, 2] = image, torch.arange(num_tokens) // 4, torch.arange(num_tokens) % 4
    return ids


def flux_arguments(num_reference_tokens=0, controlnet=False, mask=False):
    N, T, P, S = NUM_SAMPLES, NUM_TOKENS, NUM_TEXT, num_reference_tokens
    arguments = {
        "hidden_states": randn(N, T + S, 4, seed=1),
        "encoder_hidden_states": randn(N, P, 12, seed=2),
        "pooled_projections": randn(N, 8, seed=3),
        "timestep": torch.tensor([0.2, 0.5, 0.9]),
        "guidance": torch.tensor([3.0, 3.5, 4.0]),
        "img_ids": torch.cat([positions(T), positions(S, image=1)]),
        "txt_ids": torch.zeros(P, 3),
    }
    if controlnet:
        arguments["controlnet_block_samples"] = [randn(N, T + S, HIDDEN_SIZE, seed=4 + i) for i in range(2)]
        single = [randn(N, T + S, HIDDEN_SIZE, seed=6 + i) for i in range(4)]
        arguments["controlnet_single_block_samples"] = single
    if mask:
        L = P + T + S
        seen = randn(N, 1, L, L, seed=10) > -0.5
        seen |= torch.eye(L, dtype=torch.bool)
        arguments["joint_attention_kwargs"] = {"attention_mask": seen}
    return arguments


@filled
def sd3():
    return SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=5,
        **HEADS,
        joint_attention_dim=12,
        caption_projection_dim=HIDDEN_SIZE,
        pooled_projection_dim=8,
        pos_embed_max_size=8,
        dual_attention_layers=(0, 2),
        qk_norm="rms_norm",
    )


def sd3_arguments(controlnet=False):
    N = NUM_SAMPLES
    arguments = {
        "hidden_states": randn(N, 4, 8, 8, seed=1),
        "encoder_hidden_states": randn(N, NUM_TEXT, 12, seed=2),
        "pooled_projections": randn(N, 8, seed=3),
        "timestep": torch.tensor([200.0, 500.0, 900.0]),
    }
    if controlnet:
        residuals = [randn(N, NUM_TOKENS, HIDDEN_SIZE, seed=4 + i) for i in range(2)]
        arguments["block_controlnet_hidden_states"] = residuals
    return arguments


@filled
def pixart():
    return PixArtTransformer2DModel(
        **HEADS,
        in_channels=4,
        out_channels=8,
        num_layers=5,
        cross_attention_dim=HIDDEN_SIZE,
        sample_size=8,
        caption_channels=12,
    )


def pixart_arguments(mask=False):
    N = NUM_SAMPLES
    arguments = {
        "hidden_states": randn(N, 4, 8, 8, seed=1),
        "encoder_hidden_states": randn(N, NUM_TEXT, 12, seed=2),
        "timestep": torch.tensor([200, 500, 900]),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }
    if mask:
        arguments["attention_mask"] = (randn(N, NUM_TOKENS, seed=4) > -0.5).float()
    return arguments


@filled
def auraflow():
    return AuraFlowTransformer2DModel(
        sample_size=8,
        num_mmdit_layers=2,
        num_single_dit_layers=4,
        **HEADS,
        joint_attention_dim=12,
        caption_projection_dim=HIDDEN_SIZE,
        pos_embed_max_size=16,
    )


def auraflow_arguments():
    return {
        "hidden_states": randn(NUM_SAMPLES, 4, 8, 8, seed=1),
        "encoder_hidden_states": randn(NUM_SAMPLES, NUM_TEXT, 12, seed=2),
        "timestep": torch.tensor([0.2, 0.5, 0.9]),
    }


@filled
def wan():
    return WanTransformer3DModel(
        **HEADS,
        in_channels=4,
        out_channels=4,
        text_dim=12,
        freq_dim=16,
        ffn_dim=64,
        num_layers=5,
        rope_max_seq_len=32,
    )


def wan_arguments(timestep_per_token=False):
    N = NUM_SAMPLES
    timestep = torch.tensor([200, 500, 900])
    if timestep_per_token:
        timestep = 100 * torch.arange(N)[:, None] + torch.arange(NUM_TOKENS)
    return {
        "hidden_states": randn(N, 4, 4, 4, 4, seed=1),  # 4 frames of 2 * 2 tokens
        "timestep": timestep,
        "encoder_hidden_states": randn(N, NUM_TEXT, 12, seed=2),
    }


FAMILIES = {
    "flux": Family(flux, flux_arguments, ("transformer_blocks", "single_transformer_blocks")),
    "sd3": Family(sd3, sd3_arguments, ("transformer_blocks",)),
    "pixart": Family(pixart, pixart_arguments, ("transformer_blocks",)),
    "auraflow": Family(
        auraflow, auraflow_arguments, ("joint_transformer_blocks", "single_transformer_blocks")
    ),
    "wan": Family(wan, wan_arguments, ("blocks",)),
}
