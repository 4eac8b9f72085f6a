"""Keep whole rows of the token grid, or whole frames of a video, drawn at random."""

from math import isqrt

import torch

from routing.routers.random import token_noise
from routing.tokens import keep_lowest


def row_router(
    x: torch.Tensor,
    num_kept: int,
    /,
    *,
    length: int | None = None,
    force_keep: torch.Tensor | None = None,
    noise: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Return ids_keep (N, K): random rows; the last one is cut so that K tokens stay.

    Args:
        length: number of tokens in a row, or in a frame; None: the side of a square grid.
    """
    T = x.shape[1]
    if length is None and isqrt(T) ** 2 != T:
        raise ValueError(f"the row router needs a length, unless the number of tokens is a square, not {T}")
    length = isqrt(T) if length is None else length
    if length < 1 or T % length:
        raise ValueError(f"model.router.length={length} must divide the number of tokens, {T}")
    noise = token_noise(x, generator) if noise is None else noise
    rank = noise[:, ::length].argsort(dim=1).argsort(dim=1).repeat_interleave(length, dim=1)  # (N, T)
    return keep_lowest(rank + torch.arange(T, device=x.device) / T, num_kept, force_keep)
