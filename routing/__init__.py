"""Token routing for transformers [TREAD]: choose the tokens of a window, take them out, put them back.

`routing.adapters`, which adds routes to other people's transformers, is imported on first use.
"""

import importlib
from typing import Any

from routing.routers import grid_router, norm_router, random_router, row_router
from routing.routes import Route, Router, Routing, from_simpletuner, resolve_routes
from routing.schedule import RoutePlan, grow_ratio
from routing.tokens import (
    end_route,
    gather_tokens,
    num_tokens_kept,
    other_tokens,
    sample_ids_keep,
    start_route,
    with_prefix,
)

ADAPTERS = ("Adapter", "BlockList", "TokenSelection", "attach", "detach", "propose_adapter", "prove")


def __getattr__(name: str) -> Any:
    if name not in ADAPTERS:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(importlib.import_module("routing.adapters"), name)
