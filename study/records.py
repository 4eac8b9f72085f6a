"""The records of twins, fine-tunes and baselines, and the comparison of arms."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean

import numpy as np

from benchmarks import results
from benchmarks.results import read_environment, read_results, short_commit
from reports.effects import Effect, effect_of
from study.baselines import SAME_DATA
from study.twins import LOSS, STUDIES, UNGUIDED

OURS = (Path(__file__).parent / "results", results.RESULTS)
# Studies that exist only as records: an earlier program trained their arms (commits in the records).
EARLIER = ("digits", "mixture", "glyphs", "depth", "width", "backbones", "full", "lora")
REAL = ("real held-out", "real training")  # baselines of real images
EXCESS = "excess"  # weighted squared distance to the optimal denoiser
# Scores that are compared as a ratio. The others are fractions and are compared as a difference.
DISTANCES = ("fd_pixel_held_out", "fd_classifier_held_out", "fd_cells_held_out")
DISTANCES += ("fd_pixel", "fd_classifier", "fd_cells")
RATIOS = (EXCESS, LOSS, "perplexity", "train_loss", *DISTANCES, "val_loss_dense")
EVALUATION = ("arm", "seed", "step", "guidance", "noise")
ROUNDING = 1e-3  # of costs that count as equal
MAX_GAP = 1.5  # largest ratio between the costs of two evaluations to interpolate, because curves are bent
Point = tuple[int, float, float]  # step, gflop, score
Scores = dict[int, float]  # seed -> score


def holm(values: Sequence[float]) -> list[float]:
    """Return p values adjusted for multiple tests by Holm's method."""
    adjusted, largest = [0.0] * len(values), 0.0
    for rank, i in enumerate(np.argsort(values, kind="stable").tolist()):
        largest = max(largest, min(1.0, (len(values) - rank) * values[i]))
        adjusted[i] = largest
    return adjusted


