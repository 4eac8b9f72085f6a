"""Blocks of the diffusion transformer and its final layer.

Shapes: N samples, L tokens in the sequence (all of them, or those that a route kept), D channels of a token,
d channels of a head. The conditioning c is (N, 1, D), or (N, L, D) where each token has its own.
"""

import math

import torch
import torch.nn as nn
from timm.layers import Mlp, SwiGLU

from models.layers import Attention, gelu, modulate


class GELU(nn.Module):
    """`models.layers.gelu` as a module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gelu(x)


class DiTBlock(nn.Module):
    """Transformer block with adaptive layer norm (adaLN). [DiT]

    Args:
        attention: its backend, see `models.layers.Attention`.
    """

    has_rope = False

    def __init__(self, hidden_size: int, num_heads: int, mlp_ratio: float, attention: str):
        super().__init__()
        self.norm1, self.norm2 = self._norm(hidden_size), self._norm(hidden_size)
        self.attn = self._attention(hidden_size, num_heads, attention)
        self.mlp = self._mlp(hidden_size, mlp_ratio)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))

    def forward(self, x: torch.Tensor, c: torch.Tensor, rope: torch.Tensor | None = None) -> torch.Tensor:
        """x (N, L, D), c (N, 1 or L, D), rope (1 or N, L, 2d) -> (N, L, D)."""
        modulation = self.adaLN_modulation(c).chunk(6, dim=-1)
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = modulation
        x = x + gate_msa * self.attn(modulate(self.norm1(x), shift_msa, scale_msa), rope)
        return x + gate_mlp * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))

    def _norm(self, hidden_size: int) -> nn.Module:
        return nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)

    def _attention(self, hidden_size: int, num_heads: int, attention: str) -> nn.Module:
        return Attention(hidden_size, num_heads, attention)

    def _mlp(self, hidden_size: int, mlp_ratio: float) -> nn.Module:
        return Mlp(hidden_size, int(hidden_size * mlp_ratio), act_layer=GELU)


class ModernBlock(DiTBlock):
    """The same block with RMSNorm, QK-norm, rotary positions in two dimensions, and SwiGLU."""

    has_rope = True

    def _norm(self, hidden_size: int) -> nn.Module:
        return nn.RMSNorm(hidden_size, elementwise_affine=False, eps=1e-6)

    def _attention(self, hidden_size: int, num_heads: int, attention: str) -> nn.Module:
        return Attention(hidden_size, num_heads, attention, qk_norm=True)

    def _mlp(self, hidden_size: int, mlp_ratio: float) -> nn.Module:
        # Two thirds of the width, in eights: with the gate, a third matrix, the parameters stay the same.
        return SwiGLU(hidden_size, 8 * math.ceil(hidden_size * mlp_ratio * 2 / 3 / 8))


class FinalLayer(nn.Module):
    """Project each token to the pixels of its patch."""

    def __init__(self, hidden_size: int, patch_size: int, out_channels: int):
        super().__init__()
        self.norm_final = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(hidden_size, patch_size * patch_size * out_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 2 * hidden_size))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """x (N, L, D), c (N, 1 or L, D) -> (N, L, patch_size ** 2 * out_channels)."""
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=-1)
        return self.linear(modulate(self.norm_final(x), shift, scale))


BLOCKS = {"dit": DiTBlock, "modern": ModernBlock}
