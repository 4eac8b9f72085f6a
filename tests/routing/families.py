"""Tiny models of the real classes of diffusers with random weights, inputs for them, and an oracle for each.

An oracle runs the model's own parts one after another on one sample at a time, and takes the tokens that stay
as given: it shares nothing with `routing`. Within a window it cuts the sequence, the positions, and whatever
else is indexed by token.
"""

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

from routing import sample_ids_keep

NUM_SAMPLES, NUM_TOKENS, NUM_TEXT, HIDDEN_SIZE = 3, 16, 5, 32


@dataclass(frozen=True)
class Family:
    build: Callable
    arguments: Callable
    oracle: Callable
    block_lists: tuple[str, ...]
    image: str = "hidden_states"
    output: int | None = None  # of a block: where its tokens are

    def layers(self, model):
        return [block for name in self.block_lists for block in getattr(model, name)]


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def drawn(routes, num_samples=NUM_SAMPLES, num_reference_tokens=0, generator=None):
    """Return the tokens (N, K) that each route keeps, as documented: drawn from a seed for each route."""
    generator, ids = generator or seeded(), []
    reference = torch.arange(NUM_TOKENS, NUM_TOKENS + num_reference_tokens).expand(num_samples, -1)
    for route in routes:
        route_seed = int(torch.randint(2**63 - 1, (), generator=generator))
        kept = sample_ids_keep(num_samples, NUM_TOKENS, route.selection_ratio, generator=seeded(route_seed))
        ids.append(torch.cat([kept, reference], dim=1))
    return ids


def one(arguments, n):
    """Return the arguments of one sample: what has as many rows as there are samples is cut."""

    def cut(value):
        if isinstance(value, torch.Tensor):
            return value[n : n + 1] if value.shape[0] == NUM_SAMPLES else value
        if isinstance(value, dict):
            return {key: cut(item) for key, item in value.items()}
        return [cut(item) for item in value] if isinstance(value, list) else value

    return {name: cut(value) for name, value in arguments.items()}


class Trunk:
    """The tokens of one sample between layers; windows: {first layer: (last layer, kept positions)}."""

    def __init__(self, x, windows):
        self.x, self.windows, self.end, self.ids, self.whole = x, windows, None, None, None

    def enter(self, layer):
        if layer in self.windows:
            self.end, self.ids = self.windows[layer]
            self.whole, self.x = self.x, self.x[:, self.ids]

    def leave(self, layer):
        if layer == self.end:
            whole = self.whole.clone()
            whole[:, self.ids] = self.x
            self.x, self.end, self.ids = whole, None, None

    def cut(self, x, num_text=0, dim=0):
        """Cut what is indexed by token to those that are there, the text in front."""
        if self.ids is None:
            return x
        text = torch.arange(num_text)
        return x.index_select(dim, torch.cat([text, self.ids + num_text]))


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


# FLUX
# -----------------------------------------------------------------------------------------------------------


