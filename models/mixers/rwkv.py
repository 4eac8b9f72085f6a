"""The mixers of RWKV for images: a weighted mean that looks both ways, and a gated MLP. [VRWKV]

    y_t = (sum_(i != t) e^(k_i - (|t - i| - 1) w / T) v_i + e^(u + k_t) v_t) / (the same without v)

w > 0 and u are learned for each channel. T is the number of all tokens, also in a routed window, whose decay
from token to token is that of the dense network.

DEVIATION: a token is mixed with its neighbours in the sequence, not with those in the grid, so that a window
of some tokens can be routed; the mean is normalised in groups of channels.

Shapes: N samples, L tokens in the sequence, D channels.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class SpatialMix(nn.Module):
    """Mix tokens by distance and content.

    Args:
        num_heads: groups of channels that are normalised together.
        num_tokens: T.
    """

    def __init__(self, hidden_size: int, num_heads: int, num_tokens: int):
        super().__init__()
        self.num_tokens = num_tokens
        self.mix = nn.Parameter(torch.full((3, hidden_size), 0.5))
        self.key, self.value, self.receptance = (nn.Linear(hidden_size, hidden_size) for _ in range(3))
        # From slow to fast, over the channels.
        self.log_decay = nn.Parameter(torch.linspace(-2, 4, hidden_size))
        self.bonus = nn.Parameter(torch.zeros(hidden_size))
        self.norm = nn.GroupNorm(num_heads, hidden_size)
        self.proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: torch.Tensor, positions: None = None) -> torch.Tensor:
        """(N, L, D) -> (N, L, D)."""
        of_k, of_v, of_r = (x.lerp(_of_neighbours(x), mix) for mix in self.mix.to(x.dtype))
        k, v, r = self.key(of_k), self.value(of_v), self.receptance(of_r)
        wide = torch.promote_types(k.dtype, torch.float32)
        y = self._weighted_mean(k.to(wide), v.to(wide))  # (N, L, D)
        y = self.norm(y.to(self.norm.weight.dtype).flatten(0, 1)).view_as(y)
        return self.proj(r.sigmoid() * y.to(r.dtype))

    def flops(self, length: int) -> int:
        """FLOPs of the matrix products of one sample."""
        D = self.proj.in_features
        return 4 * 2 * length * D**2 + 2 * 2 * length**2 * D

    def _weighted_mean(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        N, L, _ = k.shape
        weights = (k - k.amax(dim=1, keepdim=True)).exp()  # a factor cancels
        both = torch.cat([weights * v, weights]).permute(2, 1, 0)  # (D, L, 2N)
        places = torch.arange(L, device=k.device)
        distance = (places[:, None] - places).abs()  # (L, L)
        # The exponents of all pairs, (D, L, L).
        log_decay, bonus = self.log_decay.to(k.dtype), self.bonus.to(k.dtype)
        decay = -log_decay.exp()[:, None, None] * (distance - 1) / self.num_tokens
        kernel = torch.where(distance == 0, bonus[:, None, None], decay).exp()
        with torch.autocast(k.device.type, enabled=False):
            total, norm = (kernel @ both).permute(2, 1, 0).split(N)  # (N, L, D) each
        return total / norm.clamp(min=torch.finfo(norm.dtype).tiny)


class ChannelMix(nn.Module):
    """A gated MLP with squared ReLU, over a token and its neighbours."""

    def __init__(self, hidden_size: int, inner_size: int):
        super().__init__()
        self.mix = nn.Parameter(torch.full((2, hidden_size), 0.5))
        self.key, self.receptance = nn.Linear(hidden_size, inner_size), nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(inner_size, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, L, D) -> (N, L, D)."""
        of_k, of_r = (x.lerp(_of_neighbours(x), mix) for mix in self.mix.to(x.dtype))
        return self.receptance(of_r).sigmoid() * self.value(F.relu(self.key(of_k)).square())


def _of_neighbours(x: torch.Tensor) -> torch.Tensor:
    # Half of the channels of the token before, the other half of the token after, 0 beyond the ends.
    before, after = x.chunk(2, dim=-1)
    return torch.cat([F.pad(before, (0, 0, 1, -1)), F.pad(after, (0, 0, -1, 1))], dim=-1)
