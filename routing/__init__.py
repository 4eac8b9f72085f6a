"""Which tokens travel: the routes of TREAD, and the gather and scatter that carry tokens around a window of layers."""

from routing.routes import Route, resolve_routes
from routing.tokens import end_route, gather_tokens, num_tokens_kept, sample_ids_keep, start_route

__all__ = ["Route", "end_route", "gather_tokens", "num_tokens_kept", "resolve_routes", "sample_ids_keep", "start_route"]
