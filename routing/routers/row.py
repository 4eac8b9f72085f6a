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
    share_over_batch: bool = False,
    force_keep: torch.Tensor | None = None,
    noise: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Return ids_keep (N, K): random rows, of which the last is kept in part if they have more than K tokens.

    Args:
        length: tokens of a row; None: the side of a square grid. Tokens of a frame: keeps whole frames.
    """
    T = x.shape[1]
    length = isqrt(T) if length is None else length
    if length < 1 or T % length:
        raise ValueError(f"model.router.length={length} must divide the number of tokens, {T}")
    noise = token_noise(x, generator, share_over_batch) if noise is None else noise
    rank = noise[:, ::length].argsort(dim=1).argsort(dim=1).repeat_interleave(length, dim=1)  # (N, T)
    return keep_lowest(rank + torch.arange(T, device=x.device) / T, num_kept, force_keep)
