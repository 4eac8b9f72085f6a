"""The scoreboard of claims: published claims about routing, compared with the records of this repository.

    python -m study.claims            write CLAIMS.md and assets/twins.png from the records of the project
    python -m study.claims FOLDER     write both to FOLDER, from the records of a study in FOLDER

The claims are rows of study/claims.yaml. The text of the page (HEAD) defines effects and outcomes.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml

from benchmarks import finetuning
from benchmarks.processes import program_parser
from benchmarks.results import markdown, read_environment, read_results
from runtime.files import atomic_write, write_text
from runtime.provenance import PROJECT
from study.records import BEST, DISTANCES, EXCESS, RATIOS, Effect, Records, compare
from study.twins import ARMS, LOSS, LRS, STUDIES, UNGUIDED

CONFIRMED, REFUTED, OPEN, ABSENT = "confirmed", "refuted", "open", "not measured"
UNTESTED = "cannot be tested at this scale"
SCORES = (EXCESS, LOSS, "train_loss", *DISTANCES.values(), "label_accuracy", "precision", "recall")
FIGURE_ARMS = {"dense": "#4c72b0", "routed": "#dd8452", "no removal": "#55a868"}


class Finding(NamedTuple):
    """The outcome of one experiment, with its text, n and commits."""

    outcome: str
    text: str
    n: str = ""
    commits: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """A comparison of two arms on studies, each by its scores; see study/claims.yaml."""

    arms: Sequence[str]
    scores: Mapping[str, str | Sequence[str]]
    over: Sequence[str] | None = None
    higher: bool = False
    at: str = "steps"
    guidance: Sequence[str] = (UNGUIDED, UNGUIDED)
    name: str = "{study}, {key}"

    def pairs(self) -> list[tuple[str, str]]:
        """Return each study with each of its scores."""
        return [(study, key) for study, keys in self.scores.items() for key in np.atleast_1d(keys).tolist()]

    def findings(self, records: Records) -> list[Finding]:
        """Return a finding for each score of each study."""
        return [self._finding(records, study, key) for study, key in self.pairs()]

    def _finding(self, records: Records, study: str, key: str) -> Finding:
        arms, text = self.arms, self.name
        changes = compare(records, study, key, self.arms, self.at, self.guidance)
        if self.over:  # the difference between two changes
            before = compare(records, study, key, self.over, self.at, self.guidance)
            changes = {seed: changes[seed] - before[seed] for seed in changes.keys() & before.keys()}
            arms, text = (self.arms[0], self.over[0]), f"{text}, {self.arms[0]} over {self.over[0]}"
        edge = ", the smallest or largest tried" if self._at_an_edge(records, study) else ""
        text = text.format(study=study, key=key, arm=self.arms[0], edge=edge)
        text += "" if self.at == "steps" else f" at equal {self.at}"
        if self.guidance[0] != UNGUIDED:
            chosen = [records.chosen_guidance(study, *pair) for pair in zip(arms, self.guidance, strict=True)]
            text += f" ({' against '.join(dict.fromkeys(g.replace('guidance=', '') for g in chosen))})"
        if not changes:
            return Finding(ABSENT, text)
        effect = Effect.of([*changes.values()])
        text = f"{text}: {effect.shown(key in RATIOS)}"
        return Finding(outcome_of(effect, self.higher), text, str(effect.n), records.commits(study, arms))

    def _at_an_edge(self, records: Records, study: str) -> bool:
        ends = finetuning.LRS.get(study, ())
        rows = [row for arm in self.arms for row in records.of(study, arm)]
        return any(float(row["lr"]) in (min(ends), max(ends)) for row in rows if ends)


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
        values = [float(row[self.column]) / by for row, by in zip(rows, divided_by, strict=True)]
        if not values:
            return [Finding(ABSENT, self.name)]
        bounds = ((operator.gt, self.above), (operator.ge, self.at_least), (operator.le, self.at_most))
        bounds = [(fits, bound) for fits, bound in bounds if bound is not None]
        verdicts = {all(fits(value, bound) for fits, bound in bounds) for value in values}
        outcome = OPEN if len(verdicts) > 1 else CONFIRMED if verdicts == {True} else REFUTED
        text = f"{self.name}: {min(values):.2f} to {max(values):.2f}x"
        commits = dict.fromkeys(row["commit"][:7] for row in rows)
        return [Finding(outcome, text, self.n or str(len(values)), tuple(commits))]


@dataclass(frozen=True)
class Claim:
    """A claim, its source, the tests that decide it here, and what would decide it at its own scale."""

    says: str
    source: str
    elsewhere: str
    tests: Sequence[Comparison | Bound] = ()


def read_claims() -> list[Claim]:
    """Read the rows of study/claims.yaml."""
    rows = yaml.safe_load((Path(__file__).parent / "claims.yaml").read_text())
    for row in rows:
        tests = row.get("tests", ())
        row["tests"] = [(Bound if "record" in test else Comparison)(**test) for test in tests]
    return [Claim(**row) for row in rows]


CLAIMS = read_claims()


def outcome_of(effect: Effect, higher: bool) -> str:
    """Return the outcome of the claim that an effect is below 0, or above it if `higher`."""
    if effect.low <= 0 <= effect.high:
        return OPEN
    return CONFIRMED if (effect.value > 0) == higher else REFUTED


def judged(tests: Sequence[Comparison | Bound], records: Records) -> tuple[str, list[Finding]]:
    """Return the outcome of a claim, open if its tasks contradict each other, and the findings behind it."""
    findings = [f for test in tests for f in test.findings(records) if f.outcome != ABSENT]
    if not findings:
        return ABSENT if tests else UNTESTED, []
    decided = {finding.outcome for finding in findings} - {OPEN}
    return (decided.pop() if len(decided) == 1 else OPEN), findings


def scoreboard(records: Records) -> str:
    """Return the table of claims. For a folder other than the project's, list only claims with records."""
    rows = []
    for claim in CLAIMS:
        outcome, findings = judged(claim.tests, records)
        if not findings and not records.of_project:
            continue
        texts = (f"{f.text}, n = {f.n}: {f.outcome}" for f in findings)
        row = {"claim": claim.says, "source": claim.source, "here": outcome}
        row["effect [95 % interval], n"] = "<br>".join(texts)
        row["commit"] = ", ".join(dict.fromkeys(commit for f in findings for commit in f.commits))
        rows.append(row | {"what would decide it at its own scale": claim.elsewhere})
    if not rows:
        return "No claim is about these arms alone."
    return markdown(rows, dict.fromkeys(rows[0], "{}"), everything=True).replace("--:", "---")  # left-aligned


