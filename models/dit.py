"""Diffusion transformer [DiT] whose tokens may bypass windows of blocks while it trains [TREAD].

Module names are those of the public DiT, SiT and TREAD checkpoints, which load by name. What differs on purpose: the
network never routes in `eval()` mode unless it is told to, and the label table always has a row for the null class.

Shapes: N samples, C channels, H = W = input_size, T tokens, K tokens kept by a route, D channels of a token.
"""

from collections.abc import Sequence

import torch
import torch.nn as nn
from timm.layers import Mlp, PatchEmbed

from models.layers import Attention, LabelEmbedder, TimestepEmbedder, drop_labels, modulate, sincos_position_table
from routing import Route, end_route, resolve_routes, sample_ids_keep, start_route

INITS = ("adaln_zero", "xavier")


class DiTBlock(nn.Module):
    """Transformer block with adaptive layer norm (adaLN)."""

    def __init__(self, hidden_size: int, num_heads: int, mlp_ratio: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.attn = Attention(hidden_size, num_heads)
        self.norm2 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.mlp = Mlp(hidden_size, int(hidden_size * mlp_ratio), act_layer=lambda: nn.GELU(approximate="tanh"))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """x (N, T, D), c (N, D) -> (N, T, D)."""
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(c).chunk(6, dim=1)
        x = x + gate_msa.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift_msa, scale_msa))
        return x + gate_mlp.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))


class FinalLayer(nn.Module):
    """Project each token to the pixels of its patch."""

    def __init__(self, hidden_size: int, patch_size: int, out_channels: int):
        super().__init__()
        self.norm_final = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(hidden_size, patch_size * patch_size * out_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 2 * hidden_size))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """x (N, T, D), c (N, D) -> (N, T, patch_size ** 2 * out_channels)."""
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=1)
        return self.linear(modulate(self.norm_final(x), shift, scale))


