"""Which tokens travel: the routes of TREAD, and the gather and scatter that carry tokens around a window of
layers.
"""

from routing.adapter import Adapter, BlockList, Kept
from routing.attached import attach, detach
from routing.plan import RoutePlan, grow_ratio
from routing.routes import Route, from_simpletuner, resolve_routes
from routing.tokens import (
    end_route,
    gather_tokens,
    num_tokens_kept,
    sample_ids_keep,
    start_route,
    token_importance,
)

__all__ = [
    "Adapter",
    "BlockList",
    "Kept",
    "Route",
    "RoutePlan",
    "attach",
    "detach",
    "end_route",
    "from_simpletuner",
    "gather_tokens",
    "grow_ratio",
    "num_tokens_kept",
    "resolve_routes",
    "sample_ids_keep",
    "start_route",
    "token_importance",
]
