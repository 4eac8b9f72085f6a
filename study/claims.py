"""The scoreboard of claims: published claims about routing, compared with the records of this repository.

    python -m study.claims            write CLAIMS.md and assets/twins.png from the records of the project
    python -m study.claims FOLDER     write both to FOLDER, from the records of a study in FOLDER

The claims are rows of study/claims.yaml, which also has the texts of the page. They define effects, gates
and outcomes.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import yaml

from benchmarks.processes import program_parser
from benchmarks.results import markdown, read_environment, read_results, short_commit
from reports.effects import Effect, effect_of
from runtime.files import write_text
from runtime.provenance import PROJECT
from study.figure import draw
from study.records import DISTANCES, EXCESS, REAL, Records, compare, holm, is_ratio, score_of, twins_of
from study.twins import LOSS, METHODS, STUDIES, TWINS, UNGUIDED, search_losses, searches_by_rate

SEEN, OPPOSITE, UNDECIDED, UNTESTABLE = "seen", "opposite seen", "undecided", "not testable here"
MIXED = "mixed"
NOT_MEASURED = "not measured"
ALPHA, MIN_GAIN, MIN_PRECISION = 0.05, 0.3, 0.3  # of a claim; of gates b and c
SAMPLE_SCORES = (*DISTANCES, "label_accuracy", "precision", "recall")  # scores that gates b and c judge
SCORES = (LOSS, EXCESS, "sharpening", "train_loss", "memorised", "accuracy", "perplexity", *SAMPLE_SCORES)
ROUNDING = 1e-9  # smaller scores are printed as 0
FIGURE = "assets/twins.png"
STACKS, MIXTURE = "stacks-256", "mixture-64"


class Finding(NamedTuple):
    """The result of one test: its text, n, commits, and its effect or outcome."""

    text: str
    n: str = ""
    commits: tuple[str, ...] = ()
    effect: Effect | None = None
    higher: bool = False
    failed_gates: tuple[str, ...] = ()
    outcome: str = NOT_MEASURED


@dataclass(frozen=True)
class Comparison:
    """A comparison of two arms on studies, each by its scores; see study/claims.yaml."""

    arms: Sequence[str]
    scores: Mapping[str, str | Sequence[str]]
    higher: bool = False
    at: str = "end"
    guidance: Sequence[str] = (UNGUIDED, UNGUIDED)
    than: str | None = None  # another study, whose change is subtracted

    def pairs(self) -> list[tuple[str, str]]:
        """Return each study with each of its scores."""
        lists = {study: [keys] if isinstance(keys, str) else keys for study, keys in self.scores.items()}
        return [(study, key) for study, keys in lists.items() for key in keys]

    def findings(self, records: Records) -> list[Finding]:
        """Return a finding for each score of each study that has records."""
        return [f for study, key in self.pairs() if (f := self._finding(records, study, key))]

    def _finding(self, records: Records, study: str, key: str) -> Finding | None:
        effect = compare(records, study, key, self.arms, self.at, self.guidance, self.than)
        if effect is None:
            return None
        text = f"{study}, {key}, {' against '.join(self.arms[:2])}"
        text += f", minus {' against '.join(self.arms[2:])}" if self.arms[2:] else ""
        text += f", minus the same on {self.than}" if self.than else ""
        text += {"end": "", "best": ", best checkpoint", "gflop": ", equal FLOPs"}[self.at]
        if self.guidance[0] != UNGUIDED:
            settings = [
                records.resolve_guidance(study, a, g) for a, g in zip(self.arms, self.guidance, strict=False)
            ]
            text += f" ({' against '.join(dict.fromkeys(g.replace('guidance=', '') for g in settings))})"
        studies = (study, self.than) if self.than else (study,)
        gates = {gate for s in studies for gate, why in failed_gates(records, s, key).items() if why}
        commits = tuple(dict.fromkeys(commit for s in studies for commit in records.commits(s, self.arms)))
        text = f"{text}: {effect.format(is_ratio(key))}"
        return Finding(text, str(effect.n), commits, effect, self.higher, tuple(sorted(gates)))


@dataclass(frozen=True)
class Bound:
    """A bound on all values of another program's record; see study/claims.yaml."""

    record: str
    column: str
    name: str
    divided_by: str | None = None
    where: Mapping[str, Sequence[str]] = field(default_factory=dict)
    above: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    n: str = ""  # description of the rows if they are not independent

    def findings(self, records: Records) -> list[Finding]:
        """Return one finding for all values."""
        files = records.files(f"{self.record}_[A-Z]*")  # the device follows the name
        rows = [read_environment(file) | row for file in files for row in read_results(file)]
        rows = [row for row in rows if row.get(self.column)]
        rows = [row for row in rows if all(row[key] in values for key, values in self.where.items())]
        divided_by = [float(row[self.divided_by]) if self.divided_by else 1.0 for row in rows]
        numbers = [float(row[self.column]) / by for row, by in zip(rows, divided_by, strict=True)]
        if not numbers:
            return []
        bounds = ((operator.gt, self.above), (operator.ge, self.at_least), (operator.le, self.at_most))
        bounds = [(fits, bound) for fits, bound in bounds if bound is not None]
        verdicts = {all(fits(value, bound) for fits, bound in bounds) for value in numbers}
        outcome = MIXED if len(verdicts) > 1 else SEEN if verdicts == {True} else OPPOSITE
        text = f"{self.name}: {min(numbers):.2f} to {max(numbers):.2f}x"
        commits = tuple(dict.fromkeys(short_commit(row["commit"]) for row in rows))
        return [Finding(text, self.n or str(len(numbers)), commits, outcome=outcome)]


