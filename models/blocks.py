"""Blocks of the diffusion transformer and its final layer.

Kinds of blocks differ in the mixer of the tokens, the norm and the MLP; modulation and residuals are always
those of [DiT]. The mixer is called `attn`, as in public checkpoints.

Shapes: N samples, L tokens in the sequence (all of them, or those that a route kept), D channels of a token,
d channels of a head. The conditioning c is (N, 1, D), or (N, L, D) where each token has its own.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn as nn
from timm.layers import Mlp, SwiGLU, SwiGLUPacked

from models.layers import GELU, Attention, linear_flops, modulate, rotary_table
from models.mixers import ChannelMix, SpatialMix, StateSpace, column_ranks

Mixer = Attention | StateSpace | SpatialMix


class DiTBlock(nn.Module):
    """Transformer block with adaptive layer norm (adaLN). [DiT]

    Args:
        attention: its backend, see `models.layers.Attention`.
        num_tokens: T of the image.
    """

    has_position_table = True  # added to the tokens
    # positions(head_size, grid_size, num_prefix_tokens) -> (L, ...) for `attn`; they travel with the tokens.
    positions: Callable[[int, int, int], torch.Tensor] | None = None
    norm = final_norm = staticmethod(partial(nn.LayerNorm, elementwise_affine=False, eps=1e-6))

    def __init__(
        self, hidden_size: int, num_heads: int, mlp_ratio: float, attention: str, num_tokens: int, /
    ):
        super().__init__()
        self.norm1, self.norm2 = self.norm(hidden_size), self.norm(hidden_size)
        self.attn = self._mixer(hidden_size, num_heads, attention, num_tokens)
        self.mlp = self._mlp(hidden_size, mlp_ratio)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))

    def forward(
        self, x: torch.Tensor, c: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x (N, L, D), c (N, 1 or L, D), positions (1 or N, L, ...) -> (N, L, D)."""
        modulation = self.adaLN_modulation(c).chunk(6, dim=-1)
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = modulation
        x = x + gate_msa * self.attn(modulate(self.norm1(x), shift_msa, scale_msa), positions)
        return x + gate_mlp * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))

    def flops(self, length: int) -> int:
        """FLOPs of the matrix products of one sample."""
        mlp = length * linear_flops(self.mlp)
        return self.attn.flops(length) + mlp + linear_flops(self.adaLN_modulation)

    def _mixer(self, hidden_size: int, num_heads: int, attention: str, num_tokens: int) -> Mixer:
        return Attention(hidden_size, num_heads, attention)

    def _mlp(self, hidden_size: int, mlp_ratio: float) -> nn.Module:
        return Mlp(hidden_size, int(hidden_size * mlp_ratio), act_layer=GELU)


class SprintBlock(DiTBlock):
    """The same block with QK-norm, and with rotary positions in place of the position table. [SPRINT]"""

    has_position_table = False
    positions = staticmethod(rotary_table)

    def _mixer(self, hidden_size: int, num_heads: int, attention: str, num_tokens: int) -> Mixer:
        return Attention(hidden_size, num_heads, attention, qk_norm=True)


class ModernBlock(SprintBlock):
    """The block of SPRINT with RMSNorm and SwiGLU; the final layer keeps its LayerNorm."""

    norm = staticmethod(partial(nn.RMSNorm, elementwise_affine=False, eps=1e-6))

    def _mlp(self, hidden_size: int, mlp_ratio: float) -> nn.Module:
        # Two thirds of the width, in eights: the gate is a third matrix, so the parameters stay the same.
        return SwiGLU(hidden_size, 8 * math.ceil(hidden_size * mlp_ratio * 2 / 3 / 8))


class LightningBlock(DiTBlock):
    """The block with RMSNorm with learned scales, a packed SwiGLU, and rotary positions besides the table.
    [LightningDiT]
    """

    positions = staticmethod(rotary_table)
    norm = final_norm = staticmethod(partial(nn.RMSNorm, eps=1e-6))

    def _mlp(self, hidden_size: int, mlp_ratio: float) -> nn.Module:
        return SwiGLUPacked(hidden_size, 2 * int(2 / 3 * int(hidden_size * mlp_ratio)))  # gate and value


class MambaBlock(DiTBlock):
    """The same block with a scan of a state space in place of attention."""

    positions = staticmethod(column_ranks)

    def _mixer(self, hidden_size: int, num_heads: int, attention: str, num_tokens: int) -> Mixer:
        return StateSpace(hidden_size, num_heads)


class RWKVBlock(DiTBlock):
    """The same block with the mixers of RWKV in place of attention and MLP."""

    def _mixer(self, hidden_size: int, num_heads: int, attention: str, num_tokens: int) -> Mixer:
        return SpatialMix(hidden_size, num_heads, num_tokens)

    def _mlp(self, hidden_size: int, mlp_ratio: float) -> nn.Module:
        return ChannelMix(hidden_size, int(hidden_size * mlp_ratio))


class FinalLayer(nn.Module):
    """Project each token to the pixels of its patch."""

    def __init__(self, norm: nn.Module, hidden_size: int, patch_size: int, out_channels: int):
        super().__init__()
        self.norm_final = norm
        self.linear = nn.Linear(hidden_size, patch_size * patch_size * out_channels)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 2 * hidden_size))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """x (N, L, D), c (N, 1 or L, D) -> (N, L, patch_size ** 2 * out_channels)."""
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=-1)
        return self.linear(modulate(self.norm_final(x), shift, scale))
