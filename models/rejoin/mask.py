"""Bypassed tokens are replaced by a learned mask token at their positions, as in masked training. [MaskDiT]

In MaskDiT the blocks after the window are a decoder of another width; here they are like the other blocks.
"""

import torch
import torch.nn as nn

from routing import end_route


class Mask(nn.Module):
    """Pad the output of a window with a learned mask token."""

    def __init__(self, pos_embed: torch.Tensor, /):
        super().__init__()
        self.mask_token = nn.Parameter(0.02 * torch.randn(pos_embed.shape[-1]))  # (D,)
        self.pos_embed = nn.Buffer(pos_embed, persistent=False)

    def forward(
        self,
        routed: torch.Tensor | None,
        ids_keep: torch.Tensor | None,
        original: torch.Tensor,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        if routed is not None and ids_keep is None:
            # DDP waits for a gradient of every parameter in every step.
            return routed + 0 * self.mask_token if self.training else routed
        padding = (self.pos_embed + self.mask_token).to(original.dtype).expand_as(original)  # (N, L, D)
        return padding if routed is None or ids_keep is None else end_route(routed, ids_keep, padding)
