"""What the routes do at each training step: their schedule, and room for tokens that must not bypass.

Everything here is decided on the host, from numbers that are the same on all ranks, so that K is one number
within a step and takes few values over a training: each is one shape to compile.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from routing.routes import Route, Routing
from routing.tokens import num_tokens_kept

SCHEDULES = ("constant", "linear", "cosine")
OVERFLOWS = ("grow", "bypass")
NUM_BUCKETS = 4  # sizes that K may grow to; the last is T
RATIO_DIGITS = 4  # a scaled ratio is a short decimal again: 0.3 * (2 / 3) is 0.2


@dataclass(frozen=True)
class RoutePlan:
    """The ratio of each route at each step.

    Args:
        routes: the routes of the network.
        num_tokens: T, tokens that may bypass.
        total_steps: steps of the training.
        schedule: `constant`, or how a factor on every ratio goes from `start_factor` to `end_factor`:
            `linear`, `cosine`.
        start_factor: None is 1.
        end_factor: must be given for a schedule that is not constant.
        num_levels: how many values the factor takes.
        off_last_steps: so many last steps are dense; the schedule ends before them.
        force_keep_overflow: where a sample forces more tokens to stay than K: `grow` raises K for this step,
            up to T; `bypass` lets those that come last for the router bypass and counts them.

    Raises:
        ValueError: with the key, the value and the rule.
    """

    routes: tuple[Route, ...]
    num_tokens: int
    total_steps: int
    schedule: str = "constant"
    start_factor: float | None = None
    end_factor: float | None = None
    num_levels: int = 4
    off_last_steps: int | None = None
    force_keep_overflow: str = "grow"

    def __post_init__(self):
        for key, choices in (("schedule", SCHEDULES), ("force_keep_overflow", OVERFLOWS)):
            if getattr(self, key) not in choices:
                raise ValueError(f"routing.{key}={getattr(self, key)} must be one of {', '.join(choices)}")
        if self.off_last_steps is not None and not 0 < self.off_last_steps <= self.total_steps:
            raise ValueError(
                f"routing.off_last_steps={self.off_last_steps} must be in [1, {self.total_steps}]"
            )
        for key in ("start_factor", "end_factor"):
            factor = getattr(self, key)
            if factor is None:
                continue
            if self.schedule == "constant":
                raise ValueError(f"routing.{key}={factor} needs routing.schedule=linear or cosine")
            for route in self.routes:
                if not 0 <= round(factor * route.selection_ratio, RATIO_DIGITS) < 1:
                    product = f"{factor} times selection_ratio={route.selection_ratio}"
                    raise ValueError(f"routing.{key}={product} of {_name(route)} must be in [0, 1)")
        if self.schedule != "constant" and self.end_factor is None:
            raise ValueError(f"routing.schedule={self.schedule} needs routing.end_factor, the last factor")
        if self.schedule != "constant" and self.num_levels < 2:
            raise ValueError(f"routing.num_levels={self.num_levels} must be at least 2")

    def ratios(self, step: int, num_forced: int = 0) -> tuple[float, ...]:
        """Return the ratio of each route.

        Args:
            step: steps done before this one.
            num_forced: the largest number of forced tokens in a sample of this step, over all ranks.
        """
        if self.off_last_steps and step >= self.total_steps - self.off_last_steps:
            return (0.0,) * len(self.routes)
        ratios = self._levels()[self._level(step)]
        if self.force_keep_overflow != "grow":
            return ratios
        return tuple(grow_ratio(ratio, self.num_tokens, num_forced) for ratio in ratios)

    def routing(self, step: int, num_forced: int = 0, force_keep: torch.Tensor | None = None) -> Routing:
        """The Routing of a step; arguments as in `ratios`, and force_keep (N, T) bool."""
        return Routing(self.ratios(step, num_forced), force_keep)

    def lengths(self, with_force_keep: bool) -> set[int]:
        """Return every K that a step may have; T is always among them, outside of the windows."""
        grows = with_force_keep and self.force_keep_overflow == "grow"
        levels = {ratio for ratios in self._levels() for ratio in ratios}
        ratios = {r for level in levels for r in (_buckets(level) if grows else (level,))} | {0.0}
        return {num_tokens_kept(self.num_tokens, ratio) for ratio in ratios}

    def describe(self, with_force_keep: bool) -> list[str]:
        """Describe the plan: a line for each route and one for the schedule."""
        T, grows = self.num_tokens, with_force_keep and self.force_keep_overflow == "grow"
        lines = []
        for route in self.routes:
            num_bypassing = T - num_tokens_kept(T, route.selection_ratio)
            blocks = f"blocks {route.start_layer_idx} to {route.end_layer_idx}"
            fewer = ", fewer where masks force more to stay" if grows else ""
            lines.append(f"{num_bypassing} of {T} tokens bypass {blocks} while training{fewer}")
        if self.routes and (self.schedule != "constant" or self.off_last_steps):
            levels = " -> ".join(", ".join(f"{ratio:g}" for ratio in ratios) for ratios in self._levels())
            dense = f", then {self.off_last_steps} dense steps" if self.off_last_steps else ""
            lines.append(f"ratio {levels} over {self.total_steps - (self.off_last_steps or 0)} steps{dense}")
        return lines

    def num_forced_bypassed(self, force_keep: torch.Tensor, ratios: Sequence[float]) -> torch.Tensor:
        """Count, on the device, the forced tokens (N, T) that do not fit into the windows: a 0-d tensor."""
        num_forced = force_keep.sum(dim=1)  # (N,)
        total = torch.zeros((), device=force_keep.device)
        for ratio in ratios:
            K = num_tokens_kept(self.num_tokens, ratio)
            total = total + (num_forced - K).clamp(min=0).sum()
        return total

    def _level(self, step: int) -> int:
        active_steps = self.total_steps - (self.off_last_steps or 0)
        return min(step * len(self._levels()) // active_steps, len(self._levels()) - 1)

    def _levels(self) -> list[tuple[float, ...]]:
        """Return the ratios of all routes at each level, in the order of training."""
        if self.schedule == "constant" or self.end_factor is None:
            return [tuple(route.selection_ratio for route in self.routes)]
        start = 1.0 if self.start_factor is None else self.start_factor
        levels = []
        for i in range(self.num_levels):
            progress = i / (self.num_levels - 1)
            if self.schedule == "cosine":
                progress = (1 - math.cos(math.pi * progress)) / 2
            factor = start + (self.end_factor - start) * progress
            levels.append(tuple(round(route.selection_ratio * factor, RATIO_DIGITS) for route in self.routes))
        return levels


def grow_ratio(selection_ratio: float, num_tokens: int, num_forced: int) -> float:
    """Return the largest ratio, out of `selection_ratio` and a few below, at which `num_forced` tokens fit.

    For a training loop of your own: count the forced tokens of each sample where the data is loaded, agree on
    the largest count, and give the network this ratio for the step. 0, the last one, is dense.

    Raises:
        ValueError: more forced tokens than there are.
    """
    if num_forced > num_tokens:
        raise ValueError(
            f"num_forced={num_forced} must be at most num_tokens={num_tokens}: count without the prefix"
        )
    return next(r for r in _buckets(selection_ratio) if num_tokens_kept(num_tokens, r) >= num_forced)


def _name(route: Route) -> str:
    # By its blocks: a network orders its routes by layer, whatever the order in the configuration.
    return f"the route of blocks {route.start_layer_idx} to {route.end_layer_idx}"


def _buckets(selection_ratio: float) -> list[float]:
    shrunk = [round(selection_ratio * (1 - i / NUM_BUCKETS), RATIO_DIGITS) for i in range(1, NUM_BUCKETS + 1)]
    return [selection_ratio, *shrunk]
