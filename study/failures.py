"""Sensitivity of scores to failures: held-out real images, damaged on purpose, are scored as samples.

    python -m study.failures OUT [digits] [glyphs]

A score notices a failure if it changes by more than three standard errors (over the samples).
evaluation/README.md shows the tables of the record.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from scipy.ndimage import gaussian_filter

from benchmarks.processes import program_parser, record_all
from benchmarks.results import Record, Rows, markdown
from benchmarks.runs import compose
from builders.references import reference_of
from builders.scoring import build_suite
from data import encoder_for
from evaluation import Cmmd, InfiniteFrechetDistance, KernelDistance, Memorised, VendiScore
from evaluation.features import ArrayImages
from runtime.launch import ALONE
from runtime.provenance import environment

# task -> name of the features, and keys
TASKS = {"digits": ("pixels", ()), "glyphs": ("hidden", ("data.num_images=32768",))}
NUM_HALVES, NUM_ERRORS = 20, 3
BLUR = 0.8  # pixels
NONE = "none"
Set = tuple[np.ndarray, np.ndarray]  # images (N, H, W, C) uint8, labels (N,)


def failure_sets(real: Set, train: Set) -> dict[str, Set]:
    """Return real images damaged in each way, by failure; "copies" are training images."""
    (images, labels), rng = real, np.random.default_rng(0)
    n = len(images)
    kept = np.flatnonzero(~np.isin(labels, np.unique(labels)[::10]))
    kept = np.concatenate([kept, rng.choice(kept, n - len(kept))])
    copied, few = rng.choice(len(train[0]), n, replace=False), rng.permutation(n)[: n // 5]
    mixed = (images.astype(int) + images[rng.permutation(n)]) // 2
    return {
        NONE: real,
        "a tenth of the classes is missing": (images[kept], labels[kept]),
        "two images in one": (mixed.astype(np.uint8), labels),
        "wrong labels": (images, rng.permutation(labels)),
        "copies of training images": (train[0][copied], train[1][copied]),
        "blur": (gaussian_filter(images, (0, BLUR, BLUR, 0)), labels),
        "contrast": ((images * 0.8 + 25.5).astype(np.uint8), labels),
        "a fifth of the images": (images[few], labels[few]),
    }


def measure(task: str) -> Rows:
    """Return a row for each failure and score."""
    experiment = compose(("model=dit", f"data={task}", f"evaluation={task}", *TASKS[task][1]))
    dataset = experiment.data()
    reference = reference_of(dataset, encoder_for(dataset.manifest, torch.device("cpu")), task)
    suite, name = build_suite(experiment.evaluation, reference, ALONE), TASKS[task][0]
    known = {key for metric in suite.metrics for key in metric.keys}
    further = [InfiniteFrechetDistance("fd_inf", name), KernelDistance("kd", name, num_subsets=20)]
    further += [Cmmd(name, max_images=1024), VendiScore(name), Memorised(name)]
    suite.metrics = [metric for metric in suite.metrics if not metric.held_out]
    suite.metrics += [metric for metric in further if not known.intersection(metric.keys)]
    assert isinstance(reference.images, ArrayImages) and reference.held_out and reference.labels is not None
    rows = []
    train = reference.images.array, reference.labels
    for failure, (images, labels) in failure_sets(reference.held_out, train).items():
        scores = suite.score(ArrayImages(images), labels, num_halves=NUM_HALVES)
        rows += [
            {"failure": failure, "score": key, "value": value, "standard_error": scores.standard_errors[key]}
            | {"higher_is_better": key in scores.higher_is_better, "n": len(images)}
            for key, value in scores.values.items()
            if not key.endswith("_std")
        ]
    return rows


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Return a Markdown table of scores by failures; a noticed failure is marked as better or worse."""
    cells = {(row["score"], row["failure"]): row for row in rows}
    scores, failures = (dict.fromkeys(row[key] for row in rows) for key in ("score", "failure"))
    lines = []
    for score in scores:
        base = cells[score, NONE]
        real = f"{float(base['value']):.3g} ± {float(base['standard_error']):.1g}"
        line = {"score": f"`{score}`", "real images": real}
        for failure in (f for f in failures if f != NONE):
            row = cells[score, failure]
            change = float(row["value"]) - float(base["value"])
            error = math.hypot(float(row["standard_error"]), float(base["standard_error"]))
            is_better = (change > 0) == (str(row["higher_is_better"]) == "True")
            notice = ("better" if is_better else "**worse**") if abs(change) > NUM_ERRORS * error else "-"
            line[failure] = f"{float(row['value']):.3g} {notice}"
        lines.append(line)
    return markdown(lines)


def main() -> None:
    """Measure the tasks that are not recorded yet, and print their tables."""
    parser = program_parser("study.failures", __doc__)
    parser.add_argument("out", type=Path, help="folder of the record")
    parser.add_argument("tasks", nargs="*", metavar="task", help=", ".join(TASKS))
    request = parser.parse_args()
    if unknown := {*request.tasks} - TASKS.keys():
        parser.error(f"{', '.join(sorted(unknown))}: must be one of {', '.join(TASKS)}")
    tasks = request.tasks or [*TASKS]
    record = Record("failures", request.out, environment(torch.device("cpu")) | {"tiny": False})
    record_all({task: partial(measure, task) for task in tasks}, record, 1)
    for task in tasks:
        print(f"\n{task}\n{table([row for row in record.rows if row['setting'] == task])}")
    sys.exit(not record.started() <= record.done())


if __name__ == "__main__":
    main()
