"""A shallow and wide transformer after the blocks, for latents with many channels. [DDT] [RAE]

The head embeds the latents again, at its own width; the output of the blocks modulates each of its tokens.
Published for RAE: 2 blocks of width 2048 after 28 of 1152.

Shapes: N samples, T tokens, D channels of the blocks, W of the head.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.layers import PatchEmbed

from models.layers import linear_flops, sincos_position_table


class WideHead(nn.Module):
    """Blocks of another width whose conditioning is the output of the network's blocks.

    Args:
        block: class of the blocks, see `models/blocks.py`.
        hidden_size: D.
        width: W.
        input_size, patch_size, in_channels: of the latents.
    """

    def __init__(
        self,
        block: Any,
        hidden_size: int,
        width: int,
        depth: int,
        num_heads: int,
        mlp_ratio: float,
        attention: str,
        input_size: int,
        patch_size: int,
        in_channels: int,
    ):
        super().__init__()
        grid_size = input_size // patch_size
        self.x_embedder = PatchEmbed(input_size, patch_size, in_channels, width)
        self.projector = nn.Linear(hidden_size, width)
        pos_embed = positions = None
        if block.has_position_table:
            table = sincos_position_table(width, grid_size)
            pos_embed = nn.Buffer(table.unsqueeze(0), persistent=False)  # (1, T, W)
        if block.positions is not None:
            table = block.positions(width // num_heads, grid_size, 0)
            positions = nn.Buffer(table.unsqueeze(0), persistent=False)
        self.pos_embed, self.positions = pos_embed, positions
        self.blocks: Any = nn.ModuleList(
            block(width, num_heads, mlp_ratio, attention, grid_size**2) for _ in range(depth)
        )

    def forward(
        self, latents: torch.Tensor, s: torch.Tensor, t: torch.Tensor, run: Callable[..., torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens and their conditioning for the final layer, (N, T, W) each.

        Args:
            latents: (N, C, H, W) scaled noisy latents.
            s: (N, T, D) tokens after the blocks.
            t: (N, 1 or T, D) embedded noise level.
            run: run(block, x, c, positions) calls a block.
        """
        # c = W_s silu(t + s), [DDT]
        c = self.projector(F.silu(t + s))  # (N, T, W)
        x = self.x_embedder(latents).to(self.projector.weight.dtype)  # fp32, like the residual stream
        if self.pos_embed is not None:
            x = x + self.pos_embed
        for block in self.blocks:
            x = run(block, x, c, self.positions)
        return x, c

    @property
    def embedding_flops(self) -> int:
        """FLOPs of one token before the blocks."""
        return 2 * self.x_embedder.proj.weight.numel() + linear_flops(self.projector)

    def block_flops(self, num_tokens: int) -> int:
        """Return the FLOPs of the blocks for one sample; the conditioning differs from token to token."""
        return sum(
            block.flops(num_tokens) + (num_tokens - 1) * linear_flops(block.adaLN_modulation)
            for block in self.blocks
        )
