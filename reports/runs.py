"""Read runs from their folders, and group them into arms: runs that differ only in the seed."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

from reports.effects import Effect, effect_of
from runtime.errors import as_value_error
from runtime.files import parse_json, read_bounded, read_json
from runtime.provenance import flatten
from runtime.tables import csv_text, text_table
from training.recorder import LEVEL
from training.run_folder import FREE_KEYS, SCORING_KEYS, RunFolder, is_in

MAX_METRICS_BYTES = 2**28
CLOCK = ("step", "num_images", "train_time_sec", "evaluation_time_sec")
# Keys that may differ within an arm: they change neither the weights of a step nor their scores.
SAME_ARM = {"seed", "data.path", *FREE_KEYS} - {"train.total_steps", *SCORING_KEYS}
UNNAMED = ("model", "data")  # groups already named by the method and the section of the page
AXES = ("steps", "TFLOPs", "hours")
MAX_NAME = 60  # characters

Lines = list[dict[str, Any]]
Curve = list[tuple[int, float]]  # (step, value)


@dataclass
class Run:
    """A run, read from its folder.

    Raises:
        FileNotFoundError: the folder is not a run directory.
        ValueError: a file of the run is damaged.
    """

    folder: RunFolder

    def __post_init__(self):
        self.folder.check_started()
        self.manifest, self.config = self.folder.manifest(), self.folder.config()
        self.lines = read_metrics(self.folder.metrics_file)
        if not isinstance(self.config.get("seed"), int):
            raise ValueError(f"{self.folder.config_file} is damaged: no seed")
        self.name, self.seed = self.folder.path.resolve().name, self.config["seed"]

    @cached_property
    def overrides(self) -> dict[str, str]:
        """The groups and keys set on the command line or by a sweeper."""
        pairs = (text.lstrip("+~").partition("=") for text in self.manifest["overrides"])
        return {key: value for key, _, value in pairs}

    def choice(self, key: str) -> str | None:
        """Return the value of a key or the option of a group; None if it is not set."""
        node = self.config
        for part in key.split("."):
            try:
                node = node[int(part)] if isinstance(node, list) else node[part]
            except (KeyError, IndexError, ValueError, TypeError):
                return self.overrides.get(key)
        return self.overrides.get(key) if isinstance(node, dict) else str(node)

    @property
    def data(self) -> str:
        """The name of the data set."""
        data = self.config["data"]
        return Path(data["path"]).name if data.get("path") else data["_target_"].rpartition(".")[2]

    @property
    def num_held_out(self) -> int:
        """Number of images in the held-out losses."""
        return self.manifest["data"]["manifest"]["num_held_out"]

    @property
    def step(self) -> int:
        """The last logged step."""
        return self.lines[-1]["step"] if self.lines else 0

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """The logged numbers, by key."""
        curves: dict[str, Curve] = {}
        for line in self.lines:
            for key, value in line.items():
                if key not in CLOCK and isinstance(value, int | float) and math.isfinite(value):
                    curves.setdefault(key, []).append((line["step"], value))
        return curves

    @cached_property
    def newest(self) -> dict[str, float]:
        """The newest value of each key, and the scores written by fid.py, as `FILE: KEY`."""
        values = {key: curve[-1][1] for key, curve in self.curves.items()}
        for file in sorted(self.folder.path.glob("scores/*.json")):
            scores = read_json(file).get("values", {})
            values |= {f"{file.stem}: {k}": v for k, v in scores.items() if isinstance(v, int | float)}
        return values

    @cached_property
    def _tflops(self) -> list[tuple[int, float]]:
        total, num_images, points = 0.0, 0, []
        for line in self.lines:
            if "tflops_per_sec" in line:  # FLOPs of routed steps
                sec = (line["num_images"] - num_images) / line["images_per_sec"]
                total, num_images = total + line["tflops_per_sec"] * sec, line["num_images"]
                points.append((line["step"], total))
        return points

    def cost_at(self, axis: str, step: int) -> float:
        """Return the training cost up to a step, in steps, TFLOPs or hours."""
        if axis == "steps":
            return step
        if axis == "TFLOPs":
            return next((total for logged, total in reversed(self._tflops) if logged <= step), 0.0)
        lines = (line for line in reversed(self.lines) if line["step"] <= step)
        return next((line["train_time_sec"] / 3600 for line in lines if "train_time_sec" in line), 0.0)

    @cached_property
    def settings(self) -> dict[str, str]:
        """The settings that define the run's arm, as text by dotted key."""
        flat = {key: str(value) for key, value in flatten(self.config).items() if not is_in(key, SAME_ARM)}
        entries = str(self.manifest["data"]["fingerprint"])[:8]  # the same in any folder
        text = "{selection_ratio:g} bypass {start_layer_idx} to {end_layer_idx}"
        routes = [text.format_map(route) for route in self.config["model"]["routes"]]
        return flat | {"model.routes": "; ".join(routes) or "none", "data.entries": entries}


