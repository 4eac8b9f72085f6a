"""The scoreboard of claims: what is said of routing, and what the records of this repository say of it.

    python -m benchmarks.claims            writes CLAIMS.md and assets/twins.png from benchmarks/results/
    python -m benchmarks.claims FOLDER     from the records of a study in FOLDER, to FOLDER

An effect is a difference between two arms, seed by seed, with a 95 % interval of its mean (Student's t). A
claim is confirmed or refuted by a task where the interval lies on one side of 0, else it is open there.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.effects import (
    ABSENT,
    BEST,
    DISTANCES,
    EXCESS,
    OPEN,
    RATIOS,
    Finding,
    Finetuned,
    Growth,
    Measured,
    Pair,
    Records,
    effect_of,
    shown,
)
from benchmarks.results import RESULTS, markdown
from benchmarks.twins import ARMS, LOSS, LRS, SPARSE, STUDIES, UNGUIDED
from runtime.files import atomic_write, write_text
from runtime.provenance import PROJECT

FIGURE_ARMS = ("dense", "routed", "no removal")
COLOURS = dict(zip(FIGURE_ARMS, ("#4c72b0", "#dd8452", "#55a868"), strict=True))


@dataclass(frozen=True)
class Claim:
    """What is said, by whom, what decides it here, and what would decide it where it was said."""

    says: str
    source: str
    tests: Sequence[Callable[[Records], Finding]]
    elsewhere: str


def twins(
    arm: str,
    other: str,
    keys: Mapping[str, str],
    *,
    lower: bool = True,
    at: str = "steps",
    guidance: str = UNGUIDED,
) -> list[Pair]:
    """Return the same comparison on several tasks: study -> key."""
    return [Pair(study, arm, other, key, lower, at, guidance) for study, key in keys.items()]


def number(column: str) -> Callable[[Mapping[str, str]], float | None]:
    """Return what reads a column."""
    return lambda row: float(row[column]) if row.get(column) else None


def routed_speedup(row: Mapping[str, str]) -> float | None:
    """Return the speed-up of a routed step of this project."""
    return number("speedup_over_dense")(row) if row["step"] == "routed" else None


def safe(row: Mapping[str, str]) -> float | None:
    """Return the dense loss after fine-tuning with few tokens routed over that without, in equal time."""
    if float(row["ratio"]) > 0.3:
        return None
    return float(row["dense_loss_equal_time"]) / float(row["dense_loss_of_dense"])


ALL = {"mixture": EXCESS, **DISTANCES}
SAMPLED = ("digits", "glyphs")
SCORES = (EXCESS, LOSS, "train_loss", *DISTANCES.values(), "label_accuracy", "precision", "recall")


def series(study: str, large: str, small: str) -> list[Growth]:
    """Return whether routing gains more with the larger value of a key than with the smaller one, after the
    same steps and at equal FLOPs.
    """
    return [
        Growth(
            *(Pair(study, f"routed, {value}", f"dense, {value}", EXCESS, at=at) for value in (large, small))
        )
        for at in ("steps", "gflop")
    ]


def finetuned(arm: str) -> list[Finetuned]:
    """Return what fine-tuning all weights, and LoRA, end with, in loss and distance."""
    return [Finetuned(kind, arm, key) for kind in ("full", "lora") for key in ("val_loss_dense", "fd_pixel")]


ALL_CLASSES = "all classes of diffusers that can be routed, 1,024 tokens, a ratio of 0.5"
ON_GPU = "XL/2, 256 tokens, a ratio of 0.5, on one H200"
TWINS_400K = "twins at 400K steps on ImageNet, three seeds: B/2 about 240 A100-hours, XL/2 about 1,160"
CLAIMS = (
    Claim(
        "A routed step is cheaper",
        "[TREAD]",
        [
            Measured("train_step", routed_speedup, "S/2 on two cores", lambda x: x > 1, "x"),
            Measured("gpu_step", routed_speedup, ON_GPU, lambda x: x > 1, "x"),
            Measured("families", number("speedup"), "models of diffusers on two cores", lambda x: x > 1, "x"),
            Measured("families_all", number("speedup"), ALL_CLASSES, lambda x: x > 1, "x"),
        ],
        "`make gpu`: an hour of one GPU",
    ),
    Claim(
        "It is at least 20 % faster (20 to 40 is said)",
        "SimpleTuner",
        [
            Measured(
                "families",
                number("speedup"),
                "models of diffusers at a ratio of 0.5",
                lambda x: x >= 1.2,
                "x",
            ),
            Measured("families_all", number("speedup"), ALL_CLASSES, lambda x: x >= 1.2, "x"),
            Measured("gpu_step", routed_speedup, ON_GPU, lambda x: x >= 1.2, "x"),
        ],
        "`make gpu`",
    ),
    Claim("It converges faster per step", "[TREAD]", twins("routed", "dense", ALL), TWINS_400K),
    Claim(
        "It converges faster per FLOP",
        "[TREAD]",
        [
            *twins("routed", "dense", ALL, at="gflop"),
            *twins("routed, equal FLOPs", "dense", ALL),
        ],
        TWINS_400K,
    ),
    Claim(
        "It converges faster per second", "[TREAD]", twins("routed", "dense", ALL, at="seconds"), TWINS_400K
    ),
    Claim(
        "Its training loss is higher",
        "[TREAD]",
        twins("routed", "dense", dict.fromkeys(ALL, "train_loss"), lower=False),
        "any twins",
    ),
    Claim(
        "Precision rises, unguided",
        "[TREAD]'s tables",
        twins("routed", "dense", dict.fromkeys(SAMPLED, "precision"), lower=False),
        TWINS_400K,
    ),
    Claim(
        "Recall falls, unguided",
        "[TREAD]'s tables",
        twins("routed", "dense", dict.fromkeys(SAMPLED, "recall")),
        TWINS_400K,
    ),
    Claim(
        "A ratio of 0.5 is better than 0.25",
        "[TREAD]",
        twins("routed", "ratio 0.25", ALL),
        "`experiment=imagenet256_sweep_ratio_b_2`",
    ),
    Claim(
        "A ratio of 0.5 is better than 0.75",
        "[TREAD]",
        twins("routed", "ratio 0.75", ALL),
        "`experiment=imagenet256_sweep_ratio_b_2`",
    ),
    Claim(
        "A ratio of 0.75 is worse than dense",
        "[TREAD]",
        twins("ratio 0.75", "dense", ALL, lower=False),
        "`experiment=imagenet256_sweep_ratio_b_2`",
    ),
    Claim(
        "A window must not start at block 0",
        "[TREAD]",
        twins("routed", "early start", ALL),
        "`experiment=imagenet256_sweep_route_start_b_2`, `..._route_end_b_2`",
    ),
    Claim(
        "A window must end before the last blocks",
        "[TREAD]",
        twins("routed", "late end", ALL),
        "`experiment=imagenet256_sweep_route_start_b_2`, `..._route_end_b_2`",
    ),
    Claim(
        "Windows transfer by absolute indices",
        "[TREAD]",
        (),
        "`experiment=imagenet256_sweep_indices_xl_2`: about 300 A100-hours",
    ),
    Claim(
        "Removal is what helps: tokens that stay as context are worse",
        "SR-DiT logs",
        twins("no removal", "routed", ALL, lower=False),
        TWINS_400K,
    ),
    Claim(
        "The gain grows with depth",
        "[TREAD]'s tables",
        series("depth", "depth=16", "depth=6"),
        "S, B, L, XL twins at 400K steps",
    ),
    Claim(
        "The gain grows with width",
        "[TREAD]'s tables",
        series("width", "hidden_size=192", "hidden_size=64"),
        "S, B, L, XL twins at 400K steps",
    ),
    Claim(
        "The gain grows with the number of tokens",
        "Photoroom, PRX",
        series("tokens", "patch_size=1", "patch_size=4"),
        "twins at 256 and 1,024 tokens",
    ),
    Claim("It gains at 1,024 tokens", "Photoroom, PRX", (), "B/2 twins at 512x512"),
    Claim(
        "Guidance gains from dense steps at the end",
        "[TREAD], [SG]",
        twins("dense end", "routed", DISTANCES, guidance=BEST),
        "XL/2 160 epochs and its finetune",
    ),
    Claim(
        "Guided, routed training is ahead too",
        "[TREAD]",
        twins("routed", "dense", DISTANCES, guidance=BEST),
        TWINS_400K,
    ),
    Claim(
        "Keeping tokens by their norm is better than at random",
        "first code of [TREAD]",
        twins("importance", "routed", ALL),
        "B/2 at 400K steps with each router",
    ),
    Claim(
        "SPRINT's sparse middle is better than TREAD's window per step (both in the block of DiT: no rotary "
        "positions, no QK-norm; and without SPRINT's second stage)",
        "[SPRINT]",
        twins("sprint", "routed", ALL),
        "`experiment=imagenet256_sprint_xl_2_400k` and its twins",
    ),
    Claim(
        "Fine-tuning with routes starts with a spike of the loss",
        "SimpleTuner",
        [
            Measured(
                "finetuning",
                number("rise"),
                "digits, loss with routes over without",
                lambda x: x > 1,
                "x",
                "5 ratios",
            )
        ],
        "a fine-tune of FLUX",
    ),
    Claim(
        "In fine-tuning, conservative ratios (0.1 to 0.3) pay off in equal time",
        "SimpleTuner",
        [
            Measured(
                "finetuning",
                safe,
                "digits, dense loss over that of a dense fine-tune as long",
                lambda x: x <= 1,
                "x",
                "2 ratios x 2 kinds x 3 seeds",
            ),
            *finetuned("ratio 0.25"),
        ],
        "a fine-tune of FLUX",
    ),
    Claim(
        "In fine-tuning, routes with a dense end pay off in equal time",
        "asked in public (musubi-tuner #485)",
        [*finetuned("ratio 0.25, dense end"), *finetuned("ratio 0.5, dense end")],
        "a fine-tune of FLUX",
    ),
    Claim(
        "Sparse guidance beats classifier-free guidance",
        "[SG]",
        [
            Pair(study, "routed", "routed", key, guidance=SPARSE, other_guidance=BEST)
            for study, key in DISTANCES.items()
        ],
        "`experiment=imagenet256_sit_tread_xl_2_400ep`",
    ),
)


def judged(tests: Sequence[Callable[[Records], Finding]], records: Records) -> tuple[str, list[Finding]]:
    """Return the outcome of a claim: that of all tasks where they agree, and what each says."""
    findings = [finding for test in tests if (finding := test(records)).outcome != ABSENT]
    outcomes = {finding.outcome for finding in findings}
    if not tests:
        return "cannot be tested at this scale", []
    if not findings:
        return ABSENT, []
    decided = outcomes - {OPEN}
    return (decided.pop() if len(decided) == 1 else OPEN), findings


def scoreboard(records: Records) -> str:
    """Return the table of claims; of another folder than the project's, those that it has records of."""
    rows = []
    for claim in CLAIMS:
        outcome, findings = judged(claim.tests, records)
        if not findings and records.folder != RESULTS:
            continue
        rows.append(
            {
                "claim": claim.says,
                "of": claim.source,
                "here": outcome,
                "effect [95 % interval], n": "<br>".join(
                    f"{f.text}, n = {f.n}: {f.outcome}" for f in findings
                ),
                "commit": ", ".join(dict.fromkeys(commit for f in findings for commit in f.commits)),
                "what decides it where it was said": claim.elsewhere,
            }
        )
    if not rows:
        return "No claim is about these arms alone."
    return markdown(rows, dict.fromkeys(rows[0], "{}"), everything=True).replace("--:", "---")  # texts