class Records:
    """The rows of the studies and of fine-tunes, by study, and the scores of baselines.

    Args:
        folders: folders with records; none given: the project's.

    Raises:
        ValueError: an evaluation has two rows, from two machines or learning rates.
    """

    def __init__(self, *folders: Path):
        self.folders, self.of_project = folders or OURS, not folders
        self.rehearsal = False
        recorded = {name: self._read(f"twins_{name}_*") for name in (*STUDIES, *EARLIER[:5])}
        finetunes = [row for row in self._read("finetuning_twins_*") if row.get("fd_pixel")]
        recorded |= {kind: [row for row in finetunes if row["kind"] == kind] for kind in EARLIER[-2:]}
        backbones = [{**row, "part": "training", "step": row["steps"]} for row in self._read("arms_*")]
        recorded["backbones"] = backbones
        self.searches = {n: [r for r in rows if r.get("part") == "search"] for n, rows in recorded.items()}
        self.rows = {
            name: [{"guidance": UNGUIDED, **row} for row in rows if row.get("part") == "training"]
            for name, rows in recorded.items()
        }
        for name, rows in self.rows.items():
            evaluations = [tuple(row.get(key) or "" for key in EVALUATION) for row in rows]
            if duplicate := next((keys for keys in evaluations if evaluations.count(keys) > 1), None):
                raise ValueError(f"{self.folders[0]}: records of {name} contain {', '.join(duplicate)} twice")
        self.baselines: dict[str, dict[str, Mapping[str, str]]] = {}
        for row in self._read("baselines_*"):
            self.baselines.setdefault(row["setting"], {})[row["baseline"]] = row

    def files(self, pattern: str) -> list[Path]:
        """Return the records whose names match a pattern."""
        return [file for folder in self.folders for file in sorted(folder.glob(f"{pattern}.csv"))]

    def _read(self, pattern: str) -> list[dict[str, str]]:
        rows = []
        for file in self.files(pattern):
            header = read_environment(file)
            self.rehearsal |= header["tiny"] == "True"
            rows += [{"commit": header.get("commit", ""), **row} for row in read_results(file)]
        return rows

    def arms(self, study: str) -> list[str]:
        """Return the recorded arms, in the order of the study, with changed arms last."""
        recorded = dict.fromkeys(row["arm"] for row in self.rows[study])
        planned = STUDIES[study].arms if study in STUDIES else ()
        return [*(arm for arm in planned if arm in recorded), *(a for a in recorded if a not in planned)]

    def rows_of(self, study: str, arm: str) -> list[dict[str, str]]:
        """Return the rows of an arm, sorted by step."""
        rows = [row for row in self.rows[study] if row["arm"] == arm]
        return sorted(rows, key=lambda row: int(row["step"]))

    def curve(self, study: str, arm: str, key: str, guidance: str = UNGUIDED) -> dict[int, list[Point]]:
        """Return the evaluations of each seed, as means over sets of noise."""
        by_seed: dict[int, dict[int, tuple[float, list[float]]]] = {}
        for row in self.rows_of(study, arm):
            if row["guidance"] == guidance and (score := score_of(row, key)) is not None:
                gflop = float(row.get("gflop") or 0)
                steps = by_seed.setdefault(int(row["seed"]), {})
                steps.setdefault(int(row["step"]), (gflop, []))[1].append(score)
        return {
            seed: [(step, gflop, mean(scores)) for step, (gflop, scores) in sorted(steps.items())]
            for seed, steps in sorted(by_seed.items())
        }

    def costs_of_equal_scores(self, study: str, key: str, arms: Sequence[str]) -> dict[int, list[float]]:
        """Return log(cost of the first arm / cost of the second) at equal scores, for each seed.

        The keys are steps of the first arm, whose score the second arm reaches at another step. Steps without
        all seeds, and steps that do not lower the score further, are left out.
        """
        first, second = (self.curve(study, arm, key) for arm in arms)
        seeds, changes = sorted(first.keys() & second.keys()), {}
        for seed in seeds:
            best = math.inf
            for step, gflop, score in first[seed]:
                if score < best and (cost := cost_to_reach(second[seed], score)):
                    changes.setdefault(step, []).append(math.log(gflop / cost))
                best = min(best, score)
        return {step: values for step, values in sorted(changes.items()) if len(values) == len(seeds)}

    def scores(self, study: str, arm: str, key: str, at: str = "end", guidance: str = UNGUIDED) -> Scores:
        """Return the score of each seed at its last evaluation (`end`) or lowest held-out loss (`best`)."""
        curve = self.curve(study, arm, key, self.resolve_guidance(study, arm, guidance))
        if at == "end":
            return {seed: points[-1][2] for seed, points in curve.items()}
        losses = self.curve(study, arm, EXCESS if self.is_mixture(study) else LOSS)
        lowest = {seed: min(points, key=lambda point: point[2])[0] for seed, points in losses.items()}
        by_step = {seed: {step: score for step, _, score in points} for seed, points in curve.items()}
        return {seed: scores[lowest[seed]] for seed, scores in by_step.items() if lowest.get(seed) in scores}

    def baselines_of(self, study: str) -> Mapping[str, Mapping[str, str]]:
        """Return the rows of a study's baselines, by name."""
        return self.baselines.get(SAME_DATA.get(study, study), {})

    def is_mixture(self, study: str) -> bool:
        """True if the optimal denoiser of the study's data is known."""
        return any(score_of(row, EXCESS) is not None for row in self.rows[study])

    def distance(self, study: str) -> str | None:
        """Return the key of the study's distance, to held-out data if it is recorded; None without one."""
        return next((key for key in DISTANCES if any(row.get(key) for row in self.rows[study])), None)

    def resolve_guidance(self, study: str, arm: str, guidance: str) -> str:
        """Resolve `best` to the scale with the lowest mean distance, and to `best` without records."""
        if guidance != "best":
            return guidance
        key, scores = self.distance(study), {}
        settings = dict.fromkeys(row["guidance"] for row in self.rows[study] if key)
        # Scales of guidance, and widths of averages.
        for scale in (s for s in settings if any(name in s for name in ("cfg", "internal", "std"))):
            if values := self.scores(study, arm, key, guidance=scale):
                scores[scale] = mean(values.values())
        return min(scores, key=scores.get, default="best")

    def commits(self, study: str, arms: Sequence[str]) -> tuple[str, ...]:
        """Return the short commits of the rows of some arms."""
        rows = [row for arm in arms for row in self.rows[study] if row["arm"] == arm]
        return tuple(dict.fromkeys(short_commit(row["commit"]) for row in rows))


def twins_of(records: Records, study: str) -> list[tuple[str, str]]:
    """Return the pairs of a routed and a dense arm that differ in routes alone."""
    arms = records.arms(study)
    pairs = ((arm, arm.replace("routed", "dense", 1)) for arm in arms if arm.startswith("routed"))
    return [pair for pair in pairs if pair[1] in arms]


def score_of(row: Mapping[str, str], key: str) -> float | None:
    """Return a score of a row; None if the row does not have it."""
    if key == EXCESS and not row.get(EXCESS):  # of earlier records: the loss minus the optimal denoiser's
        loss, best = row.get(LOSS), row.get("val_loss_optimal")
        return float(loss) - float(best) if loss and best else None
    return float(row[key]) if row.get(key) else None


def is_ratio(key: str) -> bool:
    """True if a score, such as `excess` or `excess/t=0.3`, is compared as a ratio."""
    return key.partition("/")[0] in RATIOS