@dataclass(frozen=True)
class Claim:
    """A claim, its source, what was published, the tests here, and what would decide it at its own scale."""

    says: str
    source: str
    elsewhere: str
    published: str = ""
    tests: Sequence[Comparison | Bound] = ()

    @property
    def is_about_cost(self) -> bool:
        """True if measurements of this repository decide the claim."""
        return bool(self.tests) and all(isinstance(test, Bound) for test in self.tests)


@cache
def read_page() -> tuple[dict[str, str], list[Claim]]:
    """Read the texts and the claims of study/claims.yaml."""
    page = yaml.safe_load((Path(__file__).parent / "claims.yaml").read_text())
    for row in page["claims"]:
        row["tests"] = [(Bound if "record" in test else Comparison)(**test) for test in row.get("tests", ())]
    return page["texts"], [Claim(**row) for row in page["claims"]]


def failed_gates(records: Records, study: str, key: str) -> dict[str, str]:
    """Return the gates that judge a score, each with the reason why it fails; empty: it passes.

    (a) The dense arm's best checkpoint beats the best baseline without a network. (b) Guidance lowers the
    dense arm's distance by 30 %. (c) Its precision is at least 0.3 of real held-out data's. Of several dense
    arms, the worst one decides.
    """
    distance = records.distance(study)
    is_of_samples, loss_key = key in SAMPLE_SCORES, EXCESS if records.is_mixture(study) else LOSS
    gates = {"a": _gate_a(records, study, (distance or loss_key) if is_of_samples else loss_key)}
    if is_of_samples:
        gains, precisions = [], []
        for arm in _dense_arms(records, study):
            unguided, guided, precision = (
                [*records.scores(study, arm, name, guidance=guidance).values()]
                for name, guidance in ((distance, UNGUIDED), (distance, "best"), ("precision", UNGUIDED))
            )
            gains += [1 - mean(guided) / mean(unguided)] if guided and unguided else []
            precisions += [mean(precision)] if precision else []
        gain, real = min(gains, default=None), records.baselines_of(study).get(REAL[0], {}).get("precision")
        share = min(precisions) / float(real) if precisions and real else None
        change = "raises" if gain is not None and gain < 0 else "lowers"
        gates["b"] = _reason(f"guidance {change} the distance by", gain, MIN_GAIN)
        gates["c"] = _reason("precision over real data's:", share, MIN_PRECISION)
    return gates


def _gate_a(records: Records, study: str, key: str) -> str:
    rows = records.baselines_of(study)
    scores = {name: score for name, row in rows.items() if name not in REAL and (score := score_of(row, key))}
    by_arm = [
        records.scores(study, arm, key, "best") or records.scores(study, arm, key)
        for arm in _dense_arms(records, study)
    ]
    dense = [mean(values.values()) for values in by_arm if values]
    if not scores or not dense:
        return NOT_MEASURED
    name = min(scores, key=scores.get)
    return "" if max(dense) < scores[name] else f"{key} {max(dense):.3g}, {name} {scores[name]:.3g}"


