"""The records of twins and fine-tunes, and the function that compares two arms of them, seed by seed."""

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
EXCESS = "excess loss"  # over that of the optimal denoiser
# Scores that are compared as a ratio; the others are shares, and compared as a difference.
RATIOS = (EXCESS, LOSS, "train_loss", "fd_pixel", "fd_classifier", finetuning.LOSS)
DISTANCES = {"digits": "fd_pixel", "glyphs": "fd_classifier"}
EVALUATION = ("arm", "seed", "step", "guidance")
MAX_GAP = 1.5  # between the costs of two evaluations: a curve is bent
BEST = "best"  # scale of classifier-free guidance, of those that were tried with every arm
Point = tuple[int, float, float]  # step, gflop, score


class Effect(NamedTuple):
    """A mean over seeds, with its 95 % interval."""

    n: int
    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Effect":
        """Mean and interval of values of different seeds."""
        middle, half = mean_and_half(values)
        return cls(len(values), middle, middle - half, middle + half)

    def shown(self, is_ratio: bool) -> str:
        """In words: a ratio in percent, a share in points of a hundred."""
        low, value, high = (
            100 * (math.expm1(x) if is_ratio else x) for x in (self.low, self.value, self.high)
        )
        interval = f" [{low:+.1f}, {high:+.1f}]" if self.n > 1 else ""
        return f"{value:+.1f} {'%' if is_ratio else 'points'}{interval}"


class Records:
    """The rows of the studies, and of both kinds of fine-tunes, by study.

    Args:
        folders: of the records; none: those of the project.

    Raises:
        ValueError: two rows are of one evaluation: of two machines, or learning rates.
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
            if twice := next((each for each in evaluations if evaluations.count(each) > 1), None):
                raise ValueError(f"{self.folders[0]}: the records of {name} have twice {', '.join(twice)}")
        for file in self.files("twins_steps_*"):
            self.step_ms |= {(row["setting"], row["arm"]): float(row["ms"]) for row in read_results(file)}

    def files(self, pattern: str) -> list[Path]:
        """The records whose names fit."""
        return [file for folder in self.folders for file in sorted(folder.glob(f"{pattern}.csv"))]

    def _read(self, pattern: str) -> list[dict[str, str]]:
        self.rehearsal |= any(read_environment(file)["tiny"] == "True" for file in self.files(pattern))
        return [row for file in self.files(pattern) for row in read_results(file)]

    def of(self, study: str, arm: str) -> list[dict[str, str]]:
        """The rows of an arm, by step."""
        return sorted(
            (row for row in self.rows[study] if row["arm"] == arm), key=lambda row: int(row["step"])
        )

    def curve(self, study: str, arm: str, key: str) -> dict[int, list[Point]]:
        """The unguided evaluations of each seed."""
        found: dict[int, list[Point]] = {}
        for row in self.of(study, arm):
            if row["guidance"] == UNGUIDED and (score := score_of(row, key)) is not None:
                point = (int(row["step"]), float(row["gflop"]), score)
                found.setdefault(int(row["seed"]), []).append(point)
        return dict(sorted(found.items()))

    def final(self, study: str, arm: str, key: str, guidance: str = UNGUIDED) -> dict[int, float]:
        """The last score of each seed under a guidance, or BEST."""
        guidance = self.chosen_guidance(study, arm, guidance)
        last = {int(row["seed"]): row for row in self.of(study, arm) if row["guidance"] == guidance}
        found = {seed: score_of(row, key) for seed, row in sorted(last.items())}
        return {seed: score for seed, score in found.items() if score is not None}

    def chosen_guidance(self, study: str, arm: str, guidance: str) -> str:
        """A guidance; for BEST the scale whose mean distance is lowest, BEST without any."""
        if guidance != BEST:
            return guidance
        found: dict[str, list[float]] = {}
        for row in self.of(study, arm):
            if row["guidance"] in CFG:
                found.setdefault(row["guidance"], []).append(float(row[DISTANCES[study]]))
        return min(found, key=lambda guidance: mean(found[guidance]), default=BEST)

    def commits(self, study: str, arms: Sequence[str]) -> tuple[str, ...]:
        """Where rows come from, shortened."""
        rows = [row for arm in arms for row in self.rows[study] if row["arm"] == arm]
        return tuple(dict.fromkeys(row["commit"][:7] for row in rows))


def score_of(row: Mapping[str, str], key: str) -> float | None:
    """A score of a row; None where it has none."""
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
    """Change of a score from the second arm to the first: of a ratio its logarithm, else the difference.

    Args:
        at: what both have had: steps, gflop or seconds, where a curve is read between its evaluations.
        guidance: of each arm.

    Returns:
        The change of each seed that both have.
    """
    if at == "steps":
        scores = [records.final(study, arm, key, g) for arm, g in zip(arms, guidance, strict=True)]
    else:
        scores = _at_equal(records, study, key, arms, at)
    own, other = scores
    change = (lambda a, b: math.log(a / b)) if key in RATIOS else (lambda a, b: a - b)
    return {seed: change(own[seed], other[seed]) for seed in sorted(own.keys() & other.keys())}


def _at_equal(records: Records, study: str, key: str, arms: Sequence[str], at: str) -> list[dict[int, float]]:
    """Scores of both arms where the one that has spent less has ended."""
    curves = [records.curve(study, arm, key) for arm in arms]
    costs: list[Callable[[Point], float]] = [lambda point: point[1]] * 2
    if at == "seconds":
        steps_ms = [records.step_ms.get((study, arm)) for arm in arms]
        if None in steps_ms:
            return [{}, {}]
        costs = [lambda point, ms=ms: point[0] * ms / 1000 for ms in steps_ms]
    if not all(curves):
        return [{}, {}]
    spent = [
        {seed: [(cost(point), point[2]) for point in points] for seed, points in curve.items()}
        for curve, cost in zip(curves, costs, strict=True)
    ]
    end = min(max(points[-1][0] for points in each.values()) for each in spent)
    scores = [{seed: between(points, end, key) for seed, points in each.items()} for each in spent]
    return [{seed: score for seed, score in each.items() if score is not None} for each in scores]


def between(points: Sequence[tuple[float, float]], end: float, key: str) -> float | None:
    """A score at a cost, on a line in logarithms; None where no evaluations are near enough."""
    costs, scores = (np.array(each) for each in zip(*points, strict=True))
    if not costs[0] <= end <= costs[-1]:
        return None
    after = int(np.searchsorted(costs, end))
    if costs[after] != end and costs[after] > MAX_GAP * costs[after - 1]:
        return None
    if key not in RATIOS:
        return float(np.interp(math.log(end), np.log(costs), scores))
    return math.exp(np.interp(math.log(end), np.log(costs), np.log(scores)))