@filled
def flux():
    return FluxTransformer2DModel(
        in_channels=4,
        num_layers=3,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
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


def flux_oracle(model, arguments, windows):
    a = arguments
    x, text = model.x_embedder(a["hidden_states"]), model.context_embedder(a["encoder_hidden_states"])
    temb = model.time_text_embed(1000 * a["timestep"], 1000 * a["guidance"], a["pooled_projections"])
    rope = model.pos_embed(torch.cat([a["txt_ids"], a["img_ids"]]))
    mask = (a.get("joint_attention_kwargs") or {}).get("attention_mask")
    residuals = a.get("controlnet_block_samples") or [], a.get("controlnet_single_block_samples") or []
    trunk, P, layer = Trunk(x, windows), text.shape[1], 0
    lists = (model.transformer_blocks, model.single_transformer_blocks)
    for blocks, added in zip(lists, residuals, strict=True):
        for i, block in enumerate(blocks):
            trunk.enter(layer)
            kwargs = {}
            if mask is not None:
                kwargs = {"attention_mask": trunk.cut(trunk.cut(mask, P, 2), P, 3)}
            text, trunk.x = block(trunk.x, text, temb, tuple(trunk.cut(table, P) for table in rope), kwargs)
            if added:
                every = -(-len(blocks) // len(added))
                trunk.x = trunk.x + trunk.cut(added[i // every], dim=1)
            trunk.leave(layer)
            layer += 1
    return model.proj_out(model.norm_out(trunk.x, temb))


# Stable Diffusion 3
# -----------------------------------------------------------------------------------------------------


@filled
def sd3():
    return SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=5,
        attention_head_dim=16,
        num_attention_heads=2,
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


def sd3_oracle(model, arguments, windows):
    a = arguments
    temb = model.time_text_embed(a["timestep"], a["pooled_projections"])
    text, added = model.context_embedder(a["encoder_hidden_states"]), a.get("block_controlnet_hidden_states")
    trunk, depth = Trunk(model.pos_embed(a["hidden_states"]), windows), len(model.transformer_blocks)
    for layer, block in enumerate(model.transformer_blocks):
        trunk.enter(layer)
        text, trunk.x = block(trunk.x, text, temb)
        if added and layer < depth - 1:
            trunk.x = trunk.x + trunk.cut(added[int(layer / (depth / len(added)))], dim=1)
        trunk.leave(layer)
    return unpatchify(model.proj_out(model.norm_out(trunk.x, temb)), 4)


def unpatchify(x, channels):
    """(1, 16, 2 * 2 * channels) -> (1, channels, 8, 8)."""
    return x.reshape(1, 4, 4, 2, 2, channels).permute(0, 5, 1, 3, 2, 4).reshape(1, channels, 8, 8)


# PixArt
# -----------------------------------------------------------------------------------------------------------


@filled
def pixart():
    return PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
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


def pixart_oracle(model, arguments, windows):
    a = arguments
    temb, embedded = model.adaln_single(
        a["timestep"], a["added_cond_kwargs"], batch_size=1, hidden_dtype=torch.float32
    )
    text = model.caption_projection(a["encoder_hidden_states"])
    text_mask = -10000.0 * (1 - a["encoder_attention_mask"].float()).unsqueeze(1)
    mask = a.get("attention_mask")
    trunk = Trunk(model.pos_embed(a["hidden_states"]), windows)
    for layer, block in enumerate(model.transformer_blocks):
        trunk.enter(layer)
        seen = None if mask is None else -10000.0 * (1 - trunk.cut(mask, dim=1)).unsqueeze(1)
        trunk.x = block(trunk.x, seen, text, text_mask, temb)
        trunk.leave(layer)
    shift, scale = (model.scale_shift_table[None] + embedded[:, None]).chunk(2, dim=1)
    return unpatchify(model.proj_out(model.norm_out(trunk.x) * (1 + scale) + shift), 8)


# AuraFlow
# -----------------------------------------------------------------------------------------------------------


@filled
def auraflow():
    return AuraFlowTransformer2DModel(
        sample_size=8,
        num_mmdit_layers=2,
        num_single_dit_layers=4,
        attention_head_dim=16,
        num_attention_heads=2,
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


def auraflow_oracle(model, arguments, windows):
    a = arguments
    temb = model.time_step_proj(model.time_step_embed(a["timestep"]))
    text = torch.cat([model.register_tokens, model.context_embedder(a["encoder_hidden_states"])], dim=1)
    trunk, P = Trunk(model.pos_embed(a["hidden_states"]), windows), text.shape[1]
    for layer, block in enumerate([*model.joint_transformer_blocks, *model.single_transformer_blocks]):
        trunk.enter(layer)
        if layer < len(model.joint_transformer_blocks):
            text, trunk.x = block(trunk.x, text, temb)
        else:
            both = block(torch.cat([text, trunk.x], dim=1), temb)
            text, trunk.x = both[:, :P], both[:, P:]
        trunk.leave(layer)
    return unpatchify(model.proj_out(model.norm_out(trunk.x, temb)), 4)


# Wan
# -----------------------------------------------------------------------------------------------------------


@filled
def wan():
    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
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


def wan_oracle(model, arguments, windows):
    a = arguments
    x = model.patch_embedding(a["hidden_states"]).flatten(2).transpose(1, 2)
    per_token = a["timestep"].ndim == 2
    temb, projected, text, image = model.condition_embedder(
        a["timestep"].flatten(),
        a["encoder_hidden_states"],
        a.get("encoder_hidden_states_image"),
        timestep_seq_len=NUM_TOKENS if per_token else None,
    )
    text = text if image is None else torch.cat([image, text], dim=1)
    projected = projected.unflatten(-1, (6, -1))
    rope, trunk = model.rope(a["hidden_states"]), Trunk(x, windows)
    for layer, block in enumerate(model.blocks):
        trunk.enter(layer)
        modulation = trunk.cut(projected, dim=1) if per_token else projected
        trunk.x = block(trunk.x, text, modulation, tuple(trunk.cut(table, dim=1) for table in rope))
        trunk.leave(layer)
    table = model.scale_shift_table  # (1, 2, D)
    shift, scale = (
        (table[None] + temb[:, :, None]).unbind(2) if per_token else (table + temb[:, None]).chunk(2, dim=1)
    )
    x = model.proj_out(model.norm_out(trunk.x) * (1 + scale) + shift)  # (1, T, 2 * 2 * 4)
    return x.reshape(1, 4, 2, 2, 2, 2, 4).permute(0, 6, 1, 2, 4, 3, 5).reshape(1, 4, 4, 4, 4)


FAMILIES = {
    "flux": Family(
        flux, flux_arguments, flux_oracle, ("transformer_blocks", "single_transformer_blocks"), output=1
    ),
    "sd3": Family(sd3, sd3_arguments, sd3_oracle, ("transformer_blocks",), output=1),
    "pixart": Family(pixart, pixart_arguments, pixart_oracle, ("transformer_blocks",)),
    "auraflow": Family(
        auraflow,
        auraflow_arguments,
        auraflow_oracle,
        ("joint_transformer_blocks", "single_transformer_blocks"),
    ),
    "wan": Family(wan, wan_arguments, wan_oracle, ("blocks",)),
}