@dataclass
class Arm:
    """Runs that differ only in the seed."""

    runs: list[Run]
    name: str = ""
    data: str = ""

    def curve(self, key: str, axis: str) -> list[tuple[float, float, float, float]]:
        """Return points (cost, mean, minimum, maximum) over seeds, at the steps that all runs logged."""
        curves = [dict(run.curves.get(key, ())) for run in self.runs]
        steps = sorted(set.intersection(*map(set, curves)))
        points = []
        for step in steps:
            values = [curve[step] for curve in curves]
            spent = mean(run.cost_at(axis, step) for run in self.runs)
            points.append((spent, mean(values), min(values), max(values)))
        return points

    def values(self, key: str) -> list[float]:
        """Return the newest value of a key in each run that has it."""
        return [run.newest[key] for run in self.runs if key in run.newest]


def read_metrics(file: Path) -> Lines:
    """Read the complete lines of a `metrics.jsonl`, which may still grow."""
    if not file.is_file():
        return []
    with file.open("rb") as opened:
        text = read_bounded(opened, MAX_METRICS_BYTES)
    with as_value_error(f"{file} is damaged"):
        lines = [parse_json(line) for line in text[: text.rfind(b"\n") + 1].splitlines()]
    if not all(isinstance(line, dict) and isinstance(line.get("step"), int) for line in lines):
        raise ValueError(f"{file} is damaged: each line must be an object with a step")
    return lines


def group_runs(runs: Sequence[Run]) -> list[Arm]:
    """Group runs into arms, data set by data set, and name the arms by the choices that differ."""
    groups: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(sorted(run.settings.items())), []).append(run)
    by_data: dict[str, list[Arm]] = {}
    for members in groups.values():
        arm = Arm(sorted(members, key=lambda run: (run.seed, run.name)))
        by_data.setdefault(arm.runs[0].settings["data.entries"], []).append(arm)
    names = [arms[0].runs[0].data for arms in by_data.values()]
    for name, (entries, arms) in zip(names, by_data.items(), strict=True):
        _name(arms)
        for arm in arms:
            arm.data = name if names.count(name) == 1 else f"{name} ({entries})"
    return [arm for arms in by_data.values() for arm in arms]


def sections(arms: Sequence[Arm]) -> dict[str, list[Arm]]:
    """Return the arms of each data set, by its name."""
    names = dict.fromkeys(arm.data for arm in arms)
    return {name: [arm for arm in arms if arm.data == name] for name in names}


def _name(arms: Sequence[Arm]) -> None:
    """Name the arms of a data set by the method and the chosen keys that differ, or else by their runs."""
    keys = dict.fromkeys(key for arm in arms for run in arm.runs for key in run.overrides)
    keys = [key for key in keys if key not in UNNAMED and not is_in(key, SAME_ARM)]
    keys = [key for key in ("method", *keys) if len({arm.runs[0].choice(key) for arm in arms}) > 1]
    short = [re.split(r"[./]", key)[-1] for key in keys]
    for arm in arms:
        choices = []
        for key, label in zip(keys, short, strict=True):
            if (value := arm.runs[0].choice(key)) is not None:
                label = key if short.count(label) > 1 else label
                choices.append(value if key == "method" else f"{label}={value}")
        arm.name = ", ".join(choices)
    names = [arm.name for arm in arms]
    for arm in arms:
        if names.count(arm.name) > 1 or not arm.name:
            arm.name = ", ".join(filter(None, [arm.name, arm.runs[0].name]))
        if len(arm.name) > MAX_NAME:  # keep the end, where names often differ
            half = (MAX_NAME - 3) // 2
            arm.name = f"{arm.name[:half]}...{arm.name[-half:]}"
    names = [arm.name for arm in arms]
    for i, arm in enumerate(arms):
        if names.count(arm.name) > 1:
            arm.name += f" #{1 + names[:i].count(arm.name)}"


def differences(arms: Sequence[Arm]) -> list[str]:
    """Return the keys whose values differ between arms, the method first."""
    arm_settings = [arm.runs[0].settings for arm in arms]
    keys = dict.fromkeys(key for settings in arm_settings for key in settings)
    different = [key for key in keys if len({settings.get(key) for settings in arm_settings}) > 1]
    return sorted(different, key=lambda key: key != "method")


