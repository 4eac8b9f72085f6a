"""Keep evenly spread tokens: a random one of each group of neighbours, then a second, and so on. [SPRINT]"""

from math import isqrt

import torch

from routing.routers.random import token_noise
from routing.tokens import keep_lowest


def grid_router(
    x: torch.Tensor,
    num_kept: int,
    /,
    *,
    side: int = 2,
    force_keep: torch.Tensor | None = None,
    noise: torch.Tensor | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Return ids_keep (N, K), spread over the groups of side x side tokens of a square grid.

    K may be any number: the groups keep equal numbers of tokens, or differ by one.
    """
    N, T, grid = *x.shape[:2], isqrt(x.shape[1])
    if grid**2 != T:
        raise ValueError(f"model/router=grid needs a square number of tokens, not {T}")
    if side < 1 or grid % side:
        raise ValueError(f"model.router.side={side} must divide the side of the token grid, {grid}")
    noise = token_noise(x, generator) if noise is None else noise
    groups = noise.view(N, grid // side, side, grid // side, side).transpose(2, 3)
    rank = groups.flatten(3).argsort(dim=-1).argsort(dim=-1).view_as(groups)  # rank in its group, from 0
    rank = rank.transpose(2, 3).reshape(N, T)
    return keep_lowest(rank + noise, num_kept, force_keep)
