"""Captions as a condition: tokens in front of the image's, or keys and values of cross-attention.

Shapes: N samples, M tokens of a caption, F features of an embedding, S = 1 + M, L tokens in the sequence, D
channels, H heads of d channels.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn

from models.layers import attention, linear_flops
from runtime.errors import check_positive


@dataclass(frozen=True)
class TextShape:
    """The captions that a network takes.

    A caption is a row of token ids (M,), integers from 1 to `vocab_size`, or of embeddings (M, F). Padding
    is 0.

    Args:
        num_tokens: M.
        vocab_size: number of different token ids; None: embeddings.
        num_features: F; None: token ids.
    """

    num_tokens: int
    vocab_size: int | None = None
    num_features: int | None = None

    def __post_init__(self) -> None:
        if (self.vocab_size is None) == (self.num_features is None):
            raise ValueError("model.text must have either vocab_size or num_features")
        for key in ("num_tokens", "vocab_size", "num_features"):
            check_positive(f"model.text.{key}", getattr(self, key))

    def empty(self, num_samples: int, device: torch.device) -> torch.Tensor:
        """Return empty captions, (N, M) int64 or (N, M, F) fp32."""
        if self.num_features is None:
            return torch.zeros(num_samples, self.num_tokens, dtype=torch.int64, device=device)
        return torch.zeros(num_samples, self.num_tokens, self.num_features, device=device)


class TextEmbedder(nn.Module):
    """Embed captions as tokens. A learned token comes first; the empty caption is this token alone."""

    def __init__(self, text: TextShape, hidden_size: int):
        super().__init__()
        self.num_tokens = 1 + text.num_tokens  # S
        self.first = nn.Parameter(torch.empty(1, 1, hidden_size))
        self.positions = nn.Parameter(torch.empty(1, text.num_tokens, hidden_size))
        if text.num_features is None:
            self.embed: nn.Module = nn.Embedding((text.vocab_size or 0) + 1, hidden_size)
            nn.init.normal_(self.embed.get_parameter("weight"), std=0.02)
        else:
            features = text.num_features
            self.embed = nn.Sequential(nn.RMSNorm(features), nn.Linear(features, hidden_size))
        nn.init.normal_(self.first, std=0.02)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, captions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens (N, S, D) in fp32, and the bias (N, 1, 1, S) that removes padding from attention."""
        is_token = captions != 0
        if captions.dim() == 3:
            is_token, captions = is_token.any(dim=-1), captions.to(self.first.dtype)
        else:
            captions = captions.long()
        tokens = self.embed(captions).to(self.first.dtype) + self.positions  # (N, M, D)
        tokens = torch.cat([self.first.expand(len(tokens), -1, -1), tokens], dim=1)
        bias = torch.zeros(is_token.shape, dtype=tokens.dtype, device=tokens.device)
        bias = bias.masked_fill(~is_token, -torch.inf)
        return tokens, nn.functional.pad(bias, (1, 0))[:, None, None]

    def flops(self) -> int:
        """Return the FLOPs of the matrix products for one caption."""
        return (self.num_tokens - 1) * linear_flops(self.embed)


def mean_token(tokens: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return the mean (N, 1, D) of each caption's tokens (N, S, D), without padding."""
    weights = bias.exp().transpose(1, 3).squeeze(2)  # (N, S, 1): 1, or 0 for padding
    return (tokens * weights).sum(dim=1, keepdim=True) / weights.sum(dim=1, keepdim=True)


class TextAttention(nn.Module):
    """Cross-attention: queries of the image, keys and values of the caption. It starts as zero."""

    def __init__(self, hidden_size: int, num_heads: int, backend: str, num_text_tokens: int):
        super().__init__()
        self.num_heads, self.backend, self.num_text_tokens = num_heads, backend, num_text_tokens
        self.norm = nn.LayerNorm(hidden_size, elementwise_affine=False, eps=1e-6)
        self.q = nn.Linear(hidden_size, hidden_size)
        self.kv = nn.Linear(hidden_size, 2 * hidden_size)
        self.proj = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: torch.Tensor, text: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Attend from x (N, L, D) to text (N, S, D), with the bias (N, 1, 1, S) of its padding."""
        N, L, D = x.shape
        heads = self.num_heads, D // self.num_heads
        q = self.q(self.norm(x)).view(N, L, *heads).transpose(1, 2)  # (N, H, L, d)
        k, v = self.kv(text).view(N, -1, 2, *heads).permute(2, 0, 3, 1, 4).unbind(0)  # (N, H, S, d) each
        x = attention(q, k, v, self.backend, bias.to(q.dtype))  # (N, H, L, d)
        return self.proj(x.transpose(1, 2).reshape(N, L, D))

    def flops(self, length: int) -> int:
        """Return the FLOPs of the matrix products for one sample of `length` tokens."""
        D, S = self.proj.in_features, self.num_text_tokens
        # Queries and projection; keys and values; q k^T and the product with v take 2 L S D each.
        return 2 * length * linear_flops(self.proj) + S * linear_flops(self.kv) + 4 * length * S * D
