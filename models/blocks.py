"""Blocks of the diffusion transformer and its final layer.

Blocks differ in token mixer, norm and MLP. Modulation and residuals are as in [DiT] in all of them. The mixer
is called `attn`, as in public checkpoints.

Shapes: N samples, L tokens in the sequence (all tokens, or a route's kept tokens), D channels of a token,
d channels of a head. The conditioning c is (N, 1, D), or (N, L, D) if it differs from token to token.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn as nn
from timm.layers import Mlp, SwiGLU, SwiGLUPacked
from torch.nn.functional import pad

from models.layers import GELU, Attention, linear_flops, modulate, rotary_table
from models.mixers import ChannelMix, SpatialMix, StateSpace, column_ranks
from models.text import TextAttention

Mixer = Attention | StateSpace | SpatialMix


class DiTBlock(nn.Module):
    """Transformer block with adaptive layer norm (adaLN). [DiT]

    Args:
        attention: attention backend, see `models.layers.Attention`.
        num_tokens: number of tokens of the image.
    """

    has_position_table = True  # the network adds a table to the tokens
    allows_prefix = True  # the sequence may start with tokens that are not of the image
    # positions(head_size, grid_size, num_prefix_tokens) -> (L, ...) for `attn`, gathered like the tokens.
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
        self.cross: TextAttention | None = None  # attention to a caption, which the network adds

    def forward(
        self,
        x: torch.Tensor,
        c: torch.Tensor,
        positions: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        text: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return x (N, L, D) after the block, for c (N, 1 or L, D) and positions (1 or N, L, ...).

        Args:
            bias: (N, 1, 1, S), removes the padding of a caption from attention. None: there is no caption.
            text: (N, S, D) tokens of the caption, for `cross`; None: they are the first S tokens of x.
        """
        modulation = self.adaLN_modulation(c).chunk(6, dim=-1)
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = modulation
        biases = () if bias is None or text is not None else (pad(bias, (0, x.shape[1] - bias.shape[3])),)
        x = x + gate_msa * self.attn(modulate(self.norm1(x), shift_msa, scale_msa), positions, *biases)
        if self.cross is not None and text is not None and bias is not None:
            x = x + self.cross(x, text, bias)
        return x + gate_mlp * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))

    def flops(self, length: int) -> int:
        """Return the FLOPs of the matrix products for one sample."""
        mlp = length * linear_flops(self.mlp)
        cross = 0 if self.cross is None else self.cross.flops(length)
        return self.attn.flops(length) + mlp + linear_flops(self.adaLN_modulation) + cross

    def _mixer(self, hidden_size: int, num_heads: int, attention: str, num_tokens: int) -> Mixer:
        return Attention(hidden_size, num_heads, attention)

    def _mlp(self, hidden_size: int, mlp_ratio: float) -> nn.Module:
        return Mlp(hidden_size, int(hidden_size * mlp_ratio), act_layer=GELU)


class SelfLogitBlock(DiTBlock):
    """DiT block that corrects the self logit in a window, so that it weighs as much as among all tokens."""

    allows_prefix = False

    def _mixer(self, hidden_size: int, num_heads: int, attention: str, num_tokens: int) -> Mixer:
        return Attention(hidden_size, num_heads, attention, full_length=num_tokens)


class SprintBlock(DiTBlock):
    """DiT block with QK-norm, and rotary positions instead of the position table. [SPRINT]"""

    has_position_table = False
    positions = staticmethod(rotary_table)

    def _mixer(self, hidden_size: int, num_heads: int, attention: str, num_tokens: int) -> Mixer:
        return Attention(hidden_size, num_heads, attention, qk_norm=True)


class ModernBlock(SprintBlock):
    """SPRINT block with RMSNorm and SwiGLU; the final layer keeps its LayerNorm."""

    norm = staticmethod(partial(nn.RMSNorm, elementwise_affine=False, eps=1e-6))

    def _mlp(self, hidden_size: int, mlp_ratio: float) -> nn.Module:
        # Two thirds of the width, in multiples of 8: with three matrices the parameters stay about equal.
        return SwiGLU(hidden_size, 8 * math.ceil(hidden_size * mlp_ratio * 2 / 3 / 8))


class LightningBlock(DiTBlock):
    """DiT block with learned RMSNorm, packed SwiGLU and rotary positions besides the table. [LightningDiT]"""

    positions = staticmethod(rotary_table)
    norm = final_norm = staticmethod(partial(nn.RMSNorm, eps=1e-6))

    def _mlp(self, hidden_size: int, mlp_ratio: float) -> nn.Module:
        return SwiGLUPacked(hidden_size, 2 * int(2 / 3 * int(hidden_size * mlp_ratio)))  # gate and value


class MambaBlock(DiTBlock):
    """DiT block with a state-space scan instead of attention."""

    positions = staticmethod(column_ranks)

    def _mixer(self, hidden_size: int, num_heads: int, attention: str, num_tokens: int) -> Mixer:
        return StateSpace(hidden_size, num_heads)


class RWKVBlock(DiTBlock):
    """DiT block with the mixers of RWKV instead of attention and MLP."""

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
        """Return (N, L, patch_size ** 2 * out_channels) for x (N, L, D) and c (N, 1 or L, D)."""
        shift, scale = self.adaLN_modulation(c).chunk(2, dim=-1)
        return self.linear(modulate(self.norm_final(x), shift, scale))
