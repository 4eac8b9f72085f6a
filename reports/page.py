"""The page of runs: tables, curves, pictures, routes and settings in one file without links."""

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
    differences,
    grouped,
    sections,
    shown_keys,
    table,
)
from runtime.files import read_bounded
from training.recorder import LEVEL
from training.speed import describe_check

MAX_PICTURE_BYTES, MAX_DEPTH, MAX_PANELS = 2**26, 1000, 60
TEMPLATE = Path(__file__).with_name("page.html")
LOSSES = ("loss", "val_loss_dense", "val_loss_dense_ema", "val_loss_optimal")
FEW_HELD_OUT = 10  # images
EVENTS = ("loss_spikes", "skipped_steps")
STYLES = ("-", "--", "-.", ":")  # lines differ in more than their colour
Points = list[tuple[float, float, float, float]]  # (x, mean, least, most)


def page(runs: Sequence[Run], refresh_sec: float | None = None) -> str:
    """The page of one run or of several as HTML, complete in one file.

    Args:
        refresh_sec: the browser reloads the page so often.

    Raises:
        ValueError: a file of a run is damaged.
    """
    try:
        arms = grouped(runs)
        title = f"{len(runs)} runs, {len(arms)} arms"
        if len(runs) == 1:
            title = f"{runs[0].name}: step {runs[0].step}"
        tables, pictures = [], []
        for data, alike in sections(arms).items():
            heading = f"<h2>{escape(data)}</h2>"
            tables += [heading, *_tables(alike)]
            pictures += [heading, *_pictures(alike)]
        tables += [_progress(runs[0])] if len(runs) == 1 else []
        tables += ["<h2>Runs</h2>", _wide([_environment(arm, run) for arm in arms for run in arm.runs])]
        pictures += [_configuration(arm.runs[0], arm.name) for arm in arms]
    except (AttributeError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
        names = ", ".join(str(run.folder.path) for run in runs)
        raise ValueError(f"{names} is not as a run writes it: {error!r}") from error
    return Template(TEMPLATE.read_text()).substitute(
        title=escape(title),
        refresh=f'<meta http-equiv="refresh" content="{refresh_sec}">' if refresh_sec else "",
        tables="\n".join(tables),
        pictures="\n".join(pictures),
    )


def _tables(arms: Sequence[Arm]) -> Iterable[str]:
    yield from (f"<p><strong>{escape(line)}</strong></p>" for line in mixtures(arms))
    yield _wide(table(arms))
    if len(arms) > 1:
        yield "<h3>What differs</h3>"
        keys = differences(arms)
        yield _wide([{"key": k} | {arm.name: arm.runs[0].settings.get(k, "") for arm in arms} for k in keys])


def _progress(run: Run) -> str:
    total_steps = int(run.config["train"]["total_steps"])
    age_sec = time.time() - run.folder.metrics_file.stat().st_mtime if run.lines else 0.0
    facts_of = facts(run.manifest, run.lines, constants([run]))
    return (
        f"<p>{escape(standing(run.manifest, run.lines, total_steps, age_sec))}</p>"
        f'<progress max="{total_steps}" value="{run.step}"></progress>{_table(facts_of)}'
    )


def _pictures(arms: Sequence[Arm]) -> Iterable[str]:
    yield from _curves(arms, constants([run for arm in arms for run in arm.runs]))
    for arm in arms:
        files = pictures_of(arm.runs[0].folder.path)
        if len(arms) > 1:  # one picture of each: of all steps, if it has that
            files = ([file for file in files if file.stem == "over_time"] or files)[:1]
        yield from (_picture(file, arm.name if len(arms) > 1 else file.stem) for file in files)
    yield from _routes(arms)


def mixtures(arms: Sequence[Arm]) -> list[str]:
    """Notes on what makes runs hard to compare."""
    runs, notes = [run for arm in arms for run in arm.runs], []
    for key, hint in (("source_sha256", "code"), ("device", "device"), ("processor", "processor")):
        if len({run.manifest[key] for run in runs}) > 1:
            notes.append(f"note: the runs are of more than one {hint}")
    if len({run.step for run in runs}) > 1:
        notes.append("note: the runs differ in their number of steps")
    notes += [
        f"note: {arm.name} has a seed twice: n counts trainings"
        for arm in arms
        if len({run.seed for run in arm.runs}) < len(arm.runs)
    ]
    if 0 < (num_held_out := min(run.num_held_out for run in runs)) < FEW_HELD_OUT:
        notes.append(f"note: held-out losses are of few images ({num_held_out})")
    return notes


def constants(runs: Sequence[Run]) -> dict[str, float]:
    """The logged values that never change and are the same in all runs."""
    values: dict[str, list[float]] = {}
    for run in runs:
        for key, curve in run.curves.items():
            values.setdefault(key, []).extend(value for _, value in curve)
    return {key: logged[0] for key, logged in values.items() if len(logged) > 1 and len(set(logged)) == 1}


def standing(manifest: dict[str, Any], lines: Lines, total_steps: int, age_sec: float) -> str:
    """How far a run is and when it ends; its newest values are `age_sec` old."""
    said = [manifest["status"] + (f" ({manifest['reason']})" if manifest.get("reason") else "")]
    if failure := manifest.get("failure"):
        said.append(failure["reason"])
    if not lines:
        return "; ".join([*said, f"no line of {total_steps} steps yet"])
    step = lines[-1]["step"]
    trained, evaluated = (next((x[key] for x in reversed(lines) if key in x), 0.0) for key in CLOCK[2:])
    said.append(f"step {step:,} of {total_steps:,}")
    said.append(f"{_clock(trained)} of training, {_clock(evaluated)} of evaluation")
    if manifest["status"] == "running" and step:
        left = _clock((trained + evaluated) / step * (total_steps - step))
        said.append(f"about {left} left; newest values {_clock(age_sec)} ago")
    return "; ".join(said)


def pictures_of(run: Path) -> list[Path]:
    """The newest picture of the training, the one of all steps, and those of `sample.py`."""
    files = sorted(run.glob("samples/[!.]*.png"))  # hidden ones are being written
    # The page may be shared, and shows nothing from outside of the run.
    files = [file for file in files if file.is_file() and file.resolve().is_relative_to(run.resolve())]
    trained = [file for file in files if re.fullmatch(r"step_\d{8}", file.stem)]
    return trained[-1:] + [file for file in files if file not in trained]


def facts(manifest: dict[str, Any], lines: Lines, constant: dict[str, Any]) -> dict[str, str]:
    """What a run is made of, and its newest values."""
    cost, resolved = manifest["cost"], manifest["resolved"]
    values = {key: value for line in lines for key, value in line.items()}
    newest = {key: value for key, value in values.items() if key not in (*CLOCK, *constant)}
    numbers = {key: value for key, value in newest.items() if isinstance(value, int | float)}
    events = {key: [event["step"] for line in lines for event in line.get(key, ())] for key in EVENTS}
    speed = f"{cost['predicted_speedup']:.2f}x as fast as dense ones by FLOPs"
    if "speed_check" in manifest:
        speed += f"; measured: {describe_check(manifest['speed_check'])}"
    found = {
        "newest values": ", ".join(f"{key} {value:.4g}" for key, value in numbers.items()),
        **{key: ", ".join(map(str, steps)) for key, steps in events.items()},
        "did not change": ", ".join(f"{key} {value:g}" for key, value in constant.items()),
        "network": f"{cost['num_parameters'] / 1e6:.2f}M parameters",
        "routes": "; ".join(manifest["routes"]) or "none",
        "training steps": speed if manifest["routes"] else "",
        "precision": f"{resolved['mixed_precision']}, {'' if resolved['compile'] else 'un'}compiled",
        "started": ", ".join(f"at step {start['step']:,}" for start in manifest["starts"]),
    }
    return {key: value for key, value in found.items() if value}


def _environment(arm: Arm, run: Run) -> dict[str, str]:
    manifest = run.manifest
    changed = ", changed" if manifest["uncommitted_changes"] else ""
    return {
        "run": run.name,
        "arm": arm.name,
        "seed": str(run.seed),
        "status": f"{manifest['status']}, step {run.step:,}",
        "code": f"{manifest['commit'] or 'unknown'}{changed}",
        "on": f"{manifest['num_processes']} x {manifest['device']}, {manifest['processor']}",
        "torch": str(manifest["versions"]["torch"]),
        "command": manifest["command"],
    }


def _clock(sec: float) -> str:
    return f"{int(sec) // 3600}:{int(sec) // 60 % 60:02}:{int(sec) % 60:02}"


def panels_of(arms: Sequence[Arm], constant: Mapping[str, float]) -> dict[str, list[tuple[str, Arm, str]]]:
    """The lines (name, arm, key) of each panel: the losses of one run share a panel."""
    logged = (key for arm in arms for run in arm.runs for key in run.curves)
    keys = dict.fromkeys([*shown_keys(arms), *logged])  # losses and scores first
    keys = [k for k in keys if LEVEL not in k and ": " not in k and k not in constant][:MAX_PANELS]
    if len(arms) > 1:
        return {key: [(arm.name, arm, key) for arm in arms] for key in keys}
    (arm,) = arms
    together = [key for key in LOSSES if key in arm.runs[0].curves]
    panels = {"losses": [(key, arm, key) for key in together]} if len(together) > 1 else {}
    return panels | {key: [(key, arm, key)] for key in keys if not panels or key not in LOSSES}


def _curves(arms: Sequence[Arm], constant: Mapping[str, float]) -> Iterable[str]:
    """Panels against each axis, and the loss by noise level."""
    panels = panels_of(arms, constant)
    if len(arms) > 1 and panels:
        yield f'<img class="legend" alt="the lines of the arms" src="{_legend([arm.name for arm in arms])}">'
    for axis in AXES if panels else ():
        yield f'<div class="against-{axis}">'
        for title, of_panel in panels.items():
            drawn = [(name, arm.curve(key, axis)) for name, arm, key in of_panel]
            yield _figure(title, _drawn(drawn, axis, legend=len(arms) == 1))
        yield "</div>"
    for title, drawn in levels_of(arms).items():
        yield _figure(f"{title} by noise level", _drawn(drawn, "t", log=True, legend=False))


def levels_of(arms: Sequence[Arm]) -> dict[str, list[tuple[str, Points]]]:
    """The newest losses by noise level: (t, mean, minimum, maximum) over seeds, for all arms in order."""
    keys = dict.fromkeys(key for arm in arms for run in arm.runs for key in run.curves)
    found: dict[str, list[tuple[str, Points]]] = {}
    for key in keys:
        loss, is_level, t = key.partition(LEVEL)
        if is_level:
            of_arms = found.setdefault(loss, [(arm.name, []) for arm in arms])
            for arm, (_, points) in zip(arms, of_arms, strict=True):
                if values := arm.values(key):
                    points.append((float(t), sum(values) / len(values), min(values), max(values)))
    return {loss: [(name, sorted(points)) for name, points in of_arms] for loss, of_arms in found.items()}


def _line(i: int) -> dict[str, Any]:
    return {"color": f"C{i % 10}", "linestyle": STYLES[i // 3 % 4], "linewidth": 1.2}


def _drawn(curves: Sequence[tuple[str, Points]], axis: str, legend: bool, log: bool = False) -> str:
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
    return name.replace("$", r"\$")  # otherwise a formula


def _legend(names: Sequence[str]) -> str:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(max(2, 0.09 * max(map(len, names)) + 0.8), 0.22 * len(names) + 0.1))
    lines = [Line2D([], [], **_line(i)) for i in range(len(names))]
    figure.legend(lines, [_literal(name) for name in names], loc="center left", frameon=False, fontsize=9)
    return _as_svg(figure)


def _as_svg(figure: Any) -> str:
    import matplotlib

    drawn = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(drawn, format="svg", transparent=True)
    return _address("svg+xml", drawn.getvalue())


def _routes(arms: Sequence[Arm]) -> Iterable[str]:
    """A row of blocks for each arm, each as high as the share of tokens it processes in training."""
    for arm in arms:
        model = arm.runs[0].config["model"]
        if "depth" not in model:  # a backbone without blocks in a row
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
        said = "; ".join(arm.runs[0].manifest["routes"]) or "all tokens in all blocks"
        name = f"{arm.name}: {said}" if said not in arm.name and len(arms) > 1 else said
        yield f'<p>{escape(name)}</p><div class="blocks">{"".join(blocks)}</div>'


def _configuration(run: Run, name: str = "") -> str:
    text = escape(yaml.safe_dump(run.config, sort_keys=False))
    return f"<details><summary>configuration {escape(name)}</summary><pre>{text}</pre></details>"


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
