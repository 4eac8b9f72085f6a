"""The records of twins and fine-tunes, and the comparison of two arms, seed by seed."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import numpy as np

from benchmarks import finetuning, results
from benchmarks.results import read_environment, read_results
from reports.runs import mean_and_half
from study.twins import CFG, LOSS, STUDIES, UNGUIDED

OURS = (Path(__file__).parent / "results", results.RESULTS)
EXCESS = "excess loss"  # loss minus the optimal denoiser's
# Scores that are compared as a ratio. The others are fractions and are compared as a difference.
RATIOS = (EXCESS, LOSS, "train_loss", "fd_pixel", "fd_classifier", finetuning.LOSS)
DISTANCES = {"digits": "fd_pixel", "glyphs": "fd_classifier"}
EVALUATION = ("arm", "seed", "step", "guidance")
MAX_GAP = 1.5  # largest ratio between the costs of two evaluations to interpolate, because curves are bent
BEST = "best"  # the best scale of classifier-free guidance
Point = tuple[int, float, float]  # step, gflop, score


class Effect(NamedTuple):
    """A mean over n seeds with its 95 % interval."""

    n: int
    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Effect":
        """Return the mean and interval of values from different seeds."""
        middle, half = mean_and_half(values)
        return cls(len(values), middle, middle - half, middle + half)

    def shown(self, is_ratio: bool) -> str:
        """Format the effect: a ratio in percent, a fraction in percentage points."""
        low, value, high = (
            100 * (math.expm1(x) if is_ratio else x) for x in (self.low, self.value, self.high)
        )
        interval = f" [{low:+.1f}, {high:+.1f}]" if self.n > 1 else ""
        return f"{value:+.1f} {'%' if is_ratio else 'points'}{interval}"


class Records:
    """The rows of the studies and of both kinds of fine-tunes, by study.

    Args:
        folders: folders with records; none given: the project's.

    Raises:
        ValueError: an evaluation has two rows, from two machines or learning rates.
    """

    def __init__(self, *folders: Path):
        self.folders, self.of_project = folders or OURS, not folders
        self.step_ms, self.rehearsal = {}, False
        self.rows = {
            name: [row for row in self._read(f"twins_{name}_*") if row.get("part") == "training"]
            for name in STUDIES
        }
        scored = [row for row in self._read("finetuning_twins_*") if row.get("fd_pixel")]
        for kind in finetuning.LRS:
            self.rows[kind] = [{**row, "guidance": UNGUIDED} for row in scored if row["kind"] == kind]
        for name, rows in self.rows.items():
            evaluations = [tuple(row[key] for key in EVALUATION) for row in rows]
            if duplicate := next((keys for keys in evaluations if evaluations.count(keys) > 1), None):
                raise ValueError(f"{self.folders[0]}: records of {name} contain {', '.join(duplicate)} twice")
        for file in self.files("twins_steps_*"):
            self.step_ms |= {(row["setting"], row["arm"]): float(row["ms"]) for row in read_results(file)}

    def files(self, pattern: str) -> list[Path]:
        """Return the records whose names match a pattern."""
        return [file for folder in self.folders for file in sorted(folder.glob(f"{pattern}.csv"))]

    def _read(self, pattern: str) -> list[dict[str, str]]:
        self.rehearsal |= any(read_environment(file)["tiny"] == "True" for file in self.files(pattern))
        return [row for file in self.files(pattern) for row in read_results(file)]

    def of(self, study: str, arm: str) -> list[dict[str, str]]:
        """Return the rows of an arm, sorted by step."""
        return sorted(
            (row for row in self.rows[study] if row["arm"] == arm), key=lambda row: int(row["step"])
        )

    def curve(self, study: str, arm: str, key: str) -> dict[int, list[Point]]:
        """Return the unguided evaluations of each seed."""
        points: dict[int, list[Point]] = {}
        for row in self.of(study, arm):
            if row["guidance"] == UNGUIDED and (score := score_of(row, key)) is not None:
                point = (int(row["step"]), float(row["gflop"]), score)
                points.setdefault(int(row["seed"]), []).append(point)
        return dict(sorted(points.items()))

    def final(self, study: str, arm: str, key: str, guidance: str = UNGUIDED) -> dict[int, float]:
        """Return the last score of each seed under a guidance or BEST."""
        guidance = self.chosen_guidance(study, arm, guidance)
        last = {int(row["seed"]): row for row in self.of(study, arm) if row["guidance"] == guidance}
        scores = {seed: score_of(row, key) for seed, row in sorted(last.items())}
        return {seed: score for seed, score in scores.items() if score is not None}

    def chosen_guidance(self, study: str, arm: str, guidance: str) -> str:
        """Resolve BEST to the scale with the lowest mean distance, and to BEST without records."""
        if guidance != BEST:
            return guidance
        distances: dict[str, list[float]] = {}
        for row in self.of(study, arm):
            if row["guidance"] in CFG:
                distances.setdefault(row["guidance"], []).append(float(row[DISTANCES[study]]))
        return min(distances, key=lambda guidance: mean(distances[guidance]), default=BEST)

    def commits(self, study: str, arms: Sequence[str]) -> tuple[str, ...]:
        """Return the short commits of the rows of some arms."""
        rows = [row for arm in arms for row in self.rows[study] if row["arm"] == arm]
        return tuple(dict.fromkeys(row["commit"][:7] for row in rows))


def score_of(row: Mapping[str, str], key: str) -> float | None:
    """Return a score of a row; None if the row does not have it."""
    if key == EXCESS:
        loss, best = row.get(LOSS), row.get("val_loss_optimal")
        return float(loss) - float(best) if loss and best else None
    return float(row[key]) if row.get(key) else None


def compare(
    records: Records,
    study: str,
    key: str,
    arms: Sequence[str],
    at: str = "steps",
    guidance: Sequence[str] = (UNGUIDED, UNGUIDED),
) -> dict[int, float]:
    """Return the change of a score from the second arm to the first, for each seed that both have.

    The change is the logarithm of the ratio for RATIOS, otherwise the difference.

    Args:
        at: the quantity that is equal in both arms: steps, gflop or seconds. Curves are interpolated.
        guidance: of each arm.
    """
    if at == "steps":
        scores = [records.final(study, arm, key, g) for arm, g in zip(arms, guidance, strict=True)]
    else:
        scores = _at_equal(records, study, key, arms, at)
    first, second = scores
    change = (lambda a, b: math.log(a / b)) if key in RATIOS else (lambda a, b: a - b)
    return {seed: change(first[seed], second[seed]) for seed in sorted(first.keys() & second.keys())}


def _at_equal(records: Records, study: str, key: str, arms: Sequence[str], at: str) -> list[dict[int, float]]:
    """Return the scores of both arms at the final cost of the cheaper one."""
    curves = [records.curve(study, arm, key) for arm in arms]
    costs: list[Callable[[Point], float]] = [lambda point: point[1]] * 2
    if at == "seconds":
        steps_ms = [records.step_ms.get((study, arm)) for arm in arms]
        if None in steps_ms:
            return [{}, {}]
        costs = [lambda point, ms=ms: point[0] * ms / 1000 for ms in steps_ms]
    if not all(curves):
        return [{}, {}]
    series = [
        {seed: [(cost(point), point[2]) for point in points] for seed, points in curve.items()}
        for curve, cost in zip(curves, costs, strict=True)
    ]
    end = min(max(points[-1][0] for points in seeds.values()) for seeds in series)
    scores = [{seed: between(points, end, key) for seed, points in seeds.items()} for seeds in series]
    return [{seed: score for seed, score in seeds.items() if score is not None} for seeds in scores]


def between(points: Sequence[tuple[float, float]], end: float, key: str) -> float | None:
    """Interpolate a score at a cost, linearly in logarithms; None if no evaluations are near enough."""
    costs, scores = (np.array(values) for values in zip(*points, strict=True))
    if not costs[0] <= end <= costs[-1]:
        return None
    after = int(np.searchsorted(costs, end))
    if costs[after] != end and costs[after] > MAX_GAP * costs[after - 1]:
        return None
    if key not in RATIOS:
        return float(np.interp(math.log(end), np.log(costs), scores))
    return math.exp(np.interp(math.log(end), np.log(costs), np.log(scores)))
