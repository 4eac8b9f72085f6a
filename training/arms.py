"""Runs as their folders tell them, grouped into arms: runs that differ in the seed alone."""

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from runtime.files import parse_json, read_bounded, read_json
from runtime.provenance import flatten
from training.run_folder import FREE_KEYS, SCORING_KEYS, RunFolder, is_in

MAX_METRICS_BYTES = 2**28
CLOCK = ("step", "num_images", "train_time_sec", "evaluation_time_sec")
# What does not make another arm: what changes neither the weights after a number of steps nor their scores.
SAME_ARM = {"seed", "data.path", *FREE_KEYS} - {"train.total_steps", *SCORING_KEYS}
LEVEL = "/t="  # of noise, in the key of a loss

Lines = list[dict[str, Any]]
Curve = list[tuple[int, float]]  # (step, value)


@dataclass
class Run:
    """A run as its folder tells it.

    Raises:
        ValueError: a file of the run is damaged.
    """

    folder: RunFolder

    def __post_init__(self):
        self.manifest, self.config = self.folder.manifest(), self.folder.config()
        self.lines = metrics_of(self.folder.metrics_file)
        if not isinstance(self.config.get("seed"), int):
            raise ValueError(f"{self.folder.config_file} is damaged: no seed")
        self.name, self.seed = self.folder.path.resolve().name, self.config["seed"]

    @property
    def step(self) -> int:
        """The last step that was logged."""
        return self.lines[-1]["step"] if self.lines else 0

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """The numbers that were logged, by key."""
        found: dict[str, Curve] = {}
        for line in self.lines:
            for key, value in line.items():
                if key not in CLOCK and isinstance(value, int | float) and math.isfinite(value):
                    found.setdefault(key, []).append((line["step"], value))
        return found

    @cached_property
    def newest(self) -> dict[str, float]:
        """The newest value of each key, and the scores that fid.py wrote, by file and key."""
        found = {key: curve[-1][1] for key, curve in self.curves.items()}
        for file in sorted(self.folder.path.glob("scores/*.json")):
            values = read_json(file).get("values", {})
            found |= {f"{file.stem}: {k}": v for k, v in values.items() if isinstance(v, int | float)}
        return found

    @cached_property
    def _spent(self) -> list[tuple[int, float]]:
        total, num_images, found = 0.0, 0, []
        for line in self.lines:
            if "tflops_per_sec" in line:  # of the steps as they were routed
                sec = (line["num_images"] - num_images) / line["images_per_sec"]
                total, num_images = total + line["tflops_per_sec"] * sec, line["num_images"]
                found.append((line["step"], total))
        return found

    def tflops(self, step: int) -> float:
        """Return what the training steps up to a step have cost."""
        return next((total for at, total in reversed(self._spent) if at <= step), 0.0)

    def hours(self, step: int) -> float:
        """Return the training time up to a step."""
        times = [(line["step"], line["train_time_sec"]) for line in self.lines if "train_time_sec" in line]
        before = [sec for at, sec in times if at <= step] or [0.0]
        return before[-1] / 3600

    def spent(self, axis: str, step: int) -> float:
        """Return what a step stands for on an axis of curves."""
        return {"steps": step, "TFLOPs": self.tflops(step), "hours": self.hours(step)}[axis]

    @cached_property
    def settings(self) -> dict[str, str]:
        """What makes the arm of the run, as texts by dotted key."""
        flat = {key: str(value) for key, value in flatten(self.config).items() if not is_in(key, SAME_ARM)}
        entries = str(self.manifest["data"]["fingerprint"])[:8]  # wherever they are
        routes = (
            f"{route['selection_ratio']:g} bypass {route['start_layer_idx']} to {route['end_layer_idx']}"
            for route in self.config["model"]["routes"]
        )
        return flat | {"model.routes": "; ".join(routes) or "none", "data.entries": entries}


@dataclass
class Arm:
    """Runs that differ in the seed alone."""

    name: str
    runs: list[Run]

    def curve(self, key: str, axis: str) -> list[tuple[float, float, float, float]]:
        """Return (what was spent, mean, least, most) over seeds, at the steps that all runs logged."""
        curves = [dict(run.curves.get(key, ())) for run in self.runs]
        steps = sorted(set.intersection(*map(set, curves)))
        points = []
        for step in steps:
            values = [curve[step] for curve in curves]
            spent = mean(run.spent(axis, step) for run in self.runs)
            points.append((spent, mean(values), min(values), max(values)))
        return points

    def values(self, key: str) -> list[float]:
        """Return the newest value of a key, of each run that has it."""
        return [run.newest[key] for run in self.runs if key in run.newest]