def _dense_arms(records: Records, study: str) -> list[str]:
    """Return the dense arm; without it the dense arms of depth, width and captions."""
    arms = records.arms(study)
    return ["dense"] if "dense" in arms else [arm for arm in arms if arm.startswith("dense, ")]


def _reason(text: str, value: float | None, least: float) -> str:
    if value is None:
        return NOT_MEASURED
    return "" if value >= least else f"{text} {100 * abs(value):.0f} %"


def judge(tests: Sequence[Comparison | Bound], records: Records) -> tuple[str, list[Finding]]:
    """Return the outcome of a claim and its findings, with p values adjusted for multiple tests."""
    findings = [finding for test in tests for finding in test.findings(records)]
    # One seed has no interval, and is no test that Holm's method could count.
    testable = [f for f in findings if f.effect and math.isfinite(f.effect.high) and not f.failed_gates]
    adjusted = iter(holm([f.effect.p for f in testable]))
    decided = []
    for f in findings:
        outcome = f.outcome
        if f.failed_gates:
            outcome = f"{UNTESTABLE} (gate {', '.join(f.failed_gates)})"
        elif f.effect and f not in testable:
            outcome = UNDECIDED
        elif f.effect:
            as_claimed = (f.effect.value > 0) == f.higher
            outcome = (SEEN if as_claimed else OPPOSITE) if next(adjusted) < ALPHA else UNDECIDED
        decided.append(f._replace(outcome=outcome))
    if not findings:
        return NOT_MEASURED if tests else UNTESTABLE, []
    outcomes = {f.outcome for f in decided}
    if MIXED in outcomes or {SEEN, OPPOSITE} <= outcomes:
        return MIXED, decided
    if len({SEEN, OPPOSITE} & outcomes) == 1:
        return ({SEEN, OPPOSITE} & outcomes).pop(), decided
    tested = [f.outcome for f in decided if not f.failed_gates]
    return UNDECIDED if tested else decided[0].outcome, decided


def format_finding(finding: Finding) -> str:
    """Format a finding; an undecided one says how many seeds would decide it."""
    text = f"{finding.text}, n = {finding.n}: {finding.outcome}"
    if finding.effect and finding.effect.n > 1 and finding.outcome == UNDECIDED:
        seeds = finding.effect.seeds
        text += f", would need {f'{seeds} seeds' if seeds else 'over 1,000 seeds'}"
    return text


def scoreboard(records: Records, about_cost: bool) -> str:
    """Return a table of claims. For a folder other than the project's, list only claims with records."""
    rows = []
    for claim in read_page()[1]:
        if claim.is_about_cost != about_cost:
            continue
        outcome, findings = judge(claim.tests, records)
        if not findings and not records.of_project:
            continue
        row = {"claim": claim.says, "source": claim.source, "published": claim.published, "here": outcome}
        row["effect [95 % interval], n"] = "<br>".join(map(format_finding, findings))
        row["commit"] = ", ".join(dict.fromkeys(commit for f in findings for commit in f.commits))
        rows.append(row | {"experiment that would decide it": claim.elsewhere})
    if not rows:
        return "These records test no claim."
    return markdown(rows, everything=True, text=True)


def gates_table(records: Records) -> str:
    """Return a table of the gates of each study."""
    rows = []
    for study in records.rows:
        if records.rows[study]:
            key = records.distance(study)
            of_samples = failed_gates(records, study, key) if key else dict.fromkeys("abc", "-")
            row = {"task": study, "a, losses": failed_gates(records, study, LOSS)["a"]}
            row |= {"a, samples": of_samples["a"], "b": of_samples["b"], "c": of_samples["c"]}
            rows.append({k: v or "passed" for k, v in row.items()})
    return markdown(rows, text=True) if rows else ""


def searches_table(records: Records) -> str:
    """Return a table of the mean held-out loss of each learning rate of each search; the lowest is bold."""
    rows = []
    for study, searches in records.searches.items():
        for arm in dict.fromkeys(row["arm"] for row in searches):
            losses = search_losses(searches, arm)
            best = min(losses, key=losses.get)
            n = min(map(len, searches_by_rate(searches, arm).values()))
            cells = {f"{lr:g}": f"**{v:.4f}**" if lr == best else f"{v:.4f}" for lr, v in losses.items()}
            rows.append({"task": study, "arm": arm, "n": n, **cells})
    rates = sorted({key for row in rows for key in row} - {"task", "arm", "n"}, key=float)
    return markdown(rows, dict.fromkeys(["task", "arm", "n", *rates], "{}")) if rows else ""


