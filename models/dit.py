"""Diffusion transformer [DiT] whose tokens may bypass windows of blocks while it trains [TREAD].

Module names are those of the public DiT, SiT and TREAD checkpoints, which load by name. What differs on
purpose: the network never routes in `eval()` mode unless it is told to, and the label table always has a row
for the null class.

Shapes: N samples, C channels, H = W = input_size, T tokens of the image, P prefix tokens, L = P + T, K tokens
kept by a route, D channels of a token, d channels of a head.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.nn as nn
from timm.layers import PatchEmbed
from torch.utils.checkpoint import checkpoint

from models.blocks import BLOCKS, FinalLayer
from models.layers import LabelEmbedder, TimestepEmbedder, drop_labels, rotary_table, sincos_position_table
from routing import (
    Route,
    end_route,
    gather_tokens,
    num_tokens_kept,
    resolve_routes,
    sample_ids_keep,
    start_route,
    token_importance,
)

INITS = ("adaln_zero", "xavier")
ATTENTIONS = ("auto", "sdpa", "explicit")


class DiT(nn.Module):
    """Diffusion transformer with optional token routes.

    Args:
        input_size: height and width of the latent.
        num_classes: number of classes; 0 builds an unconditional network.
        class_dropout_prob: probability of training on the null class.
        learn_sigma: give the final layer 2C channels, as public DiT and SiT checkpoints have; only the first
            C are used.
        init: `adaln_zero` starts every block as the identity and the output at zero [DiT]; `xavier` is the
            initialisation of the public TREAD code, which overwrites those zeros.
        block: `dit`, or `modern`: RMSNorm, QK-norm, SwiGLU, and rotary positions in place of the position
            table.
        attention: backend of the attention; `auto` chooses by device and precision, see
            `models.layers.Attention`.
        num_prefix_tokens: learned tokens before those of the image; they take part in attention and never
            bypass.
        routes: windows of blocks that a part of the tokens bypasses; none gives a plain DiT.
        importance_weight: 0 draws the kept tokens at random, 1 keeps those of the largest L1 norm.
        removal: false keeps the bypassing tokens as context in the window, and puts their earlier state back
            at its end (an ablation: the step is not cheaper).
        fp32_after_route: run the block after each route outside autocast, as the public TREAD code does.
        gradient_checkpointing: recompute each block in the backward pass: less memory, one more forward.

    Raises:
        ValueError: sizes that do not divide, an unknown choice, or an invalid route.
    """

    def __init__(
        self,
        input_size: int,
        patch_size: int,
        in_channels: int,
        hidden_size: int,
        depth: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        num_classes: int = 1000,
        class_dropout_prob: float = 0.1,
        learn_sigma: bool = False,
        init: str = "adaln_zero",
        block: str = "dit",
        attention: str = "auto",
        num_prefix_tokens: int = 0,
        routes: Sequence[Route] = (),
        importance_weight: float = 0.0,
        removal: bool = True,
        fp32_after_route: bool = False,
        gradient_checkpointing: bool = False,
    ):
        super().__init__()
        sizes = {
            "input_size": input_size,
            "patch_size": patch_size,
            "in_channels": in_channels,
            "hidden_size": hidden_size,
        }
        for name, size in {**sizes, "depth": depth, "num_heads": num_heads, "mlp_ratio": mlp_ratio}.items():
            if not size > 0:
                raise ValueError(f"model.{name}={size} must be greater than 0")
        for name, count in (("num_classes", num_classes), ("num_prefix_tokens", num_prefix_tokens)):
            if count < 0:
                raise ValueError(f"model.{name}={count} must not be negative")
        if input_size % patch_size:
            raise ValueError(f"model.patch_size={patch_size} must divide model.input_size={input_size}")
        if hidden_size % num_heads:
            raise ValueError(f"model.num_heads={num_heads} must divide model.hidden_size={hidden_size}")
        if not 0 <= class_dropout_prob < 1:
            raise ValueError(f"model.class_dropout_prob={class_dropout_prob} must be in [0, 1)")
        if not 0 <= importance_weight <= 1:
            raise ValueError(f"model.importance_weight={importance_weight} must be in [0, 1]")
        for name, value, choices in (
            ("init", init, INITS),
            ("block", block, BLOCKS),
            ("attention", attention, ATTENTIONS),
        ):
            if value not in choices:
                raise ValueError(f"model.{name}={value} must be one of {', '.join(choices)}")
        self.input_size, self.patch_size, self.in_channels = input_size, patch_size, in_channels
        self.num_classes, self.class_dropout_prob = num_classes, class_dropout_prob
        self.num_prefix_tokens = num_prefix_tokens
        self.routes = resolve_routes(routes, depth)
        self.importance_weight, self.removal = importance_weight, removal
        self.fp32_after_route, self.gradient_checkpointing = fp32_after_route, gradient_checkpointing

        out_channels = 2 * in_channels if learn_sigma else in_channels
        grid_size = input_size // patch_size
        self.x_embedder = PatchEmbed(input_size, patch_size, in_channels, hidden_size)
        self.num_tokens = self.x_embedder.num_patches
        for route in self.routes:
            if (
                route.selection_ratio
                and num_tokens_kept(self.num_tokens, route.selection_ratio) == self.num_tokens
            ):
                raise ValueError(
                    f"selection_ratio={route.selection_ratio} of the route of blocks {route.start_layer_idx} "
                    "to "
                    f"{route.end_layer_idx} lets none of {self.num_tokens} tokens bypass"
                )
        self.t_embedder = TimestepEmbedder(hidden_size)
        self.y_embedder = LabelEmbedder(num_classes, hidden_size) if num_classes else None
        self.prefix = (
            nn.Parameter(torch.empty(1, num_prefix_tokens, hidden_size)) if num_prefix_tokens else None
        )
        pos_embed = rope = None
        if BLOCKS[block].has_rope:
            rope = rotary_table(hidden_size // num_heads, grid_size, num_prefix_tokens).unsqueeze(
                0
            )  # (1, L, 2d)
        else:
            pos_embed = sincos_position_table(hidden_size, grid_size).unsqueeze(0)  # (1, T, D)
        self.register_buffer("pos_embed", pos_embed)
        self.register_buffer("rope", rope, persistent=False)
        self.blocks = nn.ModuleList(
            BLOCKS[block](hidden_size, num_heads, mlp_ratio, attention) for _ in range(depth)
        )
        self.final_layer = FinalLayer(hidden_size, patch_size, out_channels)
        self._initialize_weights(zero=init == "adaln_zero")

    def _initialize_weights(self, zero: bool) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        # The patch projection is a linear map per patch, so it is initialised as one.
        nn.init.xavier_uniform_(self.x_embedder.proj.weight.view(self.x_embedder.proj.weight.shape[0], -1))
        nn.init.zeros_(self.x_embedder.proj.bias)
        if self.y_embedder is not None:
            nn.init.normal_(self.y_embedder.embedding_table.weight, std=0.02)
        if self.prefix is not None:
            nn.init.normal_(self.prefix, std=0.02)
        nn.init.normal_(self.t_embedder.mlp[0].weight, std=0.02)
        nn.init.normal_(self.t_embedder.mlp[2].weight, std=0.02)
        if zero:
            # Every block starts as the identity, and the network starts at F_x = 0.
            for layer in [
                *(block.adaLN_modulation[-1] for block in self.blocks),
                self.final_layer.adaLN_modulation[-1],
            ]:
                nn.init.zeros_(layer.weight)
            nn.init.zeros_(self.final_layer.linear.weight)

    def forward(
        self,
        x: torch.Tensor,
        c_noise: torch.Tensor,
        class_labels: torch.Tensor | None,
        *,
        selection_ratio: float | Sequence[float] | None = None,
        force_keep: torch.Tensor | None = None,
        generator: torch.Generator | None = None,
        return_kept: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Return F_x (N, C, H, W).

        Args:
            x: (N, C, H, W) scaled noisy latents.
            c_noise: noise conditioning, (N,), or (N, L) where each token of the sequence has its own.
            class_labels: (N,) int64 in [0, num_classes], where num_classes is the null class; None exactly
                for an unconditional network.
            selection_ratio: None takes each route's own ratio in `train()` mode and routes nothing in
                `eval()` mode; a number (or one per route, in the order of the layers) routes in either mode.
            force_keep: (N, T) bool, tokens that must not bypass; see `routing.sample_ids_keep`.
            generator: draws class dropout, then the tokens of each route, in this order.
            return_kept: also return the pixels (N, 1, H, W) bool of the tokens that every route kept.

        Raises:
            ValueError: labels that are missing or not wanted; a ratio that does not fit the routes.
        """
        ratios = zip(self.routes, self._ratios(selection_ratio), strict=True)
        windows = {
            route.start_layer_idx: (route.end_layer_idx, ratio) for route, ratio in ratios if ratio > 0
        }

        x = self._embed(x)  # (N, L, D)
        c = self._condition(c_noise, class_labels, generator)  # (N, 1 or L, D)
        kept = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if return_kept else None  # (N, L)
        end_idx, after_route = None, False
        by_token = (c, self.rope)  # what travels with the tokens
        for idx, block in enumerate(self.blocks):
            if idx in windows:
                end_idx, ratio = windows[idx]
                ids_keep = self._ids_keep(x, ratio, force_keep, generator)  # (N, P + K)
                if return_kept:
                    kept &= torch.zeros_like(kept).scatter(1, ids_keep, True)
                original = x
                if self.removal:
                    x = start_route(x, ids_keep)  # (N, P + K, D)
                    by_token = self._start_route_by_token(c, ids_keep)
            x = self._run(block, x, *by_token, fp32=after_route and self.fp32_after_route)
            after_route = idx == end_idx
            if after_route:
                routed = x if self.removal else start_route(x, ids_keep)  # (N, P + K, D)
                x = end_route(routed, ids_keep, original)  # (N, L, D)
                by_token = (c, self.rope)
        P = self.num_prefix_tokens
        x = self.final_layer(
            x[:, P:], c[:, P:] if c.shape[1] > 1 else c
        )  # (N, T, patch_size ** 2 * out_channels)
        F_x = self._unpatchify(x)[:, : self.in_channels]  # (N, C, H, W)
        if not return_kept:
            return F_x
        return F_x, self._unpatchify(kept[:, P:, None].expand(-1, -1, self.patch_size**2))  # (N, 1, H, W)

    def _embed(self, x: torch.Tensor) -> torch.Tensor:
        # fp32: autocast must not make the residual stream bf16. Contiguous: the patches come transposed, and
        # every dense block would be slower for it.
        x = self.x_embedder(x).to(self.x_embedder.proj.weight.dtype).contiguous()
        if self.pos_embed is not None:
            x = x + self.pos_embed  # (N, T, D)
        return (
            x if self.prefix is None else torch.cat([self.prefix.expand(x.shape[0], -1, -1), x], dim=1)
        )  # (N, L, D)

    def _ids_keep(
        self,
        x: torch.Tensor,
        ratio: float,
        force_keep: torch.Tensor | None,
        generator: torch.Generator | None,
    ) -> torch.Tensor:
        needs_importance = self.importance_weight > 0 or force_keep is not None
        return sample_ids_keep(
            x.shape[0],
            self.num_tokens,
            ratio,
            generator=generator,
            device=x.device,
            importance=token_importance(x[:, self.num_prefix_tokens :]) if needs_importance else None,
            importance_weight=self.importance_weight,
            force_keep=force_keep,
            num_prefix_tokens=self.num_prefix_tokens,
        )

    def _start_route_by_token(
        self, c: torch.Tensor, ids_keep: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gather what else is indexed by token, with the indices of each sample."""
        c = gather_tokens(c, ids_keep) if c.shape[1] > 1 else c
        return c, None if self.rope is None else gather_tokens(self.rope, ids_keep)

    def _run(
        self, block: nn.Module, x: torch.Tensor, c: torch.Tensor, rope: torch.Tensor | None, fp32: bool
    ) -> torch.Tensor:
        # PARITY: the public TREAD code runs exactly one block after each route with autocast off, and does
        # not say why.
        with torch.autocast(x.device.type, enabled=False) if fp32 else nullcontext():
            arguments = (x.float(), c.float(), rope) if fp32 else (x, c, rope)
            if self.gradient_checkpointing and torch.is_grad_enabled():
                # Nothing in a block is random: the tokens were drawn before, or recomputing would draw
                # others.
                return checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False)
            return block(*arguments)

    def _ratios(self, selection_ratio: float | Sequence[float] | None) -> tuple[float, ...]:
        """Return the ratio of each route for this forward."""
        if selection_ratio is None:
            return tuple(route.selection_ratio if self.training else 0.0 for route in self.routes)
        per_route = isinstance(selection_ratio, Sequence)
        ratios = tuple(selection_ratio) if per_route else (selection_ratio,) * len(self.routes)
        if len(ratios) != len(self.routes) or (not per_route and selection_ratio and not self.routes):
            raise ValueError(
                f"selection_ratio={selection_ratio} does not fit a network with {len(self.routes)} routes"
            )
        if not all(0 <= ratio < 1 for ratio in ratios):
            raise ValueError(f"selection_ratio={selection_ratio} must be in [0, 1)")
        return ratios

    def _condition(
        self, c_noise: torch.Tensor, class_labels: torch.Tensor | None, generator: torch.Generator | None
    ) -> torch.Tensor:
        if (class_labels is None) != (self.y_embedder is None):
            given = "None" if class_labels is None else f"shape {tuple(class_labels.shape)}"
            raise ValueError(
                f"class_labels={given} must be None exactly when model.num_classes={self.num_classes} is 0"
            )
        c = self.t_embedder(c_noise)  # (N, D) or (N, L, D)
        c = c.unsqueeze(1) if c.dim() == 2 else c  # (N, 1 or L, D)
        if self.y_embedder is None:
            return c
        if self.training and self.class_dropout_prob > 0:
            class_labels = drop_labels(class_labels, self.num_classes, self.class_dropout_prob, generator)
        return c + self.y_embedder(class_labels).unsqueeze(1)  # (N, 1 or L, D)

    def _unpatchify(self, x: torch.Tensor) -> torch.Tensor:
        p, grid = self.patch_size, self.input_size // self.patch_size
        x = x.reshape(x.shape[0], grid, grid, p, p, -1)
        return x.permute(0, 5, 1, 3, 2, 4).reshape(x.shape[0], -1, self.input_size, self.input_size)