def table(arms: Sequence[Arm]) -> list[dict[str, str]]:
    """Return a row for each arm: its cost and its newest scores, as mean ± half interval."""
    rows = []
    for arm in arms:
        first = arm.runs[0]
        row = {"arm": arm.name, "n": str(len(arm.runs)), "step": f"{first.step:,}"}
        row |= {"TFLOPs": f"{first.cost_at('TFLOPs', first.step):.3g}"}
        row |= {"hours": f"{mean(run.cost_at('hours', run.step) for run in arm.runs):.2g}"}
        for key in keys_of_scores(arms):
            if values := arm.values(key):
                effect = effect_of([values], (1,))
                half = f" ± {effect.high - effect.value:.1g}" if effect.n > 1 else ""
                row[key] = f"{effect.value:.4g}{half}"
        rows.append(row)
    return rows


def changes(arms: Sequence[Arm]) -> list[dict[str, str]]:
    """Return a row for each score of each arm except the first: its difference from the first arm.

    The noise is the spread of trainings that differ in the seed, pooled over all arms of the same number of
    steps unless it differs. If the two arms have different numbers of steps, each needs several seeds.
    """
    rows, steps = [], [{run.step for run in arm.runs} for arm in arms]
    for arm, length in zip(arms[1:], steps[1:], strict=True):
        same = [other for other, its in zip(arms, steps, strict=True) if its == length == steps[0]]
        others = [other for other in same if other not in (arm, arms[0])]
        for key in keys_of_scores(arms):
            pair = [arm.values(key), arms[0].values(key)]
            if all(pair):
                effect = effect_of(pair, (1, -1), [other.values(key) for other in others])
                if not same and (n := min(map(len, pair))) < 2:
                    effect = Effect(n, effect.value)
                row = {"score": key, **_verdict(effect), "seeds": f"{len(pair[0])}, {len(pair[1])}"}
                rows.append(row | {"arm": arm.name})
    return rows


def _verdict(effect: Effect) -> dict[str, str]:
    change = f"{effect.value:+.3g}" if abs(effect.value) > 1e-12 else "0"
    if effect.high - effect.low < 1e-12:
        return {"change": change, "verdict": "equal in all seeds" if change == "0" else "noise unknown"}
    if not math.isfinite(effect.high):
        return {"change": change, "verdict": "noise unknown: train more seeds"}
    row = {"change": change, "95 % interval": f"{effect.low:+.2g} to {effect.high:+.2g}"}
    if not effect.low <= 0 <= effect.high:
        return row | {"verdict": "larger than the noise"}
    needed = effect.seeds or "more than 1,000"
    return row | {"verdict": "within the noise", "seeds that would decide": f"{needed} of each"}


def keys_of_scores(arms: Sequence[Arm]) -> list[str]:
    """Return the keys of losses and scores, without single noise levels and monitoring values."""
    runs = [run for arm in arms for run in arm.runs]
    keys = dict.fromkeys(key for run in runs for key in run.newest)
    scored = {key for run in runs for line in run.lines if "evaluation_time_sec" in line for key in line}
    return [key for key in keys if LEVEL not in key and (key in scored or ": " in key or key == "loss")]


def as_text(rows: Sequence[dict[str, str]]) -> str:
    """Format a table for the terminal, without the scores of single files."""
    keys = [key for key in dict.fromkeys(key for row in rows for key in row) if ": " not in key]
    return printable(text_table([keys, *([row.get(key, "") for key in keys] for row in rows)]))


def printable(text: str) -> str:
    """Remove control characters: a run may come from elsewhere."""
    return "".join(c for c in text if c.isprintable() or c == "\n")


def as_csv(arms: Sequence[Arm]) -> str:
    """Return a CSV table with a line for each run and all its newest values."""
    return csv_text([_csv_row(arm, run) for arm in arms for run in arm.runs])


def _csv_row(arm: Arm, run: Run) -> dict[str, Any]:
    row = {"run": run.name, "data": arm.data, "arm": arm.name, "seed": run.seed}
    row |= {"status": run.manifest["status"], "step": run.step}
    row |= {axis.lower(): run.cost_at(axis, run.step) for axis in AXES[1:]}
    row |= {"commit": run.manifest["commit"], "device": run.manifest["device"], **run.newest}
    return {_escape_formula(key): _escape_formula(value) for key, value in row.items()}


def _escape_formula(value: Any) -> Any:
    """Quote a text that a spreadsheet would run as a formula: a run may come from elsewhere."""
    is_formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if is_formula else value
