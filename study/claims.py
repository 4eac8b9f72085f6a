"""The scoreboard of claims: what is said of routing, and what the records of this repository say of it.

    python -m study.claims            writes CLAIMS.md and assets/twins.png from the records of the project
    python -m study.claims FOLDER     from the records of a study in FOLDER, to FOLDER

The claims are rows of study/claims.yaml. An effect is a difference between two arms, seed by seed, with a
95 % interval of its mean (Student's t). A claim is confirmed or refuted by a task where the interval lies on
one side of 0, else it is open there.
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
    """What one experiment says: in words, of how many, at which commits."""

    outcome: str
    text: str
    n: str = ""
    commits: tuple[str, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Two arms on studies, by the scores that decide there; see study/claims.yaml."""

    arms: Sequence[str]
    scores: Mapping[str, str | Sequence[str]]
    over: Sequence[str] | None = None
    higher: bool = False
    at: str = "steps"
    guidance: Sequence[str] = (UNGUIDED, UNGUIDED)
    name: str = "{study}, {key}"

    def pairs(self) -> list[tuple[str, str]]:
        """Each study with each of its scores."""
        return [(study, key) for study, keys in self.scores.items() for key in np.atleast_1d(keys).tolist()]

    def findings(self, records: Records) -> list[Finding]:
        """What each study says by each of its scores."""
        return [self._finding(records, study, key) for study, key in self.pairs()]

    def _finding(self, records: Records, study: str, key: str) -> Finding:
        arms, text = self.arms, self.name
        changes = compare(records, study, key, self.arms, self.at, self.guidance)
        if self.over:  # how much the change has grown
            before = compare(records, study, key, self.over, self.at, self.guidance)
            changes = {seed: changes[seed] - before[seed] for seed in changes.keys() & before.keys()}
            arms, text = (self.arms[0], self.over[0]), f"{text}, {self.arms[0]} over {self.over[0]}"
        edge = ", an end of those tried" if self._at_an_edge(records, study) else ""
        text = text.format(study=study, key=key, arm=self.arms[0], edge=edge)
        text += "" if self.at == "steps" else f" at equal {self.at}"
        if self.guidance[0] != UNGUIDED:
            chosen = [records.chosen_guidance(study, *each) for each in zip(arms, self.guidance, strict=True)]
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
    """Values of a record of another program, each of which must be within a bound; see study/claims.yaml."""

    record: str
    column: str
    name: str
    divided_by: str | None = None
    where: Mapping[str, Sequence[str]] = field(default_factory=dict)
    above: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    n: str = ""  # where rows are not independent: what they are

    def findings(self, records: Records) -> list[Finding]:
        """What all values say."""
        files = records.files(f"{self.record}_[A-Z]*")  # then comes the device
        rows = [read_environment(file) | row for file in files for row in read_results(file)]
        rows = [row for row in rows if row.get(self.column)]
        rows = [row for row in rows if all(row[key] in values for key, values in self.where.items())]
        divided_by = [float(row[self.divided_by]) if self.divided_by else 1.0 for row in rows]
        values = [float(row[self.column]) / by for row, by in zip(rows, divided_by, strict=True)]
        if not values:
            return [Finding(ABSENT, self.name)]
        bounds = ((operator.gt, self.above), (operator.ge, self.at_least), (operator.le, self.at_most))
        given = [(fits, bound) for fits, bound in bounds if bound is not None]
        verdicts = {all(fits(value, bound) for fits, bound in given) for value in values}
        outcome = OPEN if len(verdicts) > 1 else CONFIRMED if verdicts == {True} else REFUTED
        text = f"{self.name}: {min(values):.2f} to {max(values):.2f}x"
        commits = dict.fromkeys(row["commit"][:7] for row in rows)
        return [Finding(outcome, text, self.n or str(len(values)), tuple(commits))]


@dataclass(frozen=True)
class Claim:
    """What is said, by whom, what decides it here, and what would decide it where it was said."""

    says: str
    source: str
    elsewhere: str
    tests: Sequence[Comparison | Bound] = ()


def read_claims() -> list[Claim]:
    """The rows of study/claims.yaml."""
    rows = yaml.safe_load((Path(__file__).parent / "claims.yaml").read_text())
    for row in rows:
        tests = row.get("tests", ())
        row["tests"] = [(Bound if "record" in test else Comparison)(**test) for test in tests]
    return [Claim(**row) for row in rows]


CLAIMS = read_claims()


def outcome_of(effect: Effect, higher: bool) -> str:
    """What an interval says of the claim that the effect is below, or above, 0."""
    if effect.low <= 0 <= effect.high:
        return OPEN
    return CONFIRMED if (effect.value > 0) == higher else REFUTED


