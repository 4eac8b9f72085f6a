"""Parts of the diffusion transformer: embedders, attention, modulation, position tables. [DiT]

Shapes: N samples, T tokens of the image, L tokens in the sequence, D channels, H heads of d channels.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.layers import RotaryEmbeddingCat, apply_rot_embed_cat


def modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Shift and scale the channels of each token: x (N, L, D); shift, scale (N, 1 or L, D)."""
    return x * (1 + scale) + shift


def resolve_attention(backend: str, device_type: str, dtype: torch.dtype) -> str:
    """Resolve `auto`: `sdpa`, the fused kernel, except for bf16 on a CPU.

    There the kernel's backward pass is slower than plain matrix products at every length from 64 to 4096
    (benchmarks/LOG.md).
    """
    if backend != "auto":
        return backend
    return "explicit" if device_type == "cpu" and dtype == torch.bfloat16 else "sdpa"


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: str = "auto", bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return softmax(q k^T / sqrt(d) + bias) v for q, k, v (N, H, L, d); the bias broadcasts."""
    if resolve_attention(backend, v.device.type, v.dtype) == "sdpa":
        return F.scaled_dot_product_attention(q, k, v, bias)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)  # (N, H, L, L)
    scores = scores if bias is None else scores + bias
    return scores.softmax(dim=-1, dtype=torch.float32).to(v.dtype) @ v


class GELU(nn.Module):
    """GELU in the tanh approximation, as in [DiT]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cpu" and torch.compiler.is_compiling():
            # x/2 (1 + tanh u) = x sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3): cheaper if compiled.
            return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))
        return F.gelu(x, approximate="tanh")


class Attention(nn.Module):
    """Multi-head self-attention.

    Args:
        attention: `sdpa`: torch's fused kernel; `explicit`: two matrix products with a softmax in fp32
            between them; `auto`: chosen by device and precision, see `resolve_attention`.
        qk_norm: RMSNorm of queries and keys, with a learned scale for each channel of a head.
        full_length: T; in shorter sequences each token's own logit is corrected. None: no correction.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        attention: str,
        qk_norm: bool = False,
        full_length: int | None = None,
    ):
        super().__init__()
        self.num_heads, self.backend, self.full_length = num_heads, attention, full_length
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.q_norm = nn.RMSNorm(hidden_size // num_heads, eps=1e-6) if qk_norm else None
        self.k_norm = nn.RMSNorm(hidden_size // num_heads, eps=1e-6) if qk_norm else None
        self.proj = nn.Linear(hidden_size, hidden_size)

    def forward(
        self, x: torch.Tensor, rope: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attend over x (N, L, D).

        Args:
            rope: (1 or N, L, 2d) sines and cosines of each token's position.
            bias: (N, 1, 1, L), added to the logits of each key.
        """
        N, L, D = x.shape
        qkv = self.qkv(x).reshape(N, L, 3, self.num_heads, D // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (N, H, L, d) each
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q.float()), self.k_norm(k.float())
        if rope is not None:
            q, k = (apply_rot_embed_cat(z, rope.unsqueeze(1)) for z in (q, k))
        bias = self._bias(L, v) if bias is None else bias.to(v.dtype)
        x = attention(q.to(v.dtype), k.to(v.dtype), v, self.backend, bias)  # (N, H, L, d)
        return self.proj(x.transpose(1, 2).reshape(N, L, D))

    def _bias(self, length: int, like: torch.Tensor) -> torch.Tensor | None:
        """Return the bias (L, L) that gives each token's own logit the weight that it has among T tokens."""
        if self.full_length is None or not 1 < length < self.full_length:
            return None
        # log((L - 1) / (T - 1)) on the diagonal
        correction = math.log((length - 1) / (self.full_length - 1))
        return correction * torch.eye(length, dtype=like.dtype, device=like.device)

    def flops(self, length: int) -> int:
        """Return the FLOPs of the matrix products for one sample."""
        # q k^T and the product with v take 2 L^2 D each.
        return length * linear_flops(self) + 4 * length**2 * self.proj.in_features


