"""Alignment of tokens with the clean latent of their patch; it needs no encoder. [SRA2]"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from runtime.errors import check_positive
from training.alignment.alignment import Alignment, mlp

BETA = 0.05  # of the smooth L1 loss


class SRA2(Alignment):
    """Predict the clean latent of each token's patch by an MLP.

    Args:
        num_layers: number of layers of the MLP.
        width: width of its hidden layers; None: twice the network's, which gives about 8M parameters for B.
        The other arguments are documented in `Alignment`.
    """

    def __init__(
        self,
        block: int = 1,
        weight: float = 1.0,
        until_step: int | None = None,
        tokens: str = "all",
        num_layers: int = 5,
        width: int | None = None,
    ):
        super().__init__(block, weight, until_step, tokens)
        check_positive("alignment.num_layers", num_layers)
        check_positive("alignment.width", width, otherwise=", or null")
        self.num_layers, self.width = num_layers, width

    def projector(self, hidden_size: int, target_size: int, grid_size: int) -> nn.Module:
        width = 2 * hidden_size if self.width is None else self.width
        return mlp([hidden_size, *[width] * (self.num_layers - 1), target_size])

    def target(self, x: torch.Tensor, features: torch.Tensor | None, grid_size: int, /) -> torch.Tensor:
        patches = F.pixel_unshuffle(x, x.shape[-1] // grid_size)  # (N, C p^2, grid, grid)
        return patches.flatten(2).transpose(1, 2)  # (N, T, C p^2)

    def error(self, predicted: torch.Tensor, target: torch.Tensor, /) -> torch.Tensor:
        # |d| - beta / 2 where |d| > beta, d^2 / (2 beta) elsewhere
        return F.smooth_l1_loss(predicted, target, beta=BETA, reduction="none").mean(dim=2)
