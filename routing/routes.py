"""Routes: windows of layers that some of the tokens bypass [TREAD], and their options in a forward pass."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

import torch

from routing.tokens import num_tokens_kept

Router = Callable[..., torch.Tensor]  # see routing/routers


@contextmanager
def prefix_errors(name: str) -> Iterator[None]:
    """Prefix the message of a ValueError with a name."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


@dataclass(frozen=True)
class Route:
    """A window of layers that a fraction of the tokens bypasses.

    Args:
        selection_ratio: fraction of tokens that bypass the window, in [0, 1).
        start_layer_idx: first layer of the window; negative indices count from the end.
        end_layer_idx: last layer of the window, inclusive; -1 is the last layer.

    Raises:
        ValueError: an argument is not a number, or an index is not an integer.
    """

    selection_ratio: float
    start_layer_idx: int
    end_layer_idx: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            kind, rule = (Integral, "an integer") if name.endswith("idx") else (Real, "a number")
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ValueError(f"{name}={value!r} of a route must be {rule}")


@dataclass(frozen=True)
class Routing:
    """Options of all routes of a network in one forward pass.

    Args:
        selection_ratio: fraction of tokens that bypass, in [0, 1]: one number for all routes, or one per
            route in the order of the layers. 0 is dense, 1 skips the windows. None: each route's own ratio
            in `train()` mode, dense in `eval()` mode.
        force_keep: (N, T) bool, tokens that must not bypass.
        noise: one tensor (N, T) in [0, 1) per route. It replaces the random draw of the router, so that the
            caller knows which tokens are kept, or can repeat them.
    """

    selection_ratio: float | Sequence[float] | None = None
    force_keep: torch.Tensor | None = None
    noise: Sequence[torch.Tensor] | None = None

    def ratios(self, routes: Sequence[Route], active: bool) -> tuple[float, ...]:
        """Return the ratio of each route. `selection_ratio=None`: the route's ratio if `active`, else 0.

        Raises:
            ValueError: a ratio is outside [0, 1], or the number of ratios is not the number of routes.
        """
        ratio = self.selection_ratio
        if ratio is None:
            return tuple(route.selection_ratio if active else 0.0 for route in routes)
        values = tuple(ratio) if isinstance(ratio, Sequence) else (ratio,)
        ratios = values if isinstance(ratio, Sequence) else values * len(routes)
        are_numbers = all(isinstance(value, Real) and not isinstance(value, bool) for value in values)
        fits = are_numbers and len(ratios) == len(routes) and (routes or not any(values))
        if not (fits and all(0 <= ratio <= 1 for ratio in ratios)):
            allowed = f"one number for all routes, or one for each of {len(routes)}"
            raise ValueError(f"selection_ratio={ratio!r} must be in [0, 1]: {allowed}")
        return ratios

    def ids_keep(
        self, idx: int, ratio: float, x: torch.Tensor, router: Router, generator: torch.Generator | None
    ) -> torch.Tensor:
        """Choose the tokens of x (N, T, D) that stay in the window of route `idx`: (N, K).

        Raises:
            ValueError: a tensor of `noise` is missing or is not (N, T).
        """
        noise = None
        if self.noise is not None:
            shapes = [tuple(tensor.shape) for tensor in self.noise]
            if idx >= len(shapes) or shapes[idx] != tuple(x.shape[:2]):
                raise ValueError(f"noise={shapes} must have one tensor {tuple(x.shape[:2])} for each route")
            noise = self.noise[idx]
        num_kept = num_tokens_kept(x.shape[1], ratio)
        return router(x, num_kept, force_keep=self.force_keep, noise=noise, generator=generator)


def resolve_routes(routes: Iterable[Route], depth: int, key: str = "model.routes") -> tuple[Route, ...]:
    """Return the routes with non-negative layer indices, in the order of the layers.

    Args:
        routes: routes as written by the user, in any order.
        depth: number of layers of the network.
        key: name of the routes in error messages.

    Raises:
        ValueError: a ratio is outside [0, 1), an index is outside the depth, a window starts after its end,
            or two windows share a layer.
    """
    resolved = [(i, _resolve(f"{key}.{i}", route, depth)) for i, route in enumerate(routes)]
    resolved.sort(key=lambda item: item[1].start_layer_idx)
    for (i, first), (j, second) in pairwise(resolved):
        if second.start_layer_idx <= first.end_layer_idx:
            raise ValueError(
                f"{key}.{i} (layers {first.start_layer_idx}..{first.end_layer_idx}) and {key}.{j} "
                f"(layers {second.start_layer_idx}..{second.end_layer_idx}) overlap at depth {depth}: "
                "routes must not share a layer"
            )
    return tuple(route for _, route in resolved)


def _resolve(key: str, route: Route, depth: int) -> Route:
    if not 0 <= route.selection_ratio < 1:
        raise ValueError(f"{key}.selection_ratio={route.selection_ratio} must be in [0, 1)")
    for name in ("start_layer_idx", "end_layer_idx"):
        idx = getattr(route, name)
        if not -depth <= idx < depth:
            raise ValueError(f"{key}.{name}={idx} must be in [{-depth}, {depth - 1}] for depth={depth}")
    start, end = route.start_layer_idx % depth, route.end_layer_idx % depth
    if start > end:
        raise ValueError(
            f"{key}.start_layer_idx={route.start_layer_idx} (layer {start}) must not come after "
            f"end_layer_idx={route.end_layer_idx} (layer {end}) at depth={depth}"
        )
    return Route(route.selection_ratio, start, end)


def from_simpletuner(tread_config: dict[str, Any]) -> tuple[Route, ...]:
    """Read the routes of a `tread_config` of SimpleTuner: {"routes": [{"selection_ratio": ...}, ...]}.

    routing/adapters/README.md lists the differences.

    Args:
        tread_config: the value of this key, or a complete configuration that contains it.

    Raises:
        ValueError: a key is missing or unknown, or a value is not a number.
    """
    tread_config = tread_config.get("tread_config", tread_config)
    routes = tread_config.get("routes") if isinstance(tread_config, dict) else None
    if not isinstance(routes, list) or len(tread_config) > 1:
        raise ValueError(f"tread_config={tread_config} must have one key, routes, whose value is a list")
    names, resolved = [field.name for field in fields(Route)], []
    for i, route in enumerate(routes):
        if not isinstance(route, dict) or {*route} != {*names}:
            raise ValueError(f"tread_config routes.{i}={route} must have {', '.join(names)}")
        with prefix_errors(f"tread_config routes.{i}"):
            resolved.append(Route(**route))
    return tuple(resolved)
