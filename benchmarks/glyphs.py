"""A routed run and its dense twin on glyphs, in turn: who is ahead after the same steps, and after the same
seconds.

The recipe of `data=glyphs` as it stands: 256 tokens, S/2, 62 classes, batch 256, one seed. Each turn trains
one of both 500 steps further by `train.py`, which scores it in the end.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.results import Rows
from runtime.provenance import PROJECT

STEPS, TURNS = 500, 100  # a turn, which a short loan of a GPU has time for
SCORES = ("fd_classifier", "label_accuracy", "val_loss_dense_ema")
MODELS = {"dense": "model=dit", "routed": "model=tread"}
TINY = (
    "model.hidden_size=32",
    "model.depth=7",
    "model.num_heads=4",
    "data.num_images=128",
    "train.batch_size=4",
    "train.log_every=1",
    "train.num_workers=0",
    "train.compile=false",
    "evaluation.num_samples=64",
    "sampler.num_steps=2",
)
COLUMNS = {
    "setting": "{}",
    "train_sec": "{:.1f}",
    "images_per_sec": "{:.0f}",
    "fd_classifier": "{:.3f}",
    "fd_classifier_dense_at_equal_sec": "{:.3f}",
    "label_accuracy": "{:.3f}",
    "label_accuracy_dense_at_equal_sec": "{:.3f}",
    "val_loss_dense_ema": "{:.4f}",
    "failed": "{}",
}


def plan(device: torch.device, tiny: bool, out: Path) -> dict[str, Callable[[], Rows]]:
    """What trains each run on, in turn; see `benchmarks.gpu`."""
    steps, turns, overrides = (1, 2, TINY) if tiny else (STEPS, TURNS, ())
    folder = (out / "twins").resolve()
    return {
        f"{kind}, {turn * steps} steps": partial(train_on, kind, turn * steps, steps, overrides, folder)
        for turn in range(1, turns + 1)
        for kind in MODELS
    }


def train_on(kind: str, total_steps: int, steps: int, overrides: Sequence[str], folder: Path) -> Rows:
    """Train one run to a step: its scores beside those of the dense one after the same seconds."""
    if total_steps > steps and not (folder / kind).exists():
        raise ValueError(f"{folder / kind} is gone: start in another folder")
    data = ("data=glyphs", f"data.path={folder / 'latents'}", "evaluation=glyphs")
    intervals = (f"train.eval_every={steps}", f"train.save_every={steps}", "train.sample_every=null")
    asked = (MODELS[kind], *data, f"output_dir={folder / kind}", f"train.total_steps={total_steps}")
    subprocess.run([sys.executable, "train.py", *asked, *intervals, *overrides], cwd=PROJECT, check=True)
    found = scores_of(folder / kind)[-1]
    row = {"kind": kind, **found, "images_per_sec": found["num_images"] / found["train_sec"]}
    if kind == "routed":
        dense = scores_of(folder / "dense")
        row |= {f"{key}_dense_at_equal_sec": at_second(dense, key, found["train_sec"]) for key in SCORES}
    return [row]


def scores_of(run: Path) -> Rows:
    """Step, images, seconds of training and scores of each evaluation of a run."""
    found, rates = [], []
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        if "images_per_sec" in line:
            rates.append(line["images_per_sec"])
        if SCORES[0] in line:
            # Each turn compiles in its first window: the clock of the run has that, a median does not.
            train_sec = line["num_images"] / median(rates)
            scores = {key: line[key] for key in ("step", "num_images", *SCORES)}
            found.append(scores | {"train_sec": train_sec})
    return found


def at_second(scores: Sequence[Mapping[str, Any]], key: str, train_sec: float) -> float | None:
    """A score after so many seconds of training, between evaluations on a line; None outside."""
    seconds = [found["train_sec"] for found in scores]
    if not seconds[0] <= train_sec <= seconds[-1]:
        return None
    return float(np.interp(train_sec, seconds, [found[key] for found in scores]))
