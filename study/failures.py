"""Which scores notice which failure: held-out real images, damaged on purpose, take the place of samples.

    python -m study.failures OUT [digits] [glyphs]

A score notices a failure if it changes by more than three standard errors (over the samples). The table on
evaluation/README.md is written from the records.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from scipy.ndimage import gaussian_filter

from benchmarks.processes import program_parser, record_all
from benchmarks.results import Record, Rows
from benchmarks.runs import compose
from builders.references import reference_of
from builders.scoring import build_suite
from data import encoder_for
from evaluation import Cmmd, InfiniteFrechetDistance, KernelDistance, Memorised, VendiScore
from evaluation.features import ArrayImages
from runtime.launch import ALONE
from runtime.provenance import environment

FEATURES = {"digits": "pixels", "glyphs": "hidden"}
NUM_HALVES, NUM_ERRORS = 20, 3
BLUR = 0.8  # pixels
NONE = "none"
Set = tuple[np.ndarray, np.ndarray]  # images (N, H, W, C) uint8, labels (N,)


def drop_class(real: Set, train: Set, rng: np.random.Generator) -> Set:
    """Replace the images of a tenth of the classes by images of the others."""
    images, labels = real
    dropped = np.unique(labels)[::10]
    kept = np.flatnonzero(~np.isin(labels, dropped))
    ids = np.concatenate([kept, rng.choice(kept, len(labels) - len(kept))])
    return images[ids], labels[ids]


def mix_classes(real: Set, train: Set, rng: np.random.Generator) -> Set:
    """Replace each image by the mean of two images."""
    images, labels = real
    other = images[rng.permutation(len(images))]
    return ((images.astype(int) + other) // 2).astype(np.uint8), labels


def shuffle_labels(real: Set, train: Set, rng: np.random.Generator) -> Set:
    return real[0], rng.permutation(real[1])


def copy(real: Set, train: Set, rng: np.random.Generator) -> Set:
    """Take images of the training set."""
    ids = rng.choice(len(train[0]), len(real[0]), replace=False)
    return train[0][ids], train[1][ids]


def blur(real: Set, train: Set, rng: np.random.Generator) -> Set:
    return gaussian_filter(real[0], (0, BLUR, BLUR, 0)), real[1]


def change_colours(real: Set, train: Set, rng: np.random.Generator) -> Set:
    """Lower the contrast by a fifth."""
    return (real[0] * 0.8 + 25.5).astype(np.uint8), real[1]


def keep_few(real: Set, train: Set, rng: np.random.Generator) -> Set:
    """Keep a fifth of the images."""
    ids = rng.permutation(len(real[0]))[: len(real[0]) // 5]
    return real[0][ids], real[1][ids]


FAILURES: dict[str, Callable[[Set, Set, np.random.Generator], Set]] = {
    NONE: lambda real, train, rng: real,
    "a tenth of the classes is missing": drop_class,
    "two images in one": mix_classes,
    "wrong labels": shuffle_labels,
    "copies of training images": copy,
    "blur": blur,
    "contrast": change_colours,
    "a fifth of the images": keep_few,
}


def measure(task: str) -> Rows:
    """Return a row for each failure and score."""
    experiment = compose(("model=dit", f"data={task}", f"evaluation={task}"))
    dataset = experiment.data()
    reference = reference_of(dataset, encoder_for(dataset.manifest, torch.device("cpu")), task)
    suite, name = build_suite(experiment.evaluation, reference, ALONE), FEATURES[task]
    known = {key for metric in suite.metrics for key in metric.keys}
    further = (
        InfiniteFrechetDistance("fd_inf", name),
        KernelDistance("kd", name, num_subsets=20),
        Cmmd(name),
        VendiScore(name),
        Memorised(name),
    )
    suite.metrics = [metric for metric in suite.metrics if not metric.held_out]
    suite.metrics += [metric for metric in further if not known.intersection(metric.keys)]
    assert isinstance(reference.images, ArrayImages) and reference.held_out and reference.labels is not None
    rows = []
    for failure, damage in FAILURES.items():
        train = reference.images.array, reference.labels
        images, labels = damage(reference.held_out, train, np.random.default_rng(0))
        scores = suite.score(ArrayImages(images), labels, num_halves=NUM_HALVES)
        rows += [
            {"failure": failure, "score": key, "value": value, "standard_error": scores.standard_errors[key]}
            | {"higher_is_better": key in scores.higher_is_better, "n": len(images)}
            for key, value in scores.values.items()
            if not key.endswith("_std")
        ]
    return rows


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a table in Markdown: scores down, failures across; a notice says if the score calls it worse."""
    cells = {(row["score"], row["failure"]): row for row in rows}
    scores, failures = (dict.fromkeys(row[key] for row in rows) for key in ("score", "failure"))
    lines = [f"| score | real images | {' | '.join(f for f in failures if f != NONE)} |"]
    lines.append("|---|" + "--:|" * len(failures))
    for score in scores:
        base = cells[score, NONE]
        line = f"| `{score}` | {float(base['value']):.3g} ± {float(base['standard_error']):.1g} |"
        for failure in (f for f in failures if f != NONE):
            row = cells[score, failure]
            change = float(row["value"]) - float(base["value"])
            error = math.hypot(float(row["standard_error"]), float(base["standard_error"]))
            is_better = (change > 0) == (str(row["higher_is_better"]) == "True")
            notice = ("better" if is_better else "**worse**") if abs(change) > NUM_ERRORS * error else "-"
            line += f" {float(row['value']):.3g} {notice} |"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    """Measure the tasks that are not recorded yet, and print their tables."""
    parser = program_parser("study.failures", __doc__)
    parser.add_argument("out", type=Path, help="folder of the record")
    parser.add_argument("tasks", nargs="*", metavar="task", help=", ".join(FEATURES))
    request = parser.parse_args()
    if unknown := {*request.tasks} - FEATURES.keys():
        parser.error(f"{', '.join(sorted(unknown))}: must be one of {', '.join(FEATURES)}")
    tasks = request.tasks or [*FEATURES]
    record = Record("failures", request.out, environment(torch.device("cpu")) | {"tiny": False})
    record_all({task: partial(measure, task) for task in tasks}, record, 1)
    for task in tasks:
        print(f"\n{task}\n{table([row for row in record.rows if row['setting'] == task])}")
    sys.exit(not record.started() <= record.done())


if __name__ == "__main__":
    main()
