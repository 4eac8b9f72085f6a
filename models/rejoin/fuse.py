"""A window's output, padded with a mask token, is fused with the sequence before the window. [SPRINT]

As in the public code, the mask token is drawn from N(0, 0.02^2) when the network is built, never trained, and
saved with the weights.
"""

import torch
import torch.nn as nn

from routing import end_route


class Fuse(nn.Module):
    """Concatenate the sequences before and after the window, and project.

    Args:
        path_drop_prob: probability that the window's output is dropped for a sample in training, so that the
            network can be evaluated without the window (`guidance=path_drop`).
    """

    def __init__(self, pos_embed: torch.Tensor, /, path_drop_prob: float = 0.1):
        super().__init__()
        hidden_size = pos_embed.shape[-1]
        if not 0 <= path_drop_prob < 1:
            raise ValueError(f"model.rejoin.path_drop_prob={path_drop_prob} must be in [0, 1)")
        self.path_drop_prob = path_drop_prob
        self.mask_token = nn.Buffer(0.02 * torch.randn(hidden_size))  # (D,), never trained
        self.proj = nn.Linear(2 * hidden_size, hidden_size)

    def forward(
        self,
        routed: torch.Tensor | None,
        ids_keep: torch.Tensor | None,
        original: torch.Tensor,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        padding = self.mask_token.to(original.dtype).expand_as(original)  # (N, L, D)
        if routed is None:
            padded = padding
        else:
            padded = routed if ids_keep is None else end_route(routed, ids_keep, padding)
            if self.training and self.path_drop_prob > 0:
                shape = (padded.shape[0], 1, 1)
                drop = torch.rand(shape, generator=generator, device=padded.device) < self.path_drop_prob
                padded = torch.where(drop, padding, padded)
        fused = self.proj(torch.cat([original, padded], dim=-1))  # (N, L, D)
        return fused.to(original.dtype)  # autocast must not make the residual stream bf16
