"""Differences of means over seeds, their intervals, and the seeds that would decide them."""

import math
from collections.abc import Sequence
from statistics import mean
from typing import NamedTuple

import numpy as np
from scipy import stats

MAX_SEEDS = 1000  # a larger number of seeds to decide is not stated
UNEQUAL = 0.05  # p of Bartlett's test below which spreads are not pooled


class Effect(NamedTuple):
    """A difference of means over n seeds with its 95 % interval and its p.

    Args:
        seeds: number of seeds per arm that would decide a difference of this size, up to MAX_SEEDS.
    """

    n: int
    value: float
    low: float = -math.inf
    high: float = math.inf
    p: float = 1.0
    seeds: int | None = None

    def format(self, is_ratio: bool) -> str:
        """Format the effect: a ratio in percent, a fraction in percentage points."""
        low, value, high = (
            100 * (math.expm1(x) if is_ratio and math.isfinite(x) else x)
            for x in (self.low, self.value, self.high)
        )
        interval = f" [{low:+.1f}, {high:+.1f}]" if math.isfinite(high) else ""
        return f"{value:+.1f} {'%' if is_ratio else 'points'}{interval}"


def effect_of(
    groups: Sequence[Sequence[float]], signs: Sequence[int], others: Sequence[Sequence[float]] = ()
) -> Effect:
    """Return the signed sum of group means, with its interval by Student's t.

    The spread is pooled over these and other groups unless Bartlett's test finds it unequal; then each group
    has its own, and degrees of freedom are Welch's.
    """
    value, n = sum(s * mean(g) for s, g in zip(signs, groups, strict=True)), min(map(len, groups))
    spread = [group for group in (*groups, *others) if len(group) > 1]
    if not spread:
        return Effect(n, value)
    variances = [float(np.var(group, ddof=1)) for group in spread]
    freedom = sum(len(group) - 1 for group in spread)
    pooled = sum(v * (len(g) - 1) for v, g in zip(variances, spread, strict=True)) / freedom
    constant = [variance < 1e-20 for variance in variances]  # Bartlett's test needs positive ones
    is_equal = len(spread) == 1 or all(constant)
    is_equal = is_equal or (not any(constant) and bool(stats.bartlett(*spread).pvalue >= UNEQUAL))
    if not is_equal:
        if n < 2:
            return Effect(n, value)
        own = [float(np.var(group, ddof=1)) for group in groups]
        parts = [v / len(group) for v, group in zip(own, groups, strict=True)]
        # Welch: df = (sum v_i / n_i)^2 / sum (v_i / n_i)^2 / (n_i - 1); for equal n_i, (n - 1) a_seed
        error, terms, variance = math.sqrt(sum(parts)), zip(parts, groups, strict=True), sum(own)
        freedom = sum(parts) ** 2 / sum(p**2 / (len(g) - 1) for p, g in terms) if error else 1
        a_seed = variance**2 / sum(v**2 for v in own) if error else len(groups)
    else:
        error, variance = math.sqrt(pooled * sum(1 / len(group) for group in groups)), pooled * len(groups)
        a_seed = len(groups)
    half = float(stats.t.ppf(0.975, freedom)) * error
    p = 2 * float(stats.t.sf(abs(value) / error, freedom)) if error else float(value == 0)
    seeds = seeds_to_decide(value, variance, a_seed)
    if seeds is not None and half >= abs(value):  # undecided by the present seeds
        seeds = max(seeds, 1 + max(map(len, groups)))
    return Effect(n, value, value - half, value + half, p, seeds)


def seeds_to_decide(value: float, variance: float, freedom: float) -> int | None:
    """Return the smallest n per group whose interval excludes 0; None: too many.

    Args:
        variance: of the value, times n.
        freedom: degrees of freedom that a seed adds.
    """
    # t((n - 1) freedom) sqrt(variance / n)
    sizes = np.arange(2, MAX_SEEDS + 1)
    halves = stats.t.ppf(0.975, freedom * (sizes - 1)) * np.sqrt(variance / sizes)
    enough = sizes[halves < abs(value)]
    return int(enough[0]) if len(enough) else None
