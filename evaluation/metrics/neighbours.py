"""Nearest neighbours among features, exact to fp64."""

from collections.abc import Iterator

import torch

MAX_DISTANCES = 2**26  # in memory at a time


def distances(a: torch.Tensor, b: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield blocks of rows of the distances (N, M) between features (N, F) and (M, F)."""
    centre = b.double().mean(dim=0)  # centring reduces the rounding errors of the differences below
    a, b = a.double() - centre, b.double() - centre
    squares = b.square().sum(dim=1)
    for rows in a.split(max(1, MAX_DISTANCES // len(b))):
        # |a - b|^2 = |a|^2 - 2 a.b + |b|^2
        yield (rows.square().sum(dim=1, keepdim=True) - 2 * rows @ b.T + squares).clamp_(min=0).sqrt_()


def nearest(a: torch.Tensor, b: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices and distances (N, k) of the k nearest of b (M, F) to each of a (N, F), nearest first.

    The distance of equal features is exactly 0.
    """
    a, b = a.double(), b.double()
    indices = torch.cat([block.topk(k, largest=False).indices for block in distances(a, b)])
    exact = torch.stack([(b[column] - a).norm(dim=1) for column in indices.T], dim=1)
    return indices, exact
