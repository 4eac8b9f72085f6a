"""The plain training step that speed-ups are measured against: a good first implementation.

It has a DiT [DiT] of timm's blocks (scaled dot product attention), one route [TREAD], the preconditioning and
loss of [EDM], AdamW and averaged weights, eager and in fp32. Nothing is slowed down on purpose. It shares no
code with the network of this repository. It uses the same parameter names and order of random draws, so that
a test can compare all numbers.

Shapes: N samples, C channels, H = W = input_size, T tokens, K kept tokens, D channels of a token.
"""

import math
from copy import deepcopy

import torch
import torch.nn as nn
from timm.layers import Mlp, PatchEmbed
from timm.models.vision_transformer import Attention


class PlainBlock(nn.Module):
    """Transformer block with adaptive layer norm."""

    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.attn = Attention(hidden_size, num_heads=num_heads, qkv_bias=True)
        self.norm2 = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.mlp = Mlp(hidden_size, 4 * hidden_size, act_layer=lambda: nn.GELU(approximate="tanh"))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """x (N, L, D), c (N, D) -> (N, L, D)."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c).unsqueeze(1).chunk(6, dim=-1)
        x = x + gate1 * self.attn(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class PlainDiT(nn.Module):
    """DiT whose bypassing tokens skip the blocks from `start` to `end`, both inclusive."""

    def __init__(
        self,
        input_size: int,
        patch_size: int,
        in_channels: int,
        hidden_size: int,
        depth: int,
        num_heads: int,
        num_classes: int,
        start: int,
        end: int,
    ):
        super().__init__()
        self.patch_size, self.start, self.end = patch_size, start, end
        self.x_embedder = PatchEmbed(input_size, patch_size, in_channels, hidden_size)
        self.register_buffer("pos_embed", torch.zeros(1, self.x_embedder.num_patches, hidden_size))
        self.t_embedder, self.y_embedder, self.final_layer = nn.Module(), nn.Module(), nn.Module()
        self.t_embedder.mlp = nn.Sequential(
            nn.Linear(256, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size)
        )
        self.y_embedder.embedding_table = nn.Embedding(num_classes + 1, hidden_size)
        self.blocks = nn.ModuleList(PlainBlock(hidden_size, num_heads) for _ in range(depth))
        self.final_layer.norm_final = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.final_layer.linear = nn.Linear(hidden_size, patch_size**2 * in_channels)
        self.final_layer.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 2 * hidden_size))
        frequencies = torch.exp(-math.log(10000) * torch.arange(128) / 128)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(
        self,
        x: torch.Tensor,
        c_noise: torch.Tensor,
        class_labels: torch.Tensor,
        ids_keep: torch.Tensor | None,
    ) -> torch.Tensor:
        """x (N, C, H, W), c_noise (N,), class_labels (N,), ids_keep (N, K) or None -> F_x (N, C, H, W)."""
        N, C, H, W = x.shape
        x = self.x_embedder(x).contiguous() + self.pos_embed  # (N, T, D)
        angles = c_noise.unsqueeze(1) * self.frequencies
        c = self.t_embedder.mlp(torch.cat([angles.cos(), angles.sin()], dim=1))  # (N, D)
        c = c + self.y_embedder.embedding_table(class_labels)
        for idx, block in enumerate(self.blocks):
            if ids_keep is not None and idx == self.start:
                original, index = x, ids_keep.unsqueeze(-1).expand(-1, -1, x.shape[-1])
                x = x.gather(1, index)  # (N, K, D)
            x = block(x, c)
            if ids_keep is not None and idx == self.end:
                x = original.scatter(1, index, x)  # (N, T, D)
        shift, scale = self.final_layer.adaLN_modulation(c).unsqueeze(1).chunk(2, dim=-1)
        x = self.final_layer.linear(self.final_layer.norm_final(x) * (1 + scale) + shift)  # (N, T, p * p * C)
        p = self.patch_size
        return x.view(N, H // p, W // p, p, p, C).permute(0, 5, 1, 3, 2, 4).reshape(N, C, H, W)


class PlainStep:
    """Optimizer steps on one batch.

    Args:
        num_kept: K; T turns routing off.
    """

    def __init__(
        self, net: PlainDiT, x: torch.Tensor, class_labels: torch.Tensor, num_classes: int, num_kept: int
    ):
        self.net, self.x, self.class_labels = net, x, class_labels
        self.num_classes, self.num_kept = num_classes, num_kept
        self.average = deepcopy(net).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, weight_decay=0.0, foreach=True)

    def __call__(self) -> None:
        """Run loss, gradients, AdamW and the average of the weights."""
        self.loss(None).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        # average += (1 - 0.9999) (weight - average)
        torch._foreach_lerp_(list(self.average.parameters()), list(self.net.parameters()), 1e-4)

    def loss(self, generator: torch.Generator | None) -> torch.Tensor:
        """Return the mean loss of the batch, [EDM] Table 1 with sigma_data 0.5."""
        x, options = self.x, {"generator": generator, "device": self.x.device}
        N, T = len(x), self.net.pos_embed.shape[1]
        sigma = (1.2 * torch.randn(N, 1, 1, 1, **options) - 1.2).exp()
        noisy = x + sigma * torch.randn(x.shape, **options)
        dropped = torch.rand(N, **options) < 0.1
        labels = torch.where(dropped, self.num_classes, self.class_labels)
        routed = self.num_kept < T
        ids_keep = torch.rand(N, T, **options).argsort(dim=1)[:, : self.num_kept] if routed else None
        variance = sigma**2 + 0.5**2
        F_x = self.net(noisy / variance.sqrt(), sigma.log().flatten() / 4, labels, ids_keep)
        D_x = 0.5**2 / variance * noisy + sigma * 0.5 / variance.sqrt() * F_x
        return (variance / (sigma * 0.5) ** 2 * (D_x - x) ** 2).mean()
