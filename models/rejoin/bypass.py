"""Bypassed tokens rejoin as they were before the window. [TREAD]"""

import torch
import torch.nn as nn

from routing import end_route


class Bypass(nn.Module):
    """Nothing is learned, and nothing changes if no token bypasses."""

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
