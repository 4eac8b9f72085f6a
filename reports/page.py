"""The report page: tables, curves, pictures, routes and settings in one HTML file without links."""

import base64
import io
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import yaml

from reports.runs import (
    AXES,
    CLOCK,
    Arm,
    Lines,
    Run,
    changes,
    differences,
    group_runs,
    keys_of_scores,
    sections,
    table,
)
from runtime.files import read_bounded
from training.recorder import LEVEL

MAX_PICTURE_BYTES, MAX_DEPTH, MAX_PANELS = 2**26, 1000, 60
TEMPLATE = Path(__file__).with_name("page.html")
LOSSES = ("loss", "val_loss_dense", "val_loss_dense_ema", "val_loss_optimal")
FEW_HELD_OUT = 10  # images
EVENTS = ("loss_spikes", "skipped_steps")
STYLES = ("-", "--", "-.", ":")  # so that lines differ by more than colour
Points = list[tuple[float, float, float, float]]  # (x, mean, minimum, maximum)


def page(runs: Sequence[Run], refresh_sec: float | None = None) -> str:
    """Return the report page of one or several runs as HTML, complete in one file.

    Args:
        refresh_sec: interval at which the browser reloads the page; None: never.

    Raises:
        ValueError: a file of a run is damaged.
    """
    try:
        arms = group_runs(runs)
        title = f"{len(runs)} runs, {len(arms)} arms"
        if len(runs) == 1:
            title = f"{runs[0].name}: step {runs[0].step}"
        tables, pictures = [], []
        for data, data_arms in sections(arms).items():
            heading = f"<h2>{escape(data)}</h2>"
            tables += [heading, *_tables(data_arms)]
            pictures += [heading, *_pictures(data_arms)]
        tables += [_progress(runs[0])] if len(runs) == 1 else []
        tables += ["<h2>Runs</h2>", _wide([_environment(arm, run) for arm in arms for run in arm.runs])]
        for arm in arms:
            text = escape(yaml.safe_dump(arm.runs[0].config, sort_keys=False))
            summary = f"<summary>configuration {escape(arm.name)}</summary>"
            pictures.append(f"<details>{summary}<pre>{text}</pre></details>")
    except (AttributeError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        names = ", ".join(str(run.folder.path) for run in runs)
        raise ValueError(f"{names}: a file of the run is damaged: {error!r}") from error
    return Template(TEMPLATE.read_text()).substitute(
        title=escape(title),
        refresh=f'<meta http-equiv="refresh" content="{refresh_sec}">' if refresh_sec else "",
        tables="\n".join(tables),
        pictures="\n".join(pictures),
    )


def _tables(arms: Sequence[Arm]) -> Iterable[str]:
    yield from (f"<p><strong>{escape(line)}</strong></p>" for line in comparison_notes(arms))
    yield _wide(table(arms))
    if len(arms) > 1:
        yield f"<h3>Differences from {escape(arms[0].name)}</h3>"
        yield _wide(changes(arms))
        yield "<h3>What differs</h3>"
        keys = differences(arms)
        yield _wide([{"key": k} | {arm.name: arm.runs[0].settings.get(k, "") for arm in arms} for k in keys])


def _progress(run: Run) -> str:
    total_steps = int(run.config["train"]["total_steps"])
    age_sec = time.time() - run.folder.metrics_file.stat().st_mtime if run.lines else 0.0
    rows = facts(run.manifest, run.lines, constants([run]))
    status = escape(status_line(run.manifest, run.lines, total_steps, age_sec))
    return f'<p>{status}</p><progress max="{total_steps}" value="{run.step}"></progress>{_table(rows)}'


def _pictures(arms: Sequence[Arm]) -> Iterable[str]:
    yield from _curves(arms, constants([run for arm in arms for run in arm.runs]))
    for arm in arms:
        files = pictures_of(arm.runs[0].folder.path)
        if len(arms) > 1:  # one picture for each arm, preferably of all steps
            files = ([file for file in files if file.stem == "over_time"] or files)[:1]
        yield from (_picture(file, arm.name if len(arms) > 1 else file.stem) for file in files)
    yield from _routes(arms)


def comparison_notes(arms: Sequence[Arm]) -> list[str]:
    """Return notes on what makes the runs hard to compare."""
    runs, notes = [run for arm in arms for run in arm.runs], []
    for key, name in (("source_sha256", "code version"), ("device", "device"), ("processor", "processor")):
        if len({run.manifest[key] for run in runs}) > 1:
            notes.append(f"note: the runs used more than one {name}")
    if len({run.step for run in runs}) > 1:
        notes.append("note: the runs have different numbers of steps")
    repeated = [arm.name for arm in arms if len({run.seed for run in arm.runs}) < len(arm.runs)]
    notes += [f"note: {name} has several runs of one seed: n counts runs, not seeds" for name in repeated]
    if 0 < (num_held_out := min(run.num_held_out for run in runs)) < FEW_HELD_OUT:
        notes.append(f"note: the held-out losses use few images ({num_held_out})")
    return notes


def constants(runs: Sequence[Run]) -> dict[str, float]:
    """Return the logged values that are the same at all steps of all runs."""
    values: dict[str, list[float]] = {}
    for run in runs:
        for key, curve in run.curves.items():
            values.setdefault(key, []).extend(value for _, value in curve)
    return {key: logged[0] for key, logged in values.items() if len(logged) > 1 and len(set(logged)) == 1}


def status_line(manifest: dict[str, Any], lines: Lines, total_steps: int, age_sec: float) -> str:
    """Return a run's status, progress and remaining time; its newest values are `age_sec` old."""
    texts = [manifest["status"] + (f" ({manifest['reason']})" if manifest.get("reason") else "")]
    if failure := manifest.get("failure"):
        texts.append(failure["reason"])
    if not lines:
        return "; ".join([*texts, f"no step of {total_steps:,} logged yet"])
    step = lines[-1]["step"]
    trained, evaluated = (next((x[key] for x in reversed(lines) if key in x), 0.0) for key in CLOCK[2:])
    texts.append(f"step {step:,} of {total_steps:,}")
    texts.append(f"{_clock(trained)} of training, {_clock(evaluated)} of evaluation")
    if manifest["status"] == "running" and step:
        left = _clock((trained + evaluated) / step * (total_steps - step))
        texts.append(f"about {left} left; newest values {_clock(age_sec)} ago")
    return "; ".join(texts)


def pictures_of(run: Path) -> list[Path]:
    """Return the newest picture of a training, then all others: the overview and pictures of `sample.py`."""
    files = sorted(run.glob("samples/[!.]*.png"))  # hidden files are incomplete
    # The page may be shared: it shows no file from outside the run.
    files = [file for file in files if file.is_file() and file.resolve().is_relative_to(run.resolve())]
    trained = [file for file in files if re.fullmatch(r"step_\d{8}", file.stem)]
    return trained[-1:] + [file for file in files if file not in trained]


def facts(manifest: dict[str, Any], lines: Lines, constant: dict[str, Any]) -> dict[str, str]:
    """Return the newest values of a run, its network, routes, precision and starts."""
    cost, resolved = manifest["cost"], manifest["resolved"]
    values = {key: value for line in lines for key, value in line.items()}
    newest = {key: value for key, value in values.items() if key not in (*CLOCK, *constant)}
    numbers = {key: value for key, value in newest.items() if isinstance(value, int | float)}
    events = {key: [event["step"] for line in lines for event in line.get(key, ())] for key in EVENTS}
    speed = f"{cost['predicted_speedup']:.2f}x as fast as dense ones by FLOPs"
    rows = {
        "newest values": ", ".join(f"{key} {value:.4g}" for key, value in numbers.items()),
        **{key: ", ".join(map(str, steps)) for key, steps in events.items()},
        "constant values": ", ".join(f"{key} {value:g}" for key, value in constant.items()),
        "network": f"{cost['num_parameters'] / 1e6:.2f}M parameters",
        "routes": "; ".join(manifest["routes"]) or "none",
        "training steps": speed if manifest["routes"] else "",
        "precision": f"{resolved['mixed_precision']}, {'' if resolved['compile'] else 'un'}compiled",
        "started": ", ".join(f"at step {start['step']:,}" for start in manifest["starts"]),
    }
    return {key: value for key, value in rows.items() if value}


def _environment(arm: Arm, run: Run) -> dict[str, str]:
    manifest = run.manifest
    changed = ", changed" if manifest["uncommitted_changes"] else ""
    return {
        "run": run.name,
        "arm": arm.name,
        "seed": str(run.seed),
        "status": f"{manifest['status']}, step {run.step:,}",
        "code": f"{manifest['commit'] or 'unknown'}{changed}",
        "hardware": f"{manifest['num_processes']} x {manifest['device']}, {manifest['processor']}",
        "torch": str(manifest["versions"]["torch"]),
        "command": manifest["command"],
    }


def _clock(sec: float) -> str:
    return f"{int(sec) // 3600}:{int(sec) // 60 % 60:02}:{int(sec) % 60:02}"


def panels_of(arms: Sequence[Arm], constant: Mapping[str, float]) -> dict[str, list[tuple[str, Arm, str]]]:
    """Return the lines (name, arm, key) of each panel; the losses of a single run share a panel."""
    logged = (key for arm in arms for run in arm.runs for key in run.curves)
    keys = dict.fromkeys([*keys_of_scores(arms), *logged])  # losses and scores first
    keys = [k for k in keys if LEVEL not in k and ": " not in k and k not in constant][:MAX_PANELS]
    if len(arms) > 1:
        return {key: [(arm.name, arm, key) for arm in arms] for key in keys}
    (arm,) = arms
    losses = [key for key in LOSSES if key in arm.runs[0].curves]
    panels = {"losses": [(key, arm, key) for key in losses]} if len(losses) > 1 else {}
    return panels | {key: [(key, arm, key)] for key in keys if not panels or key not in LOSSES}


def _curves(arms: Sequence[Arm], constant: Mapping[str, float]) -> Iterable[str]:
    """Yield the panels against each axis, and the losses by noise level."""
    panels = panels_of(arms, constant)
    if len(arms) > 1 and panels:
        yield f'<img class="legend" alt="legend of the arms" src="{_legend([arm.name for arm in arms])}">'
    for axis in AXES if panels else ():
        yield f'<div class="against-{axis}">'
        for title, lines in panels.items():
            curves = [(name, arm.curve(key, axis)) for name, arm, key in lines]
            yield _figure(title, _plot(curves, axis, legend=len(arms) == 1))
        yield "</div>"
    for title, curves in levels_of(arms).items():
        yield _figure(f"{title} by noise level", _plot(curves, "t", log=True, legend=False))


def levels_of(arms: Sequence[Arm]) -> dict[str, list[tuple[str, Points]]]:
    """Return the newest losses by noise level: points (t, mean, minimum, maximum) over seeds for each arm."""
    keys = dict.fromkeys(key for arm in arms for run in arm.runs for key in run.curves)
    curves: dict[str, list[tuple[str, Points]]] = {}
    for key in keys:
        loss, is_level, t = key.partition(LEVEL)
        if is_level:
            arm_curves = curves.setdefault(loss, [(arm.name, []) for arm in arms])
            for arm, (_, points) in zip(arms, arm_curves, strict=True):
                if values := arm.values(key):
                    points.append((float(t), sum(values) / len(values), min(values), max(values)))
    return {loss: [(name, sorted(points)) for name, points in lines] for loss, lines in curves.items()}


def _line(i: int) -> dict[str, Any]:
    return {"color": f"C{i % 10}", "linestyle": STYLES[i // 3 % 4], "linewidth": 1.2}


def _plot(curves: Sequence[tuple[str, Points]], axis: str, legend: bool, log: bool = False) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.0, 2.6), layout="constrained")
    axes = figure.subplots()
    for i, (name, points) in enumerate(curves):
        if not points:
            continue
        x, middle, low, high = zip(*points, strict=True)
        axes.plot(x, middle, marker="." if len(points) < 30 else "", label=_literal(name), **_line(i))
        if low != high:
            axes.fill_between(x, low, high, color=f"C{i % 10}", alpha=0.2, linewidth=0)
    axes.set(xlabel=axis, xscale="log" if log else "linear")
    if axis == "steps":
        axes.xaxis.get_major_locator().set_params(integer=True)
    axes.spines[["top", "right"]].set_visible(False)
    if legend and len(curves) > 1:
        axes.legend(frameon=False, fontsize=7)
    return _as_svg(figure)


def _literal(name: str) -> str:
    return name.replace("$", r"\$")  # otherwise matplotlib draws a formula


def _legend(names: Sequence[str]) -> str:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(max(2, 0.09 * max(map(len, names)) + 0.8), 0.22 * len(names) + 0.1))
    lines = [Line2D([], [], **_line(i)) for i in range(len(names))]
    figure.legend(lines, [_literal(name) for name in names], loc="center left", frameon=False, fontsize=9)
    return _as_svg(figure)