def judged(tests: Sequence[Comparison | Bound], records: Records) -> tuple[str, list[Finding]]:
    """The outcome of a claim, that of all tasks where they agree, and what each says."""
    findings = [each for test in tests for each in test.findings(records) if each.outcome != ABSENT]
    if not findings:
        return ABSENT if tests else UNTESTED, []
    decided = {finding.outcome for finding in findings} - {OPEN}
    return (decided.pop() if len(decided) == 1 else OPEN), findings


def scoreboard(records: Records) -> str:
    """The table of claims; of another folder than the project's, those that it has records of."""
    rows = []
    for claim in CLAIMS:
        outcome, findings = judged(claim.tests, records)
        if not findings and not records.of_project:
            continue
        texts = (f"{f.text}, n = {f.n}: {f.outcome}" for f in findings)
        row = {"claim": claim.says, "of": claim.source, "here": outcome}
        row["effect [95 % interval], n"] = "<br>".join(texts)
        row["commit"] = ", ".join(dict.fromkeys(commit for f in findings for commit in f.commits))
        rows.append(row | {"what decides it where it was said": claim.elsewhere})
    if not rows:
        return "No claim is about these arms alone."
    return markdown(rows, dict.fromkeys(rows[0], "{}"), everything=True).replace("--:", "---")  # texts


def base_of(arm: str) -> str:
    """The dense arm with the same overrides."""
    own = next(name for name in sorted(ARMS, key=len, reverse=True) if arm.startswith(name))
    return "dense" + arm.removeprefix(own)


def arms_table(records: Records, study: str) -> str:
    """The final scores of all arms of a study: means over seeds and half of their intervals."""
    guided = ((UNGUIDED, "", SCORES),)
    if study in DISTANCES:
        guided += ((BEST, ", best guidance", (DISTANCES[study], "label_accuracy")),)
    rows = []
    found = dict.fromkeys(row["arm"] for row in records.rows[study])
    of_study = [arm for arm in STUDIES[study].arms if arm in found]
    for arm in dict.fromkeys([*of_study, *found]):  # changed ones last
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
    """The text of CLAIMS.md."""
    studies = [f"## {name}\n\n{arms_table(records, name)}" for name in STUDIES if records.rows[name]]
    ours = "`study/results/` and `benchmarks/results/`"
    head = HEAD.format(ours if records.of_project else "this folder")
    parts = [head, REHEARSAL if records.rehearsal else "", FIGURE if records.rows["mixture"] else ""]
    return "\n\n".join(filter(None, [*parts, scoreboard(records), ARMS_HEAD, *studies])) + "\n"


HEAD = """# Claims

Written by `python -m study.claims` from the records in {}; do not edit. An effect is
the change from the second arm to the first, paired by seed: negative where a loss or a distance is lower,
with the 95 % interval of its mean (Student's t); where a row gives a range instead, it is from least to most.
A task confirms or refutes a claim if the interval lies on one side of 0, else it leaves it open. A claim is
what the tasks say that decide it, open where they contradict each other or none decides. Each interval errs
once in twenty: of all rows here one or two may.

**Confirmed and refuted are meant at the scale of the row and nowhere else**: most are networks of a few
million parameters, 16 to 256 tokens, one or two thousand steps of batch 32 on two CPU cores. The last column
says what decides a claim where it was made; its A100-hours are estimates, from the 240 (dense) and 147
(routed) that the paper's figure shows for XL/2 at 400K steps, scaled by FLOPs."""
FIGURE = "![excess loss over the optimal denoiser against steps and FLOPs](assets/twins.png)"
REHEARSAL = "**A rehearsal (--tiny): nothing here is a result.**"
ARMS_HEAD = f"""# Arms

Final scores, mean and half of the 95 % interval over the seeds. Each arm has the learning rate, of
{", ".join(f"{lr:g}" for lr in LRS)}, at which half of the steps on a seed of its own had the lowest held-out
dense loss; "!" marks the largest, beyond which one seed in a few did not recover from its start (`make
twins`; how: `benchmarks/README.md`, "The twin study"). "Over dense" is the difference from the dense arm with
the same overrides, seed by seed, with its 95 % interval. "Best guidance" is the better of the scales 1.25 and
1.75 of classifier-free guidance. All arms have the block of DiT; "sprint" has no second stage."""


def draw(records: Records, file: Path) -> None:
    """Draw the excess loss of the twins against steps and FLOPs."""
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
    parser.add_argument("folder", type=Path, nargs="?", help="of records; none: those of the project")
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