def base_of(records: Records, study: str, arm: str) -> str:
    """Return the dense arm of the same change, or of the same backbone."""
    name, _, change = arm.partition(", ")
    if study == "backbones":
        return f"{name}, dense" if change == "tread" else "dense"
    return f"dense, {change}" if f"dense, {change}" in records.arms(study) else "dense"


def arms_table(records: Records, study: str) -> str:
    """Return a table of baselines and of all arms: means over seeds and half of their intervals."""
    keys = [key for key in SCORES if any(row.get(key) for row in records.rows[study])]
    keys = [EXCESS, *keys] if records.is_mixture(study) and EXCESS not in keys else keys
    columns = [(key, at, UNGUIDED) for key in keys for at in ("end", "best")]
    key = records.distance(study) or (EXCESS if records.is_mixture(study) else keys[0])
    columns += [(key, "end", "best")] if key in DISTANCES else []
    rows: list[dict[str, Any]] = []
    for name, baseline in records.baselines_of(study).items():
        scores = {key: score for key in keys if (score := score_of(baseline, key)) is not None}
        cells = {key: f"{score if abs(score) > ROUNDING else 0:.4g}" for key, score in scores.items()}
        rows += [{"arm": f"*{name}*", **cells}] if cells else []
    for arm in records.arms(study):
        last = records.rows_of(study, arm)[-1]
        row = {"arm": arm, "lr": last.get("lr", ""), "steps": last["step"]}
        row |= {"TFLOP": f"{float(last['gflop']) / 1e3:.3g}"} if last.get("gflop") else {}
        for name, at, guidance in columns:
            scores = [*records.scores(study, arm, name, at, guidance).values()]
            if not scores or (at == "best" and study not in STUDIES):
                continue
            label = ", best checkpoint" if at == "best" else ""
            label += "" if guidance == UNGUIDED else ", best guidance"
            effect = effect_of([scores], (1,))
            half = f" ± {effect.high - effect.value:.1g}" if effect.n > 1 else ""
            row |= {"n": effect.n, name + label: f"{effect.value:.4g}{half}"}
        base = base_of(records, study, arm)
        if base != arm and (effect := compare(records, study, key, (arm, base))):
            row[f"{key} over dense"] = effect.format(is_ratio(key))
        rows.append(row)
    order = ["arm", "lr", "steps", "TFLOP", "n", *dict.fromkeys(key for row in rows for key in row)]
    return markdown(rows, dict.fromkeys(order, "{}"))


def stacks_table(records: Records) -> str:
    """Return a table of what each method changes with and without routes, in losses and distances."""
    rows: list[dict[str, Any]] = []
    for name in ("", *METHODS, "REPA kept", "REPA delayed"):
        dense, routed = (f"{twin}, {name}".removesuffix(", ") for twin in TWINS)
        base = dense if dense in STUDIES[STACKS].arms else "dense, REPA"
        row: dict[str, Any] = {"method": name or "routes alone", "n": 0}
        for key, label in ((LOSS, "loss"), (records.distance(STACKS) or "", "distance")):
            guidance = "best" if name in ("internal", "post hoc") and label == "distance" else UNGUIDED
            arms = {"dense": (dense, "dense"), "routed": (routed, "routed" if name else "dense")}
            arms |= {"routed - dense": (routed, "routed", base, "dense")}
            for column, pair in arms.items():
                is_change = name or column == "routed"  # the others would compare an arm with itself
                effect = is_change and compare(records, STACKS, key, pair, "end", (guidance, UNGUIDED))
                row[f"{label}, {column}"] = effect.format(is_ratio(key)) if effect else ""
                row["n"] = max(row["n"], effect.n if effect else 0)
        effect = compare(records, STACKS, LOSS, (routed, base), "gflop")
        row["loss, routed against dense, equal FLOPs"] = effect.format(True) if effect else ""
        rows.append(row)
    return markdown(rows, text=True)


