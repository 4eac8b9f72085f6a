"""Tokens that bypassed rejoin as a learned mask token at their places, as masked training has it. [MaskDiT]

The network never sees them. In MaskDiT the blocks after the window are a decoder of their own width; here
they are blocks like the others.
"""

import torch
import torch.nn as nn

from routing import end_route


class Mask(nn.Module):
    """Pad the sparse output of a window."""

    def __init__(self, places: torch.Tensor, /):
        super().__init__()
        self.mask_token = nn.Parameter(0.02 * torch.randn(places.shape[-1]))  # (D,)
        self.register_buffer("places", places, persistent=False)

    def forward(
        self,
        routed: torch.Tensor | None,
        ids_keep: torch.Tensor | None,
        original: torch.Tensor,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Return the sequence (N, L, D)."""
        if routed is not None and ids_keep is None:
            # The token takes part in every training step, or processes would wait for its gradient.
            return routed + 0 * self.mask_token if self.training else routed
        padding = (self.places + self.mask_token).to(original.dtype).expand_as(original)  # (N, L, D)
        return padding if routed is None else end_route(routed, ids_keep, padding)
