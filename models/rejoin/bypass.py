"""Bypassed tokens rejoin unchanged. [TREAD]"""

import torch
import torch.nn as nn

from routing import end_route


class Bypass(nn.Module):
    """Put the processed tokens back among the bypassed ones, without parameters."""

    def __init__(self, pos_embed: torch.Tensor, /):
        super().__init__()

    def forward(
        self,
        routed: torch.Tensor | None,
        ids_keep: torch.Tensor | None,
        original: torch.Tensor,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        if routed is None:
            return original
        return routed if ids_keep is None else end_route(routed, ids_keep, original)
