"""Routers choose the tokens of each sample that stay in a window.

    router(x, num_kept, /, *, force_keep=None, noise=None, generator=None) -> ids_keep

x (N, T, D): the tokens before the window, without prefix. force_keep (N, T) bool: tokens that are kept first.
noise (N, T) in [0, 1): replaces the draw from `generator`. ids_keep (N, K): ascending positions in x.
"""

from routing.routers.grid import grid_router
from routing.routers.norm import norm_router
from routing.routers.random import random_router
from routing.routers.row import row_router