def base_of(arm: str) -> str:
    """Return the dense arm with the same overrides."""
    name = next(name for name in sorted(ARMS, key=len, reverse=True) if arm.startswith(name))
    return "dense" + arm.removeprefix(name)


def arms_table(records: Records, study: str) -> str:
    """Return a table of the final scores of all arms: means over seeds and half of their intervals."""
    guided = ((UNGUIDED, "", SCORES),)
    if study in DISTANCES:
        guided += ((BEST, ", best guidance", (DISTANCES[study], "label_accuracy")),)
    rows = []
    recorded = dict.fromkeys(row["arm"] for row in records.rows[study])
    unchanged = [arm for arm in STUDIES[study].arms if arm in recorded]
    for arm in dict.fromkeys([*unchanged, *recorded]):  # changed arms last
        *_, last = records.of(study, arm)
        edge = "!" if float(last["lr"]) == max(LRS) else ""
        row = {"arm": arm, "lr": last["lr"] + edge, "steps": last["step"]}
        row["TFLOP"] = f"{float(last['gflop']) / 1e3:.0f}"
        for guidance, mark, keys in guided:
            for key in keys:
                if values := [*records.final(study, arm, key, guidance).values()]:
                    effect = Effect.of(values)
                    half = f" ± {effect.high - effect.value:.1g}" if effect.n > 1 else ""
                    row |= {"n": effect.n, key + mark: f"{effect.value:.4g}{half}"}
        key, base = DISTANCES.get(study, EXCESS), base_of(arm)
        if base != arm and (changes := compare(records, study, key, (arm, base))):
            row[f"{key} over dense"] = Effect.of([*changes.values()]).shown(key in RATIOS)
        rows.append(row)
    return markdown(rows, dict.fromkeys((key for row in rows for key in row), "{}"))