def base_of(arm: str) -> str:
    """Return the dense arm with the same overrides."""
    own = next(name for name in sorted(ARMS, key=len, reverse=True) if arm.startswith(name))
    return "dense" + arm.removeprefix(own)


def arms_table(records: Records, study: str) -> str:
    """Return the final scores of all arms of a study: means over seeds and half of their intervals."""
    guided = ((UNGUIDED, "", SCORES),)
    if study in DISTANCES:
        guided += ((BEST, ", best guidance", (DISTANCES[study], "label_accuracy")),)
    rows = []
    found = dict.fromkeys(row["arm"] for row in records.rows[study])
    of_study = [arm for arm in STUDIES[study].arms if arm in found]
    for arm in dict.fromkeys([*of_study, *found]):  # changed ones last
        last = max(records.of(study, arm), key=lambda row: int(row["step"]))
        edge = "!" if float(last["lr"]) == max(LRS) else ""
        row = {
            "arm": arm,
            "lr": last["lr"] + edge,
            "steps": last["step"],
            "TFLOP": f"{float(last['gflop']) / 1e3:.0f}",
        }
        for guidance, mark, keys in guided:
            for key in keys:
                if values := [*records.final(study, arm, key, guidance).values()]:
                    effect = effect_of(values)
                    half = f" ± {effect.high - effect.value:.1g}" if effect.n > 1 else ""
                    row |= {"n": effect.n, key + mark: f"{effect.value:.4g}{half}"}
        key, base = DISTANCES.get(study, EXCESS), base_of(arm)
        if base != arm and (changes := Pair(study, arm, base, key).changes(records)):
            row[f"{key} over dense"] = shown(effect_of([*changes.values()]), key in RATIOS)
        rows.append(row)
    return markdown(rows, dict.fromkeys((key for row in rows for key in row), "{}"))