class TimestepEmbedder(nn.Module):
    """Embed the noise level c_noise: 256 sines and cosines, then an MLP."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(256, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size))
        # omega_i = 10000^(-i / 128) as in [DiT]; not stored, so that public state dicts load by name.
        frequencies = torch.exp(-math.log(10000) * torch.arange(128, dtype=torch.float32) / 128)
        self.frequencies = nn.Buffer(frequencies, persistent=False)

    def forward(self, c_noise: torch.Tensor) -> torch.Tensor:
        angles = c_noise.float().unsqueeze(-1) * self.frequencies  # (N, 128)
        return self.mlp(torch.cat([angles.cos(), angles.sin()], dim=-1))  # (N, D)


class LabelEmbedder(nn.Module):
    """Embed class labels; row `num_classes` of the table is the null class of classifier-free guidance."""

    def __init__(self, num_classes: int, hidden_size: int):
        super().__init__()
        self.embedding_table = nn.Embedding(num_classes + 1, hidden_size)

    def forward(self, class_labels: torch.Tensor) -> torch.Tensor:
        return self.embedding_table(class_labels)  # (N, D)


def drop_labels(
    labels: torch.Tensor, null_label: int, prob: float, generator: torch.Generator | None
) -> torch.Tensor:
    """Replace each label (N,), or caption (N, M, ...), by the null label with probability `prob`. [CFG]"""
    drop = torch.rand(len(labels), generator=generator, device=labels.device) < prob
    return torch.where(drop.view(-1, *[1] * (labels.dim() - 1)), null_label, labels)


def sincos_position_table(hidden_size: int, grid_size: int) -> torch.Tensor:
    """Return the position table (T, hidden_size) of [DiT]; the first half of the channels encodes columns."""
    if hidden_size % 4:
        raise ValueError(f"model.hidden_size={hidden_size} must be a multiple of 4 for the position table")
    quarter = hidden_size // 4
    omega = 10000 ** -(torch.arange(quarter, dtype=torch.float64) / quarter)
    angles = torch.arange(grid_size, dtype=torch.float64).unsqueeze(-1) * omega  # (grid, D/4)
    axis = torch.cat([angles.sin(), angles.cos()], dim=-1)  # (grid, D/2)
    rows, columns = torch.meshgrid(torch.arange(grid_size), torch.arange(grid_size), indexing="ij")
    return torch.cat([axis[columns.flatten()], axis[rows.flatten()]], dim=-1).float()  # (T, D)


def rotary_table(head_size: int, grid_size: int, num_prefix_tokens: int) -> torch.Tensor:
    """Return sines and cosines (L, 2 * head_size) of rotary positions; the prefix is not rotated."""
    if head_size % 4:
        key = f"model.hidden_size / model.num_heads={head_size}"
        raise ValueError(f"{key} must be a multiple of 4 for rotary positions")
    rope = RotaryEmbeddingCat(head_size, in_pixels=False, feat_shape=[grid_size, grid_size])
    image = rope.get_embed()  # (T, 2d)
    sin, cos = torch.zeros(num_prefix_tokens, head_size), torch.ones(num_prefix_tokens, head_size)
    return torch.cat([torch.cat([sin, cos], dim=1).to(image), image])  # (L, 2d)


def linear_flops(module: nn.Module) -> int:
    """Return the FLOPs of all linear layers and convolutions for one token: two per weight."""
    layers = (layer for layer in module.modules() if isinstance(layer, nn.Linear | nn.Conv2d))
    return sum(2 * layer.weight.numel() for layer in layers)


def token_mask(mask: torch.Tensor, patch_size: int, area: float = 0.0) -> torch.Tensor:
    """Return (N, T) bool: True if `mask` (N, H, W) covers more than the fraction `area` of the patch."""
    N, H, W = mask.shape
    patches = (mask > 0).view(N, H // patch_size, patch_size, W // patch_size, patch_size)
    return (patches.sum(dim=(2, 4)) > area * patch_size**2).flatten(1)  # (N, T)