def page(records: Records) -> str:
    """Return the text of CLAIMS.md."""
    studies = [f"## {name}\n\n{arms_table(records, name)}" for name in STUDIES if records.rows[name]]
    ours = "`study/results/` and `benchmarks/results/`"
    head = HEAD.format(ours if records.of_project else "this folder")
    parts = [head, REHEARSAL if records.rehearsal else "", FIGURE if records.rows["mixture"] else ""]
    return "\n\n".join(filter(None, [*parts, scoreboard(records), ARMS_HEAD, *studies])) + "\n"


HEAD = """# Claims

Published claims about routing, and whether the measurements of this project confirm them. Do not edit this
page: `python -m study.claims` writes it from the records in {}.

| section | contents |
|---|---|
| [Outcomes](#outcomes) | each claim, its source, and the measured effect |
| [Arms](#arms) | final scores of all networks of the twin study |

# Outcomes

An outcome holds **only for networks and data of the size in its row**. Most networks here have a few million
parameters and 16 to 256 tokens, and train for one or two thousand steps of batch 32 on two CPU cores.

An effect is the change from the second arm to the first, paired by seed, with the 95 % interval of its mean
(Student's t). It is negative if a loss or a distance is lower. Some rows give the range of values instead. A
task confirms or refutes a claim if the interval lies on one side of 0; otherwise the claim is open. It is
also open if its tasks contradict each other. Each interval is wrong once in twenty. A100-hours are estimates,
scaled by FLOPs from the 240 (dense) and 147 (routed) that the paper's figure shows for XL/2 at 400K steps."""
FIGURE = "![excess loss over the optimal denoiser against steps and FLOPs](assets/twins.png)"
REHEARSAL = "**This is a rehearsal (--tiny), not a result.**"
ARMS_HEAD = f"""# Arms

Final scores of the twin study (`study/README.md`): means over seeds and half of their 95 % intervals. "lr" is
the rate, of {", ".join(f"{lr:g}" for lr in LRS)}, with the lowest held-out dense loss in a search of half the
steps on a separate seed. "!" marks the largest. Samples take 12 steps.
"Over dense" is the change from the dense arm with the same overrides, paired by seed. "Best guidance" is the
better of the scales 1.25 and 1.75 of CFG. All arms have the block of DiT; "sprint" has no second stage."""


def draw(records: Records, file: Path) -> None:
    """Plot the excess loss of the twins against steps and FLOPs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for arm, color in FIGURE_ARMS.items():
        seeds = np.array([*records.curve("mixture", arm, EXCESS).values()])  # (seeds, P, 3)
        if not len(seeds):
            continue
        scores = seeds[:, :, 2]
        for axes, x in zip(panels, (seeds[0, :, 0], seeds[0, :, 1] / 1e3), strict=True):
            axes.plot(x, scores.mean(axis=0), "o-", color=color, markersize=4, label=arm)
            axes.fill_between(x, scores.min(axis=0), scores.max(axis=0), color=color, alpha=0.2, linewidth=0)
    panels[0].set(xlabel="steps", ylabel="dense loss above the optimum", yscale="log")
    panels[1].set(xlabel="training TFLOPs")
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3, which="both", linewidth=0.5)
    panels[0].legend(frameon=False)
    with atomic_write(file) as partial:
        figure.savefig(partial, dpi=130, format="png")
    plt.close(figure)


def main() -> None:
    """Write the page and the figure."""
    parser = program_parser("study.claims", __doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="folder with records (default: the project's)")
    folder = parser.parse_args().folder
    records, out = (Records(folder), folder) if folder else (Records(), PROJECT)
    (out / "assets").mkdir(exist_ok=True)
    write_text(out / "CLAIMS.md", page(records))
    if records.rows["mixture"]:
        draw(records, out / "assets" / "twins.png")
    print(scoreboard(records))
    print(f"written: {out / 'CLAIMS.md'}")


if __name__ == "__main__":
    main()