def page(records: Records) -> str:
    """Return CLAIMS.md."""
    studies = [f"## {name}\n\n{arms_table(records, name)}" for name in STUDIES if records.rows[name]]
    head = HEAD.format("`benchmarks/results/`" if records.folder == RESULTS else "this folder")
    parts = [head, REHEARSAL if records.rehearsal else "", FIGURE if records.rows["mixture"] else ""]
    return "\n\n".join(filter(None, [*parts, scoreboard(records), ARMS_HEAD, *studies])) + "\n"


HEAD = """# Claims

Written by `python -m benchmarks.claims` from the records in {}; do not edit. An effect is
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


def curves(records: Records, study: str, key: str) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Return arm, (steps, gflop) (2, P) and scores (seeds, P) for the arms of the figure."""
    for arm in FIGURE_ARMS:
        seeds = [*records.curve(study, arm, key).values()]
        if seeds:
            points = np.array(seeds)  # (seeds, P, 3)
            yield arm, points[0, :, :2].T, points[:, :, 2]


def draw(records: Records, file: Path) -> None:
    """Draw the excess loss of the twins against steps and FLOPs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True, layout="constrained")
    for arm, spent, scores in curves(records, "mixture", EXCESS):
        for axes, x in zip(panels, (spent[0], spent[1] / 1e3), strict=True):
            axes.plot(x, scores.mean(axis=0), "o-", color=COLOURS[arm], markersize=4, label=arm)
            axes.fill_between(
                x, scores.min(axis=0), scores.max(axis=0), color=COLOURS[arm], alpha=0.2, linewidth=0
            )
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
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.claims", None, __doc__, formatter_class=raw)
    parser.add_argument("folder", type=Path, nargs="?", help="of records; none: those of the project")
    asked = parser.parse_args()
    is_ours = asked.folder is None or asked.folder.resolve() == RESULTS.resolve()
    records, out = (Records(), PROJECT) if is_ours else (Records(asked.folder), asked.folder)
    (out / "assets").mkdir(exist_ok=True)
    write_text(out / "CLAIMS.md", page(records))
    if records.rows["mixture"]:
        draw(records, out / "assets" / "twins.png")
    print(scoreboard(records))
    print(f"written: {out / 'CLAIMS.md'}")


if __name__ == "__main__":
    main()