def metrics_of(file: Path) -> Lines:
    """Return the complete lines of a `metrics.jsonl`, which may grow meanwhile."""
    if not file.is_file():
        return []
    with file.open("rb") as opened:
        text = read_bounded(opened, MAX_METRICS_BYTES)
    try:
        lines = [parse_json(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if not all(isinstance(line, dict) and isinstance(line.get("step"), int) for line in lines):
        raise ValueError(f"{file} is damaged: each line must be an object with a step")
    return lines


def grouped(runs: Sequence[Run]) -> list[Arm]:
    """Return the arms, in the order of their first runs, named by what differs between them."""
    groups: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(sorted(run.settings.items())), []).append(run)
    arms = [Arm("", sorted(members, key=lambda run: (run.seed, run.name))) for members in groups.values()]
    settings = [arm.runs[0].settings for arm in arms]
    methods = [each.get("method") for each in settings]
    for arm, own in zip(arms, settings, strict=True):
        # What most arms have need not be said of each, nor the routes of the one method.
        alone = len(set(methods)) > 1 and methods.count(own.get("method")) == 1
        said = [
            _said(key, own.get(key))
            for key in differences(arms)
            if not is_in(key, SCORING_KEYS)
            and not (key == "model.routes" and alone)
            and (key == "method" or 2 * sum(each.get(key) == own.get(key) for each in settings) <= len(arms))
        ]
        arm.name = ", ".join(filter(None, said))
    names = [arm.name for arm in arms]
    for arm in arms:
        if names.count(arm.name) > 1 or not arm.name:  # they are scored in other ways
            arm.name = ", ".join(filter(None, [arm.name, arm.runs[0].name]))
    return arms


def differences(arms: Sequence[Arm]) -> list[str]:
    """Return the keys whose values differ between arms, what is chosen first before what follows."""
    settings = [arm.runs[0].settings for arm in arms]
    keys = dict.fromkeys(key for each in settings for key in each)
    different = [key for key in keys if len({each.get(key) for each in settings}) > 1]
    return sorted(different, key=lambda key: key != "method")


def _said(key: str, value: str | None) -> str:
    if value is None or (key == "model.routes" and value == "none"):
        return ""
    return value if key in ("method", "model.routes") else f"{key.rpartition('.')[2]}={value}"


def mean_and_half(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of values of different seeds, and half of its 95 % interval (Student's t); of one
    value that is infinite.
    """
    from scipy.stats import t

    n = len(values)
    return mean(values), t.ppf(0.975, n - 1) * stdev(values) / math.sqrt(n) if n > 1 else math.inf


def table(arms: Sequence[Arm]) -> list[dict[str, str]]:
    """Return a row of texts for each arm: what it took, and its newest scores, mean and half interval."""
    rows = []
    for arm in arms:
        first = arm.runs[0]
        row = {"arm": arm.name, "n": str(len(arm.runs)), "step": f"{first.step:,}"}
        row |= {"TFLOPs": f"{first.spent('TFLOPs', first.step):.3g}"}
        row |= {"hours": f"{mean(run.hours(run.step) for run in arm.runs):.2g}"}
        for key in shown_keys(arms):
            if values := arm.values(key):
                middle, half = mean_and_half(values)
                row[key] = f"{middle:.4g}" + (f" ± {half:.1g}" if len(values) > 1 else "")
        rows.append(row)
    return rows


def shown_keys(arms: Sequence[Arm]) -> list[str]:
    """Return the keys of losses and scores: not those that are logged to watch a run, nor single levels."""
    keys = dict.fromkeys(key for arm in arms for run in arm.runs for key in run.newest)
    scored = {
        key
        for arm in arms
        for run in arm.runs
        for line in run.lines
        if "evaluation_time_sec" in line
        for key in line
    }
    return [key for key in keys if LEVEL not in key and (key in scored or ": " in key or key == "loss")]


def markdown(rows: Sequence[dict[str, str]]) -> str:
    """Return rows as a table for a terminal, without the scores of single files."""
    keys = [key for key in dict.fromkeys(key for row in rows for key in row) if ": " not in key]
    lines = [keys, ["---"] * len(keys), *([row.get(key, "") for key in keys] for row in rows)]
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return "".join(c for c in text if c.isprintable() or c == "\n")  # a run may be from elsewhere


def as_csv(arms: Sequence[Arm]) -> str:
    """Return a line for each run, with all that a spreadsheet needs to group them again."""
    rows = list(_runs_of(arms))
    text = io.StringIO()
    keys = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_plain, keys))
    writer.writerows([_plain(row.get(key, "")) for key in keys] for row in rows)
    return text.getvalue()


def _plain(value: Any) -> Any:
    """Return a cell that no spreadsheet takes for a formula: a run may be from elsewhere."""
    return (
        f"'{value}"
        if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
        else value
    )


def _runs_of(arms: Sequence[Arm]) -> Iterator[dict[str, Any]]:
    for arm in arms:
        for run in arm.runs:
            yield {
                "run": run.name,
                "arm": arm.name,
                "seed": run.seed,
                "status": run.manifest["status"],
                "step": run.step,
                "tflops": run.spent("TFLOPs", run.step),
                "hours": run.hours(run.step),
                "commit": run.manifest["commit"],
                "device": run.manifest["device"],
                **run.newest,
            }