def scaled(scores: Scores, key: str) -> Scores:
    """Return scores on the scale on which they are compared: the logarithm of RATIOS."""
    return {seed: math.log(score) if is_ratio(key) else score for seed, score in scores.items()}


def compare(
    records: Records,
    study: str,
    key: str,
    arms: Sequence[str],
    at: str = "end",
    guidance: Sequence[str] = (UNGUIDED, UNGUIDED),
    than: str | None = None,
) -> Effect | None:
    """Return the change of a score from the second arm to the first; None without records.

    Args:
        arms: two; or four, for the change from the second to the first minus the one from the fourth to the
            third.
        at: `end` or `best` (see `Records.scores`); `gflop`: at equal cost; `score`: the cost instead of the
            score, at equal scores (see `costs_of_equal_scores`).
        guidance: of the first and of the second arm of each two.
        than: another study, whose change is subtracted.

    At equal cost or scores, and if one arm is compared with itself under other guidance, seeds are paired.
    """
    groups, signs = changes_of(records, study, key, arms, at, guidance)
    if than is not None:
        subtracted, other_signs = changes_of(records, than, key, arms, at, guidance)
        groups = [*groups, *subtracted] if groups and subtracted else []
        signs = (*signs, *(-sign for sign in other_signs))
    if not groups:
        return None
    if len(groups) == 1 or than is not None:
        return effect_of(groups, signs)
    others = [scaled(records.scores(study, a, key, at), key) for a in records.arms(study) if a not in arms]
    others = [[*scores.values()] for scores in others if {*guidance} == {UNGUIDED}]
    return effect_of(groups, signs, others)


def changes_of(
    records: Records, study: str, key: str, arms: Sequence[str], at: str, guidance: Sequence[str]
) -> tuple[list[list[float]], tuple[int, ...]]:
    """Return groups of scores and their signs, see `compare`: one group of changes if scores are paired."""
    signs = (1, -1, -1, 1)[: len(arms)]
    if at == "score":
        changes = [*records.costs_of_equal_scores(study, key, arms).values()]
        return (changes[-1:], (1,)) if changes else ([], ())
    if at == "gflop":
        scores = at_equal_cost(records, study, key, arms)
    else:
        pairs = zip(arms, (*guidance, *guidance)[: len(arms)], strict=True)
        scores = [records.scores(study, arm, key, at, g) for arm, g in pairs]
    groups = [scaled(arm_scores, key) for arm_scores in scores]
    if not all(groups):
        return [], ()
    if at == "gflop" or arms[0] == arms[1]:
        seeds = sorted(set.intersection(*({*scores} for scores in groups)))
        changes = [sum(s * scores[seed] for s, scores in zip(signs, groups, strict=True)) for seed in seeds]
        return ([changes], (1,)) if changes else ([], ())
    return [[*scores.values()] for scores in groups], signs


def at_equal_cost(records: Records, study: str, key: str, arms: Sequence[str]) -> list[Scores]:
    """Return the scores of arms at the final cost of the cheapest. Curves are interpolated."""
    curves = [records.curve(study, arm, key) for arm in arms]
    if not all(curves):
        return [{}]
    series = [{seed: [point[1:] for point in points] for seed, points in c.items()} for c in curves]
    end = min(max(points[-1][0] for points in seeds.values()) for seeds in series)
    scores = [{seed: interpolate(points, end, key) for seed, points in seeds.items()} for seeds in series]
    return [{seed: score for seed, score in seeds.items() if score is not None} for seeds in scores]


def interpolate(points: Sequence[tuple[float, float]], cost: float, key: str) -> float | None:
    """Interpolate a score at a cost, linearly in logarithms; None if no evaluations are near enough."""
    costs, scores = (np.array(values) for values in zip(*points, strict=True))
    if not costs[0] * (1 - ROUNDING) <= cost <= costs[-1] * (1 + ROUNDING):
        return None
    cost = float(np.clip(cost, costs[0], costs[-1]))
    after = int(np.searchsorted(costs, cost))
    if costs[after] != cost and costs[after] > MAX_GAP * costs[after - 1]:
        return None
    if not is_ratio(key):
        return float(np.interp(math.log(cost), np.log(costs), scores))
    return math.exp(np.interp(math.log(cost), np.log(costs), np.log(scores)))


def cost_to_reach(points: Sequence[Point], score: float) -> float | None:
    """Interpolate the cost at which a curve first falls to a score, linearly in logarithms.

    None: it does not, or the evaluations around it are too far apart.
    """
    for (_, before, higher), (_, after, lower) in pairwise(points):
        if lower <= score < higher:
            share = math.log(higher / score) / math.log(higher / lower)
            return before * (after / before) ** share if after <= MAX_GAP * before else None
    return None
