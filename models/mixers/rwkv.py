"""The mixers of RWKV for images: a bidirectional weighted mean, and a gated MLP. [VRWKV]

    y_t = (sum_(i != t) e^(k_i - (|t - i| - 1) w / T) v_i + e^(u + k_t) v_t) / (the same without v)

w > 0 and u are learned per channel. T counts all tokens, also in a routed window: the decay from one token to
the next is the same as in the dense network.

DEVIATION: a token is mixed with its neighbours in the sequence, not in the grid, so that windows can be
routed. The mean is normalised in groups of channels.

Shapes: N samples, L tokens in the sequence, D channels.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class SpatialMix(nn.Module):
    """Mix tokens by distance and content.

    Args:
        num_heads: number of groups of channels, each normalised by itself.
        num_tokens: T.
    """

    def __init__(self, hidden_size: int, num_heads: int, num_tokens: int):
        super().__init__()
        self.num_tokens = num_tokens
        self.mix = nn.Parameter(torch.full((3, hidden_size), 0.5))
        self.key, self.value, self.receptance = (nn.Linear(hidden_size, hidden_size) for _ in range(3))
        # Decays from slow to fast, over the channels.
        self.log_decay = nn.Parameter(torch.linspace(-2, 4, hidden_size))
        self.bonus = nn.Parameter(torch.zeros(hidden_size))
        self.norm = nn.GroupNorm(num_heads, hidden_size)
        self.proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: torch.Tensor, positions: None = None) -> torch.Tensor:
        """Mix the tokens x (N, L, D)."""
        x_k, x_v, x_r = (x.lerp(_shift_tokens(x), mix) for mix in self.mix.to(x.dtype))
        k, v, r = self.key(x_k), self.value(x_v), self.receptance(x_r)
        dtype = torch.promote_types(k.dtype, torch.float32)
        y = self._weighted_mean(k.to(dtype), v.to(dtype))  # (N, L, D)
        y = self.norm(y.to(self.norm.weight.dtype).flatten(0, 1)).view_as(y)
        return self.proj(r.sigmoid() * y.to(r.dtype))

    def flops(self, length: int) -> int:
        """Return the FLOPs of the matrix products for one sample."""
        D = self.proj.in_features
        return 4 * 2 * length * D**2 + 2 * 2 * length**2 * D

    def _weighted_mean(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        N, L, _ = k.shape
        weights = (k - k.amax(dim=1, keepdim=True)).exp()  # the maximum cancels in the quotient
        both = torch.cat([weights * v, weights]).permute(2, 1, 0)  # (D, L, 2N)
        indices = torch.arange(L, device=k.device)
        distance = (indices[:, None] - indices).abs()  # (L, L)
        # Exponents of all pairs of tokens, (D, L, L).
        log_decay, bonus = self.log_decay.to(k.dtype), self.bonus.to(k.dtype)
        decay = -log_decay.exp()[:, None, None] * (distance - 1) / self.num_tokens
        kernel = torch.where(distance == 0, bonus[:, None, None], decay).exp()
        with torch.autocast(k.device.type, enabled=False):
            total, norm = (kernel @ both).permute(2, 1, 0).split(N)  # (N, L, D) each
        return total / norm.clamp(min=torch.finfo(norm.dtype).tiny)


class ChannelMix(nn.Module):
    """Gated MLP with squared ReLU, over a token and its neighbours."""

    def __init__(self, hidden_size: int, inner_size: int):
        super().__init__()
        self.mix = nn.Parameter(torch.full((2, hidden_size), 0.5))
        self.key, self.receptance = nn.Linear(hidden_size, inner_size), nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(inner_size, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the MLP to x (N, L, D)."""
        x_k, x_r = (x.lerp(_shift_tokens(x), mix) for mix in self.mix.to(x.dtype))
        return self.receptance(x_r).sigmoid() * self.value(F.relu(self.key(x_k)).square())


def _shift_tokens(x: torch.Tensor) -> torch.Tensor:
    # Half of the channels from the previous token, the other half from the next one; 0 beyond the ends.
    before, after = x.chunk(2, dim=-1)
    return torch.cat([F.pad(before, (0, 0, 1, -1)), F.pad(after, (0, 0, -1, 1))], dim=-1)
