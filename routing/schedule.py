"""The ratio of each route at each training step: schedules, and room for tokens that must not bypass.

All decisions are made on the host, from numbers that are the same on all ranks. K is therefore one number
per step. It takes few values over a training run, because each value is one more shape to compile.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from routing.routes import Route, Routing
from routing.tokens import num_tokens_kept

SCHEDULES = ("constant", "linear", "cosine")
OVERFLOWS = ("grow", "bypass")
NUM_BUCKETS = 4  # number of sizes that K may grow to; the last is T
RATIO_DIGITS = 4  # scaled ratios are rounded to short decimals: 0.3 * (2 / 3) is 0.2


@dataclass(frozen=True)
class RoutePlan:
    """The ratio of each route at each step.

    Args:
        routes: the routes of the network.
        num_tokens: T, the number of tokens that may bypass.
        total_steps: number of training steps.
        schedule: `constant`; or `linear` or `cosine`: a factor on all ratios goes from `start_factor` to
            `end_factor` in this shape.
        start_factor: first factor; None: 1.
        end_factor: last factor; required unless the schedule is constant.
        num_levels: number of values that the factor takes.
        off_last_steps: number of dense steps at the end; the schedule ends before them. None: no dense steps.
        force_keep_overflow: what happens if a sample forces more than K tokens to stay. `grow` raises K for
            this step, up to T. `bypass` lets the tokens that the router ranks last bypass, and counts them.

    Raises:
        ValueError: an option is outside its range; the message names the key, the value and the rule.
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
        off, total = self.off_last_steps, self.total_steps
        if off is not None and not 0 < off <= total:
            raise ValueError(f"routing.off_last_steps={off} must be in [1, {total}]")
        for key in ("start_factor", "end_factor"):
            factor = getattr(self, key)
            if factor is None:
                continue
            if self.schedule == "constant":
                raise ValueError(f"routing.{key}={factor} needs routing.schedule=linear or cosine")
            for route in self.routes:
                if not 0 <= round(factor * route.selection_ratio, RATIO_DIGITS) < 1:
                    product = f"{factor} times selection_ratio={route.selection_ratio}"
                    # Blocks, not an index: the network sorts its routes.
                    name = f"the route of blocks {route.start_layer_idx} to {route.end_layer_idx}"
                    raise ValueError(f"routing.{key}={product} of {name} must be in [0, 1)")
        if self.schedule != "constant" and self.end_factor is None:
            raise ValueError(f"routing.schedule={self.schedule} needs routing.end_factor, the final factor")
        if self.schedule != "constant" and self.num_levels < 2:
            raise ValueError(f"routing.num_levels={self.num_levels} must be at least 2")

    def ratios(self, step: int, num_forced: int = 0) -> tuple[float, ...]:
        """Return the ratio of each route.

        Args:
            step: number of steps before this one.
            num_forced: largest number of forced tokens in one sample of this step, over all ranks.
        """
        if self.off_last_steps and step >= self.total_steps - self.off_last_steps:
            return (0.0,) * len(self.routes)
        levels, active_steps = self._levels(), self.total_steps - (self.off_last_steps or 0)
        ratios = levels[min(step * len(levels) // active_steps, len(levels) - 1)]
        if self.force_keep_overflow != "grow":
            return ratios
        return tuple(grow_ratio(ratio, self.num_tokens, num_forced) for ratio in ratios)

    def routing(self, step: int, num_forced: int = 0, force_keep: torch.Tensor | None = None) -> Routing:
        """Return the Routing of a step. Arguments as in `ratios`; force_keep is (N, T) bool."""
        return Routing(self.ratios(step, num_forced), force_keep)

    def lengths(self, with_force_keep: bool) -> set[int]:
        """Return all sequence lengths of a training run: every K, and T outside the windows."""
        grows = with_force_keep and self.force_keep_overflow == "grow"
        levels = {ratio for ratios in self._levels() for ratio in ratios}
        ratios = {r for level in levels for r in (_buckets(level) if grows else (level,))} | {0.0}
        return {num_tokens_kept(self.num_tokens, ratio) for ratio in ratios}

    def describe(self, with_force_keep: bool) -> list[str]:
        """Describe the plan: one line per route and one for the schedule."""
        T, grows = self.num_tokens, with_force_keep and self.force_keep_overflow == "grow"
        lines = []
        for route in self.routes:
            num_bypassing = T - num_tokens_kept(T, route.selection_ratio)
            blocks = f"blocks {route.start_layer_idx} to {route.end_layer_idx}"
            fewer = ", fewer if masks force more to stay" if grows else ""
            lines.append(f"{num_bypassing} of {T} tokens bypass {blocks} while training{fewer}")
        if self.routes and (self.schedule != "constant" or self.off_last_steps):
            levels = " -> ".join(", ".join(f"{ratio:g}" for ratio in ratios) for ratios in self._levels())
            dense = f", then {self.off_last_steps} dense steps" if self.off_last_steps else ""
            lines.append(f"ratio {levels} over {self.total_steps - (self.off_last_steps or 0)} steps{dense}")
        return lines

    def num_forced_bypassed(self, force_keep: torch.Tensor, ratios: Sequence[float]) -> torch.Tensor:
        """Count the forced tokens (N, T) that do not fit into the windows; returns a 0-d tensor."""
        num_forced = force_keep.sum(dim=1)  # (N,)
        total = torch.zeros((), device=force_keep.device)
        for ratio in ratios:
            K = num_tokens_kept(self.num_tokens, ratio)
            total = total + (num_forced - K).clamp(min=0).sum()
        return total

    def _levels(self) -> list[tuple[float, ...]]:
        """Return the ratios of all routes at each level of the schedule, first to last."""
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
    """Return `selection_ratio`, or the largest of a few smaller ratios at which `num_forced` tokens fit.

    To use it in your own training loop, count the forced tokens of each sample where the data is loaded, take
    the maximum over all ranks, and pass the returned ratio to the network. The smallest ratio is 0, dense.

    Raises:
        ValueError: num_forced exceeds num_tokens.
    """
    if num_forced > num_tokens:
        raise ValueError(
            f"num_forced={num_forced} must be at most num_tokens={num_tokens}: count without the prefix"
        )
    return next(r for r in _buckets(selection_ratio) if num_tokens_kept(num_tokens, r) >= num_forced)


def _buckets(selection_ratio: float) -> list[float]:
    shrunk = [round(selection_ratio * (1 - i / NUM_BUCKETS), RATIO_DIGITS) for i in range(1, NUM_BUCKETS + 1)]
    return [selection_ratio, *shrunk]