def _as_svg(figure: Any) -> str:
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", transparent=True)
    return _address("svg+xml", buffer.getvalue())


def _routes(arms: Sequence[Arm]) -> Iterable[str]:
    """Yield a row of blocks for each arm; the height of a block is its share of tokens in training."""
    for arm in arms:
        model = arm.runs[0].config["model"]
        if "depth" not in model:  # a backbone without a row of blocks
            continue
        depth = min(int(model["depth"]), MAX_DEPTH)
        bypass = [0.0] * depth
        for route in model["routes"]:
            start, end = (int(route[f"{end}_layer_idx"]) % depth for end in ("start", "end"))
            bypass[start : end + 1] = [float(route["selection_ratio"])] * (end + 1 - start)
        blocks = [
            f'<i title="block {i}: {1 - ratio:.0%} of the tokens" '
            f'style="background: linear-gradient(to top, currentColor {1 - ratio:.0%}, transparent 0)"></i>'
            for i, ratio in enumerate(bypass)
        ]
        routes = "; ".join(arm.runs[0].manifest["routes"]) or "all tokens in all blocks"
        name = f"{arm.name}: {routes}" if routes not in arm.name and len(arms) > 1 else routes
        yield f'<p>{escape(name)}</p><div class="blocks">{"".join(blocks)}</div>'


def _picture(file: Path, name: str) -> str:
    with file.open("rb") as opened:
        return _figure(name, _address("png", read_bounded(opened, MAX_PICTURE_BYTES)))


def _figure(name: str, address: str) -> str:
    name = escape(name)
    image = f'<label><input type="checkbox"><img alt="{name}" src="{address}"></label>'
    return f"<figure><figcaption>{name}</figcaption>{image}</figure>"


def _address(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _table(rows: Mapping[str, str]) -> str:
    cells = (f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in rows.items())
    return f"<table>{''.join(cells)}</table>"


def _wide(rows: Sequence[Mapping[str, str]]) -> str:
    keys = list(dict.fromkeys(key for row in rows for key in row))
    head = "".join(f"<th>{escape(key)}</th>" for key in keys)
    body = ("".join(f"<td>{escape(row.get(key, ''))}</td>" for key in keys) for row in rows)
    lines = "".join(f"<tr>{cells}</tr>" for cells in body)
    return f'<div class="wide"><table><tr>{head}</tr>{lines}</table></div>'
