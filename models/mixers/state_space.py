"""Selective state space model, scanned along rows and columns in both directions. [Mamba2]

    h_t = exp(dt_t a) h_(t-1) + dt_t x_t b_t^T        y_t = h_t c_t + d x_t

a < 0 and d are learned per head; x, b, c and dt are computed from the token. Unrolled, y is a product with a
lower triangular matrix of decays. This is exact, costs as much as attention, and needs no custom kernel. The
heads take the four directions in turn.

DEVIATION: the convolution is over x alone; heads of different directions share b and c.

Shapes: N samples, L tokens in the sequence, D channels of a token, H heads of d channels, S state values per
channel.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

EXPANSION, STATE_SIZE, CONV_SIZE = 2, 16, 4
MIN_DT, MAX_DT = 1e-3, 1e-1  # at initialisation
MAX_RATE = 16  # of -a, at initialisation


class StateSpace(nn.Module):
    """Mix tokens by a scan; each head has its own decay rate, and one of four directions."""

    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        E = EXPANSION * hidden_size
        self.num_heads, self.sizes = num_heads, (E, E, STATE_SIZE, STATE_SIZE, num_heads)
        self.in_proj = nn.Linear(hidden_size, sum(self.sizes))
        self.conv = nn.Parameter(torch.empty(E, CONV_SIZE).uniform_(-1, 1) / math.sqrt(CONV_SIZE))
        dt = torch.empty(num_heads).uniform_(math.log(MIN_DT), math.log(MAX_DT)).exp()
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # softplus gives dt
        self.log_rate = nn.Parameter(torch.empty(num_heads).uniform_(1, MAX_RATE).log())
        self.skip = nn.Parameter(torch.ones(num_heads))
        self.norm = nn.RMSNorm(E, eps=1e-6)
        self.proj = nn.Linear(E, hidden_size)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Scan x (N, L, D); positions (1 or N, L): each token's rank in column-major order."""
        z, x, b, c, dt = self.in_proj(x).split(self.sizes, dim=-1)
        order = self._orders(positions, x.shape[0])  # (N, H, L)
        x = _reorder(x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2), order)  # (N, H, L, d)
        b, c = (_reorder(v.unsqueeze(1).expand(-1, self.num_heads, -1, -1), order) for v in (b, c))
        dt = F.softplus(dt.float() + self.dt_bias).transpose(1, 2).gather(2, order)  # (N, H, L)
        y = self._scan(self._convolve(x), dt, b, c)  # (N, H, L, d)
        y = torch.empty_like(y).scatter(2, order.unsqueeze(-1).expand_as(y), y)
        y = y.transpose(1, 2).flatten(2)  # (N, L, E)
        return self.proj(self.norm(y * F.silu(z)))

    def flops(self, length: int) -> int:
        """Return the FLOPs of the matrix products for one sample."""
        E = self.proj.in_features
        linear = 2 * length * (self.in_proj.weight.numel() + self.proj.weight.numel())
        return linear + 2 * length**2 * (self.num_heads * STATE_SIZE + E)

    def _orders(self, positions: torch.Tensor, num_samples: int) -> torch.Tensor:
        """Return the token indices (N, H, L) in the order in which each head scans them."""
        columns = positions.argsort(dim=-1)  # (1 or N, L)
        rows = torch.arange(columns.shape[-1], device=columns.device).expand_as(columns)
        directions = torch.stack([rows, rows.flip(-1), columns, columns.flip(-1)], dim=1)
        heads = torch.arange(self.num_heads, device=columns.device) % 4
        return directions[:, heads].expand(num_samples, -1, -1)

    def _convolve(self, x: torch.Tensor) -> torch.Tensor:
        """Convolve each channel over a token and the tokens before it, and apply SiLU."""
        kernel = self.conv.unflatten(0, (self.num_heads, -1)).to(x.dtype)  # (H, d, CONV_SIZE)
        L, padded = x.shape[2], F.pad(x, (0, 0, CONV_SIZE - 1, 0))
        parts = [padded[:, :, j : j + L] * kernel[:, None, :, j] for j in range(CONV_SIZE)]
        return F.silu(sum(parts, start=x.new_zeros(())))

    def _scan(self, x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """Return y of the recurrence above, for x (N, H, L, d), dt (N, H, L), b and c (N, H, L, S)."""
        L = x.shape[2]
        total = (-self.log_rate.exp()[:, None] * dt).cumsum(dim=-1)  # (N, H, L), fp32
        decay = total.unsqueeze(-1) - total.unsqueeze(-2)  # (N, H, L, L): from s to t
        causal = torch.ones(L, L, dtype=torch.bool, device=x.device).tril()
        decay = decay.masked_fill(~causal, -torch.inf).exp()
        weights = (c @ b.transpose(-2, -1)) * decay  # (N, H, L, L)
        return weights.to(x.dtype) @ (dt.unsqueeze(-1) * x).to(x.dtype) + self.skip[:, None, None] * x


def column_ranks(head_size: int, grid_size: int, num_prefix_tokens: int) -> torch.Tensor:
    """Return each token's rank (L,) in column-major order; the prefix comes first."""
    ranks = torch.arange(grid_size**2).view(grid_size, grid_size).T.flatten()
    return torch.cat([torch.arange(num_prefix_tokens), num_prefix_tokens + ranks])


def _reorder(x: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return x.gather(2, order.unsqueeze(-1).expand(*order.shape, x.shape[-1]))