class DiT(nn.Module):
    """Diffusion transformer with optional token routes.

    Args:
        input_size: height and width of the latent.
        num_classes: number of classes; 0 builds an unconditional network.
        class_dropout_prob: probability of training on the null class.
        learn_sigma: give the final layer 2C channels, as public DiT and SiT checkpoints have; only the first C are used.
        init: `adaln_zero` starts every block as the identity and the output at zero [DiT]; `xavier` is the
            initialisation of the public TREAD code, which overwrites those zeros.
        routes: windows of blocks that a part of the tokens bypasses; none gives a plain DiT.
        fp32_after_route: run the block after each route outside autocast, as the public TREAD code does.

    Raises:
        ValueError: sizes that do not divide, an unknown `init`, or an invalid route.
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
        routes: Sequence[Route] = (),
        fp32_after_route: bool = False,
    ):
        super().__init__()
        sizes = {"input_size": input_size, "patch_size": patch_size, "in_channels": in_channels, "hidden_size": hidden_size}
        for name, size in {**sizes, "depth": depth, "num_heads": num_heads, "mlp_ratio": mlp_ratio}.items():
            if not size > 0:
                raise ValueError(f"model.{name}={size} must be greater than 0")
        if num_classes < 0:
            raise ValueError(f"model.num_classes={num_classes} must not be negative")
        if input_size % patch_size:
            raise ValueError(f"model.patch_size={patch_size} must divide model.input_size={input_size}")
        if hidden_size % num_heads:
            raise ValueError(f"model.num_heads={num_heads} must divide model.hidden_size={hidden_size}")
        if not 0 <= class_dropout_prob < 1:
            raise ValueError(f"model.class_dropout_prob={class_dropout_prob} must be in [0, 1)")
        if init not in INITS:
            raise ValueError(f"model.init={init} must be one of {', '.join(INITS)}")
        self.input_size, self.patch_size, self.in_channels = input_size, patch_size, in_channels
        self.num_classes, self.class_dropout_prob = num_classes, class_dropout_prob
        self.fp32_after_route = fp32_after_route
        self.routes = resolve_routes(routes, depth)

        out_channels = 2 * in_channels if learn_sigma else in_channels
        self.x_embedder = PatchEmbed(input_size, patch_size, in_channels, hidden_size)
        self.num_tokens = self.x_embedder.num_patches
        self.t_embedder = TimestepEmbedder(hidden_size)
        self.y_embedder = LabelEmbedder(num_classes, hidden_size) if num_classes else None
        self.register_buffer("pos_embed", sincos_position_table(hidden_size, input_size // patch_size).unsqueeze(0))
        self.blocks = nn.ModuleList(DiTBlock(hidden_size, num_heads, mlp_ratio) for _ in range(depth))
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
        nn.init.normal_(self.t_embedder.mlp[0].weight, std=0.02)
        nn.init.normal_(self.t_embedder.mlp[2].weight, std=0.02)
        if zero:
            # Every block starts as the identity, and the network starts at F_x = 0.
            for layer in [*(block.adaLN_modulation[-1] for block in self.blocks), self.final_layer.adaLN_modulation[-1]]:
                nn.init.zeros_(layer.weight)
            nn.init.zeros_(self.final_layer.linear.weight)

    def forward(
        self,
        x: torch.Tensor,
        c_noise: torch.Tensor,
        class_labels: torch.Tensor | None,
        *,
        selection_ratio: float | Sequence[float] | None = None,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Return F_x (N, C, H, W).

        Args:
            x: (N, C, H, W) scaled noisy latents.
            c_noise: (N,) noise conditioning.
            class_labels: (N,) int64 in [0, num_classes], where num_classes is the null class; None exactly for an
                unconditional network.
            selection_ratio: None takes each route's own ratio in `train()` mode and routes nothing in `eval()` mode; a
                number (or one per route) routes in either mode.
            generator: draws class dropout, then the tokens of each route, in this order.

        Raises:
            ValueError: labels that are missing or not wanted; a ratio that does not fit the routes.
        """
        ratios = self._ratios(selection_ratio)
        starts = {route.start_layer_idx: ratio for route, ratio in zip(self.routes, ratios, strict=True) if ratio > 0}
        ends = {route.end_layer_idx for route, ratio in zip(self.routes, ratios, strict=True) if ratio > 0}

        x = self.x_embedder(x) + self.pos_embed  # (N, T, D)
        c = self._condition(c_noise, class_labels, generator)  # (N, D)
        after_route = False
        for idx, block in enumerate(self.blocks):
            if idx in starts:
                original = x
                ids_keep = sample_ids_keep(x.shape[0], x.shape[1], starts[idx], generator=generator, device=x.device)  # (N, K)
                x = start_route(x, ids_keep)  # (N, K, D)
            x = self._run_fp32(block, x, c) if after_route and self.fp32_after_route else block(x, c)
            after_route = idx in ends
            if after_route:
                x = end_route(x, ids_keep, original)  # (N, T, D)
        x = self.final_layer(x, c)  # (N, T, patch_size ** 2 * out_channels)
        return self._unpatchify(x)[:, : self.in_channels]  # (N, C, H, W)

    def _ratios(self, selection_ratio: float | Sequence[float] | None) -> tuple[float, ...]:
        """Return the ratio of each route for this forward."""
        if selection_ratio is None:
            return tuple(route.selection_ratio if self.training else 0.0 for route in self.routes)
        per_route = isinstance(selection_ratio, Sequence)
        ratios = tuple(selection_ratio) if per_route else (selection_ratio,) * len(self.routes)
        if len(ratios) != len(self.routes) or (not per_route and selection_ratio and not self.routes):
            raise ValueError(f"selection_ratio={selection_ratio} does not fit a network with {len(self.routes)} routes")
        if not all(0 <= ratio < 1 for ratio in ratios):
            raise ValueError(f"selection_ratio={selection_ratio} must be in [0, 1)")
        return ratios

    def _condition(
        self, c_noise: torch.Tensor, class_labels: torch.Tensor | None, generator: torch.Generator | None
    ) -> torch.Tensor:
        if (class_labels is None) != (self.y_embedder is None):
            given = "None" if class_labels is None else f"shape {tuple(class_labels.shape)}"
            raise ValueError(f"class_labels={given} must be None exactly when model.num_classes={self.num_classes} is 0")
        c = self.t_embedder(c_noise)  # (N, D)
        if self.y_embedder is None:
            return c
        if self.training and self.class_dropout_prob > 0:
            class_labels = drop_labels(class_labels, self.num_classes, self.class_dropout_prob, generator)
        return c + self.y_embedder(class_labels)  # (N, D)

    def _run_fp32(self, block: nn.Module, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        # PARITY: the public TREAD code runs exactly one block after each route with autocast off; the paper does not say so.
        with torch.autocast(x.device.type, enabled=False):
            return block(x.float(), c.float())

    def _unpatchify(self, x: torch.Tensor) -> torch.Tensor:
        p, grid = self.patch_size, self.input_size // self.patch_size
        x = x.view(x.shape[0], grid, grid, p, p, -1)
        return x.permute(0, 5, 1, 3, 2, 4).reshape(x.shape[0], -1, self.input_size, self.input_size)
