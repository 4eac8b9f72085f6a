"""Parts of the diffusion transformer: embedders, attention, modulation, position table. [DiT]

Shapes: N samples, T tokens, D channels, H heads.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Shift and scale the channels of each sample: x (N, T, D); shift, scale (N, D)."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q k^T / sqrt(d)) v for q, k, v (N, H, T, d), by the backend that is fast where the tensors are."""
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        # The backward pass of the fused CPU kernel is slow in bf16; plain matrix products are several times faster.
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)  # (N, H, T, T)
        return scores.softmax(dim=-1, dtype=torch.float32).to(v.dtype) @ v
    return F.scaled_dot_product_attention(q, k, v)


class Attention(nn.Module):
    """Multi-head self-attention."""

    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        N, T, D = x.shape
        qkv = self.qkv(x).reshape(N, T, 3, self.num_heads, D // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (N, H, T, d) each
        x = attention(q, k, v).transpose(1, 2).reshape(N, T, D)
        return self.proj(x)


class TimestepEmbedder(nn.Module):
    """Embed the noise level c_noise: sines and cosines of 256 frequencies, then a small network."""

    def __init__(self, hidden_size: int, frequency_embedding_size: int = 256):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(frequency_embedding_size, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size)
        )
        half = frequency_embedding_size // 2
        # omega_i = 10000^(-i / (d/2)), [DiT] section 3.2; not stored, so that public state dicts load by name.
        frequencies = torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32) / half)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, c_noise: torch.Tensor) -> torch.Tensor:
        angles = c_noise.float().unsqueeze(-1) * self.frequencies  # (N, 128)
        return self.mlp(torch.cat([angles.cos(), angles.sin()], dim=-1))  # (N, D)


class LabelEmbedder(nn.Module):
    """Embed class labels; row `num_classes` of the table is the null class of classifier-free guidance."""

    def __init__(self, num_classes: int, hidden_size: int):
        super().__init__()
        self.num_classes = num_classes
        self.embedding_table = nn.Embedding(num_classes + 1, hidden_size)

    def forward(self, class_labels: torch.Tensor) -> torch.Tensor:
        return self.embedding_table(class_labels)  # (N, D)


def drop_labels(class_labels: torch.Tensor, null_class: int, prob: float, generator: torch.Generator | None) -> torch.Tensor:
    """Replace each label by the null class with probability `prob`. [CFG]"""
    drop = torch.rand(class_labels.shape, generator=generator, device=class_labels.device) < prob
    return torch.where(drop, null_class, class_labels)


def sincos_position_table(hidden_size: int, grid_size: int) -> torch.Tensor:
    """Return the fixed position table (grid_size ** 2, hidden_size) of [DiT]: columns in the first half of the channels.

    Raises:
        ValueError: the channels do not divide into sine and cosine of two axes.
    """
    if hidden_size % 4:
        raise ValueError(f"model.hidden_size={hidden_size} must be a multiple of 4 for the position table")
    quarter = hidden_size // 4
    omega = 10000 ** -(torch.arange(quarter, dtype=torch.float64) / quarter)
    angles = torch.arange(grid_size, dtype=torch.float64).unsqueeze(-1) * omega  # (grid, D/4)
    axis = torch.cat([angles.sin(), angles.cos()], dim=-1)  # (grid, D/2)
    rows, columns = torch.meshgrid(torch.arange(grid_size), torch.arange(grid_size), indexing="ij")
    return torch.cat([axis[columns.flatten()], axis[rows.flatten()]], dim=-1).float()  # (T, D)
