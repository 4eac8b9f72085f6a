"""Alignment of tokens with features of a pretrained encoder. [REPA] [IREPA]"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from runtime.errors import check_positive
from training.alignment.alignment import Alignment, mlp


class REPA(Alignment):
    """Predict the encoder's features of each token's patch by an MLP, compared by their angle. [REPA]

    Args:
        width: width of the hidden layers of the MLP, which has three layers.
        encoder: name of an encoder (`data/features.py`) that computes the features at each step from the
            decoded latents; None: they are stored in the latent folder.
        weights: safetensors file of the encoder's weights.
        The other arguments are documented in `Alignment`.
    """

    needs_features = True

    def __init__(
        self,
        block: int = 3,
        weight: float = 0.5,
        until_step: int | None = None,
        tokens: str = "all",
        width: int = 2048,
        encoder: str | None = None,
        weights: str | None = None,
    ):
        super().__init__(block, weight, until_step, tokens)
        check_positive("alignment.width", width)
        self.width, self.encoder, self.weights = width, encoder, weights

    def projector(self, hidden_size: int, target_size: int, grid_size: int) -> nn.Module:
        return mlp([hidden_size, self.width, self.width, target_size])

    def target(self, x: torch.Tensor, features: torch.Tensor | None, grid_size: int, /) -> torch.Tensor:
        assert features is not None  # `attach` checks it
        return features.float()

    def error(self, predicted: torch.Tensor, target: torch.Tensor, /) -> torch.Tensor:
        # -cos(h_phi(h_t), y), [REPA] eq. 8
        return -F.cosine_similarity(predicted, target, dim=2)


class IREPA(REPA):
    """REPA with a convolution as its projector, and features normalised over the tokens. [IREPA]

    The convolution needs the whole grid, so `tokens` is always `all`. The arguments are documented in `REPA`.
    """

    def __init__(
        self,
        block: int = 3,
        weight: float = 1.0,
        until_step: int | None = None,
        encoder: str | None = None,
        weights: str | None = None,
    ):
        super().__init__(block, weight, until_step, encoder=encoder, weights=weights)

    def projector(self, hidden_size: int, target_size: int, grid_size: int) -> nn.Module:
        return GridConv(hidden_size, target_size, grid_size)

    def target(self, x: torch.Tensor, features: torch.Tensor | None, grid_size: int, /) -> torch.Tensor:
        y = super().target(x, features, grid_size)
        # (y - mean_t) / (std_t + 1e-6), over the tokens
        return (y - y.mean(dim=1, keepdim=True)) / (y.std(dim=1, keepdim=True) + 1e-6)


class GridConv(nn.Module):
    """A 3x3 convolution over the grid of tokens."""

    def __init__(self, hidden_size: int, target_size: int, grid_size: int):
        super().__init__()
        self.grid_size, self.conv = grid_size, nn.Conv2d(hidden_size, target_size, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, T, D) -> (N, T, F)."""
        grid = x.transpose(1, 2).unflatten(2, (self.grid_size, self.grid_size))  # (N, D, grid, grid)
        return self.conv(grid).flatten(2).transpose(1, 2)