def when_table(records: Records) -> str:
    """Return a table of routed against dense networks: for each study, at equal steps and at equal FLOPs."""
    rows = []
    for study in (name for name in STUDIES if records.rows[name]):
        key = EXCESS if records.is_mixture(study) else LOSS
        effects = {"equal steps": (key, "end"), "equal FLOPs": (key, "gflop")}
        effects |= {"FLOPs to the same loss": (key, "score")}
        for twins in twins_of(records, study)[: 1 if study == STACKS else None]:
            steps = int(records.rows_of(study, twins[0])[-1]["step"])
            row = {"task": study, "variant": twins[0].partition(", ")[2], "steps": f"{steps:,}"}
            costs = records.costs_of_equal_scores(study, key, twins)
            same = {"same loss after": f"{max(costs):,} steps"} if costs else {}
            rows.append(row | effects_row(records, study, twins, effects) | same)
    return markdown(rows, text=True)


def mechanism_table(records: Records) -> str:
    """Return a table of the arms of the mixture against the dense one."""
    keys = dict.fromkeys(key for row in records.rows[MIXTURE] for key in row if key.startswith(f"{EXCESS}/"))
    columns = {"excess": (EXCESS, "end"), "excess, equal FLOPs": (EXCESS, "gflop")}
    columns |= {"FLOPs to the same excess": (EXCESS, "score")}
    columns |= {key.removeprefix(f"{EXCESS}/"): (key, "end") for key in keys}
    columns |= {key: (key, "end") for key in ("sharpening", "perplexity")}
    arms = [arm for arm in records.arms(MIXTURE) if arm != "dense"]
    rows = [{"arm": arm} | effects_row(records, MIXTURE, (arm, "dense"), columns) for arm in arms]
    return markdown(rows, text=True)


def effects_row(
    records: Records, study: str, arms: Sequence[str], columns: Mapping[str, tuple[str, str]]
) -> dict[str, Any]:
    """Compare two arms: n, the ratio of the FLOPs of their steps, and an effect for each column.

    Args:
        columns: name -> score, and `at` of `compare`.
    """
    curves = [records.curve(study, arm, EXCESS if records.is_mixture(study) else LOSS) for arm in arms]
    steps = [[p[1] / p[0] for points in curve.values() for p in points] for curve in curves]
    row: dict[str, Any] = {"n": ""}
    row |= {"FLOPs of a step": f"{max(steps[0]) / max(steps[1]):.2f}x"} if all(steps) else {}
    for column, (key, at) in columns.items():
        if effect := compare(records, study, key, arms, at):
            row |= {column: effect.format(is_ratio(key)), "n": row["n"] or effect.n}
    return row


def page(records: Records) -> str:
    """Return the text of CLAIMS.md."""
    texts, claims = read_page()
    effects = [f.effect for claim in claims for f in judge(claim.tests, records)[1] if f.effect]
    intervals = sum(math.isfinite(effect.high) for effect in effects)
    ours = "`study/results/` and `benchmarks/results/`"
    head = texts["head"].format(records=ours if records.of_project else "this folder", intervals=intervals)
    when = when_table(records)
    figure = f"![{texts['figure']}]({FIGURE})" if when else ""
    parts = [head, texts["rehearsal"] if records.rehearsal else "", texts["cost"], scoreboard(records, True)]
    parts += [texts["open"], scoreboard(records, False)]
    parts += [texts["when"], figure, when] if when else []
    parts += [texts["mechanism"], mechanism_table(records)] if len(records.arms(MIXTURE)) > 1 else []
    parts += [texts["stacks"], stacks_table(records)] if records.rows[STACKS] else []
    parts += [texts["gates"], gates_table(records)]
    parts += [texts["searches"], searches_table(records), texts["arms"]]
    parts += [f"## {name}\n\n{arms_table(records, name)}" for name, rows in records.rows.items() if rows]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def main() -> None:
    """Write the page and the figure."""
    parser = program_parser("study.claims", __doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="folder with records (default: the project's)")
    folder = parser.parse_args().folder
    if folder and not folder.is_dir():
        parser.error(f"{folder} is not a folder with records")
    records, out = (Records(folder), folder) if folder else (Records(), PROJECT)
    (out / "assets").mkdir(exist_ok=True)
    text = page(records)
    write_text(out / "CLAIMS.md", text)
    draw(records, out / FIGURE, text)
    print(scoreboard(records, False))
    print(f"written: {out / 'CLAIMS.md'}")


if __name__ == "__main__":
    main()
