"""What the records of the twin study say: effects of one arm against another, seed by seed."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import numpy as np

from benchmarks import finetuning
from benchmarks.results import RESULTS, read_environment, read_results
from benchmarks.twins import CFG, LOSS, STUDIES, UNGUIDED
from training.arms import mean_and_half

CONFIRMED, REFUTED, OPEN, ABSENT = "confirmed", "refuted", "open", "not measured"
EXCESS = "excess loss"  # over that of the optimal denoiser
# Scores that are compared as a ratio; the others are shares, and compared as a difference.
RATIOS = (EXCESS, LOSS, "train_loss", "fd_pixel", "fd_classifier")
DISTANCES = {"digits": "fd_pixel", "glyphs": "fd_classifier"}
EVALUATION = ("arm", "seed", "step", "guidance")
MAX_GAP = 1.5  # between the costs of two evaluations: a curve is bent
BEST = "best"  # scale of classifier-free guidance, of those that were tried with every arm


class Effect(NamedTuple):
    """A mean over seeds, with its interval."""

    n: int
    value: float
    low: float
    high: float


class Finding(NamedTuple):
    """What one experiment says: in words, of how many, at which commits."""

    outcome: str
    text: str
    n: str = ""
    commits: tuple[str, ...] = ()


def effect_of(values: Sequence[float]) -> Effect:
    """Return mean and 95 % interval of values of different seeds."""
    middle, half = mean_and_half(values)
    return Effect(len(values), middle, middle - half, middle + half)


class Records:
    """The rows of the studies, by study, arm and seed.

    Args:
        folder: of the records.

    Raises:
        ValueError: two rows are of one evaluation: of two machines, or learning rates.
    """

    def __init__(self, folder: Path = RESULTS):
        self.folder, self.rows, self.step_ms, self.rehearsal = folder, {}, {}, False
        for name in STUDIES:
            files = sorted(folder.glob(f"twins_{name}_*.csv"))
            self.rehearsal |= any(read_environment(file)["tiny"] == "True" for file in files)
            rows = [row for file in files for row in read_results(file)]
            self.rows[name] = [row for row in rows if row.get("part") == "training"]
            evaluations = [tuple(row[key] for key in EVALUATION) for row in self.rows[name]]
            if len(set(evaluations)) < len(evaluations):
                twice = next(each for each in evaluations if evaluations.count(each) > 1)
                raise ValueError(f"{folder}: the records of {name} have twice {', '.join(twice)}")
        files = sorted(folder.glob("finetuning_twins_*.csv"))
        if len(files) > 1:
            raise ValueError(f"{folder}: fine-tunes of two machines, {files[0].name} and {files[1].name}")
        self.rehearsal |= any(read_environment(file)["tiny"] == "True" for file in files)
        self.finetuned = [row for file in files for row in read_results(file) if row.get("fd_pixel")]
        for file in sorted(folder.glob("twins_steps_*.csv")):
            self.step_ms |= {(row["setting"], row["arm"]): float(row["ms"]) for row in read_results(file)}

    def of(self, study: str, arm: str) -> list[dict[str, str]]:
        """Return the rows of an arm."""
        return [row for row in self.rows[study] if row["arm"] == arm]

    def curve(self, study: str, arm: str, key: str) -> dict[int, list[tuple[int, float, float]]]:
        """Return (step, gflop, score) of the unguided evaluations of each seed."""
        found: dict[int, list[tuple[int, float, float]]] = {}
        for row in self.of(study, arm):
            if row["guidance"] == UNGUIDED and (score := score_of(row, key)) is not None:
                point = (int(row["step"]), float(row["gflop"]), score)
                found.setdefault(int(row["seed"]), []).append(point)
        return {seed: sorted(points) for seed, points in sorted(found.items())}

    def final(self, study: str, arm: str, key: str, guidance: str = UNGUIDED) -> dict[int, float]:
        """Return the last score of each seed under a guidance, or BEST."""
        last: dict[str, dict[int, dict[str, str]]] = {}
        for row in sorted(self.of(study, arm), key=lambda row: int(row["step"])):
            last.setdefault(row["guidance"], {})[int(row["seed"])] = row
        if guidance == BEST:
            guidance = self.best_guidance(study, arm)
        found = {seed: score_of(row, key) for seed, row in sorted(last.get(guidance, {}).items())}
        return {seed: score for seed, score in found.items() if score is not None}

    def best_guidance(self, study: str, arm: str) -> str:
        """Return the scale of classifier-free guidance whose mean distance is lowest; BEST without any."""
        found: dict[str, list[float]] = {}
        for row in self.of(study, arm):
            if row["guidance"] in CFG:
                found.setdefault(row["guidance"], []).append(float(row[DISTANCES[study]]))
        return min(found, key=lambda guidance: mean(found[guidance]), default=BEST)

    def commits(self, study: str, arms: Sequence[str]) -> tuple[str, ...]:
        """Return where rows come from, shortened."""
        return tuple(dict.fromkeys(row["commit"][:7] for arm in arms for row in self.of(study, arm)))


def score_of(row: Mapping[str, str], key: str) -> float | None:
    """Return a score of a row; None where it has none."""
    if key == EXCESS:
        loss, best = row.get(LOSS), row.get("val_loss_optimal")
        return float(loss) - float(best) if loss and best else None
    return float(row[key]) if row.get(key) else None


@dataclass(frozen=True)
class Pair:
    """What an arm does to a score against another one, seed by seed.

    Args:
        lower: True where the claim is that the arm's score is lower.
        at: what both have had: steps, gflop or seconds, where a curve is read between its evaluations.
        guidance, other_guidance: of each arm; BEST: the best of those that were tried.
    """

    study: str
    arm: str
    other: str
    key: str
    lower: bool = True
    at: str = "steps"
    guidance: str = UNGUIDED
    other_guidance: str | None = None  # None: the same

    def changes(self, records: Records) -> dict[int, float]:
        """Return the change of each seed that both have: of a ratio its logarithm, else the difference."""
        if self.at == "steps":
            guided = ((self.arm, self.guidance), (self.other, self.other_guidance or self.guidance))
            found = [records.final(self.study, arm, self.key, guidance) for arm, guidance in guided]
        else:
            found = self._at_equal(records)
        own, other = found
        seeds = own.keys() & other.keys()
        change = (lambda a, b: math.log(a / b)) if self.key in RATIOS else (lambda a, b: a - b)
        return {seed: change(own[seed], other[seed]) for seed in sorted(seeds)}

    def _at_equal(self, records: Records) -> list[dict[int, float]]:
        """Return the scores of both when the one that has spent less has ended."""
        curves = [records.curve(self.study, arm, self.key) for arm in (self.arm, self.other)]
        if self.at == "seconds":
            steps = [records.step_ms.get((self.study, arm)) for arm in (self.arm, self.other)]
            if None in steps:
                return [{}, {}]
            spent = [lambda point, ms=ms: point[0] * ms / 1000 for ms in steps]
        else:
            spent = [lambda point: point[1]] * 2
        if not all(curves):
            return [{}, {}]
        end = min(
            max(cost(points[-1]) for points in curve.values())
            for curve, cost in zip(curves, spent, strict=True)
        )
        scored = [
            {seed: self._between([(cost(p), p[2]) for p in points], end) for seed, points in curve.items()}
            for curve, cost in zip(curves, spent, strict=True)
        ]
        return [{seed: score for seed, score in each.items() if score is not None} for each in scored]

    def _between(self, points: Sequence[tuple[float, float]], end: float) -> float | None:
        """Return a score at a cost, on a line in logarithms; None where no evaluations are near enough."""
        costs, scores = (np.array(each) for each in zip(*points, strict=True))
        if not costs[0] <= end <= costs[-1]:
            return None
        after = int(np.searchsorted(costs, end))
        if costs[after] != end and costs[after] > MAX_GAP * costs[after - 1]:
            return None
        if self.key not in RATIOS:
            return float(np.interp(math.log(end), np.log(costs), scores))
        return math.exp(np.interp(math.log(end), np.log(costs), np.log(scores)))

    def __call__(self, records: Records) -> Finding:
        changes = self.changes(records)
        name = f"{self.study}, {self.key}"
        name += "" if self.at == "steps" else f" at equal {self.at}"
        if self.guidance != UNGUIDED:
            chosen = (self.arm, self.guidance), (self.other, self.other_guidance or self.guidance)
            found = [records.best_guidance(self.study, arm) if g == BEST else g for arm, g in chosen]
            name += f" ({' against '.join(dict.fromkeys(g.replace('guidance=', '') for g in found))})"
        if not changes:
            return Finding(ABSENT, name)
        effect = effect_of([*changes.values()])
        outcome = outcome_of(effect, self.lower)
        commits = records.commits(self.study, (self.arm, self.other))
        return Finding(outcome, f"{name}: {shown(effect, self.key in RATIOS)}", str(effect.n), commits)


def outcome_of(effect: Effect, lower: bool) -> str:
    """Return what an interval says of the claim that the effect is below, or above, 0."""
    if effect.low <= 0 <= effect.high:
        return OPEN
    return CONFIRMED if (effect.value < 0) == lower else REFUTED


def shown(effect: Effect, is_ratio: bool) -> str:
    """Return an effect in words: of a ratio in percent, of a share in points of a hundred."""
    low, value, high = (
        100 * (math.expm1(x) if is_ratio else x) for x in (effect.low, effect.value, effect.high)
    )
    unit = "%" if is_ratio else "points"
    return f"{value:+.1f} {unit} [{low:+.1f}, {high:+.1f}]" if effect.n > 1 else f"{value:+.1f} {unit}"


@dataclass(frozen=True)
class Growth:
    """Whether the change that routing makes is larger in one pair of arms than in another."""

    larger: Pair
    smaller: Pair

    def __call__(self, records: Records) -> Finding:
        a, b = self.larger.changes(records), self.smaller.changes(records)
        name = f"{self.larger.study}, {self.larger.key}, {self.larger.arm} over {self.smaller.arm}"
        name += "" if self.larger.at == "steps" else f" at equal {self.larger.at}"
        if not a.keys() & b.keys():
            return Finding(ABSENT, name)
        effect = effect_of([a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())])
        commits = records.commits(self.larger.study, (self.larger.arm, self.smaller.arm))
        return Finding(outcome_of(effect, True), f"{name}: {shown(effect, True)}", str(effect.n), commits)


@dataclass(frozen=True)
class Finetuned:
    """What an arm of `benchmarks.finetuning` ends with against the dense one, in equal time, seed by seed."""

    kind: str
    arm: str
    key: str

    def __call__(self, records: Records) -> Finding:
        of_kind = [row for row in records.finetuned if row["kind"] == self.kind]
        rows = [row for row in of_kind if row["arm"] in (self.arm, "dense")]
        own, dense = (
            {row["seed"]: float(row[self.key]) for row in rows if row["arm"] == arm}
            for arm in (self.arm, "dense")
        )
        name = f"fine-tuned digits, {self.kind}, {self.arm}, {self.key} in equal time, at the rate of dense"
        rates = finetuning.LRS[self.kind]
        if any(float(row["lr"]) in (rates[0], rates[-1]) for row in rows):
            name += ", an end of those tried"
        if not own.keys() & dense.keys():
            return Finding(ABSENT, name)
        effect = effect_of([math.log(own[seed] / dense[seed]) for seed in sorted(own.keys() & dense.keys())])
        commits = tuple(dict.fromkeys(row["commit"][:7] for row in rows))
        return Finding(outcome_of(effect, True), f"{name}: {shown(effect, True)}", str(effect.n), commits)


@dataclass(frozen=True)
class Measured:
    """What a record of another program holds, each value of which must fulfil the claim.

    Args:
        value: of a row; None for a row that does not count.
        unit: follows the least and the most in words.
    """

    program: str
    value: Callable[[Mapping[str, str]], float | None]
    what: str
    holds: Callable[[float], bool]
    unit: str = ""
    n: str = ""  # where rows are not independent: what they are

    def __call__(self, records: Records) -> Finding:
        files = sorted(records.folder.glob(f"{self.program}_[A-Z]*.csv"))  # then comes the device
        found = [value for f in files for row in read_results(f) if (value := self.value(row)) is not None]
        if not found:
            return Finding(ABSENT, self.what)
        verdicts = {self.holds(value) for value in found}
        outcome = OPEN if len(verdicts) > 1 else CONFIRMED if verdicts == {True} else REFUTED
        commits = tuple(dict.fromkeys(read_environment(file)["commit"][:7] for file in files))
        text = f"{self.what}: {min(found):.2f} to {max(found):.2f}{self.unit}"
        return Finding(outcome, text, self.n or str(len(found)), commits)
