"""Routers: each chooses which tokens of a sample stay in a window.

    router(x, num_kept, /, *, force_keep=None, noise=None, generator=None) -> ids_keep

x (N, T, D) are the tokens before the window, without a prefix; noise (N, T) in [0, 1) takes the place of the
draw from `generator`; ids_keep (N, K) are positions in x, ascending, the tokens of force_keep (N, T) bool
among them as far as they fit.
"""

from routing.routers.grid import grid_router
from routing.routers.norm import norm_router
from routing.routers.random import random_router
