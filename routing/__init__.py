"""Which tokens travel: the routes of TREAD, and the gather and scatter that carry tokens around layers."""

from routing.adapter import Adapter, BlockList, Kept
from routing.attached import attach, detach
from routing.plan import RoutePlan, grow_ratio
from routing.proof import prove
from routing.propose import propose_adapter
from routing.routers import grid_router, norm_router, random_router
from routing.routes import Route, Router, Routing, from_simpletuner, resolve_routes
from routing.tokens import (
    end_route,
    gather_tokens,
    num_tokens_kept,
    sample_ids_keep,
    start_route,
    with_prefix,
)

__all__ = [
    "Adapter",
    "BlockList",
    "Kept",
    "Route",
    "RoutePlan",
    "Router",
    "Routing",
    "attach",
    "detach",
    "end_route",
    "from_simpletuner",
    "gather_tokens",
    "grid_router",
    "grow_ratio",
    "norm_router",
    "num_tokens_kept",
    "propose_adapter",
    "prove",
    "random_router",
    "resolve_routes",
    "sample_ids_keep",
    "start_route",
    "with_prefix",
]
