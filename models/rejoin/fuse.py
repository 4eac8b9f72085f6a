"""The sparse output of a window, padded with a mask token, is fused with the dense state before it. [SPRINT]

As in the public code, the mask token is drawn from N(0, 0.02^2) when the network is built, never trained, and
saved with the weights.
"""

import torch
import torch.nn as nn

from routing import end_route


class Fuse(nn.Module):
    """Concatenate what is before and after the window, and project.

    Args:
        path_drop_prob: probability that a sample loses the window in training, so that the network can be
            asked without it (`guidance=path_drop`).
    """

    def __init__(self, places: torch.Tensor, /, path_drop_prob: float = 0.1):
        super().__init__()
        hidden_size = places.shape[-1]
        if not 0 <= path_drop_prob < 1:
            raise ValueError(f"model.rejoin.path_drop_prob={path_drop_prob} must be in [0, 1)")
        self.path_drop_prob = path_drop_prob
        self.register_buffer("mask_token", 0.02 * torch.randn(hidden_size))  # (D,), never trained
        self.proj = nn.Linear(2 * hidden_size, hidden_size)

    def forward(
        self,
        routed: torch.Tensor | None,
        ids_keep: torch.Tensor | None,
        original: torch.Tensor,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Return the sequence (N, L, D)."""
        padding = self.mask_token.to(original.dtype).expand_as(original)  # (N, L, D)
        if routed is None:
            padded = padding
        else:
            padded = routed if ids_keep is None else end_route(routed, ids_keep, padding)
            padded = self._drop_path(padded, padding, generator)
        fused = self.proj(torch.cat([original, padded], dim=-1))  # (N, L, D)
        return fused.to(original.dtype)  # autocast must not make the residual stream bf16

    def _drop_path(
        self, padded: torch.Tensor, padding: torch.Tensor, generator: torch.Generator | None
    ) -> torch.Tensor:
        if not self.training or self.path_drop_prob == 0:
            return padded
        shape = (padded.shape[0], 1, 1)
        drop = torch.rand(shape, generator=generator, device=padded.device) < self.path_drop_prob
        return torch.where(drop, padding, padded)
