"""A page of one run: its curves, its pictures, what it is made of.

python -m training.report runs/NAME              writes it into the run's folder, as the run stands now
python -m training.report runs/NAME --serve      shows it in a browser, and again as the run goes on
"""

import argparse
import base64
import io
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from runtime.config import run_main, user_mistakes
from runtime.files import parse_json, read_bounded, write_text
from training.run_folder import RunFolder

REPORT, PORT, REFRESH_SEC = "report.html", 8000, 15
HOSTS = ("127.0.0.1", "localhost")
MAX_METRICS_BYTES, MAX_PICTURE_BYTES = 2**28, 2**26
LOSSES = ("loss", "val_loss_dense", "val_loss_dense_ema")
EVENTS = ("loss_spikes", "skipped_steps")
NO_CURVES = ("step", "num_images", "train_time_sec", "evaluation_time_sec")
STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 82rem; margin: auto; padding: 1rem; }
figure { display: inline-block; margin: 0 1rem 1rem 0; vertical-align: top; max-width: 100%; }
figure img { max-width: 100%; }
progress { width: 100%; }
th { text-align: left; font-weight: normal; opacity: .7; vertical-align: top; padding-right: 1rem; }
td, pre { overflow-wrap: anywhere; white-space: pre-wrap; }
@media (prefers-color-scheme: dark) { img[src*="svg"] { filter: invert(1) hue-rotate(180deg); } }
"""

Lines = list[dict[str, Any]]
Curves = dict[str, list[tuple[int, float]]]  # points (step, value) by key


def page(folder: RunFolder, refresh_sec: int | None = None) -> str:
    """Return the page, complete in one file.

    Args:
        refresh_sec: how often a browser asks for it again while the run is not finished.

    Raises:
        ValueError: a file of the run is damaged.
    """
    try:
        return _page(folder, refresh_sec)
    except (AttributeError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{folder.path} is not as a run writes it: {error!r}") from error


def _page(folder: RunFolder, refresh_sec: int | None) -> str:
    manifest, config, lines = folder.manifest(), folder.config(), metrics_of(folder.metrics_file)
    panels, constant = panels_of(lines)
    total_steps, step = int(config["train"]["total_steps"]), lines[-1]["step"] if lines else 0
    again = refresh_sec and manifest["status"] != "finished"
    name = escape(folder.path.resolve().name)
    age_sec = time.time() - folder.metrics_file.stat().st_mtime if lines else 0.0
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="refresh" content="{refresh_sec}">' if again else "",
            f"<title>{name}: step {step}</title><style>{STYLE}</style></head><body><h1>{name}</h1>",
            f"<p>{escape(standing(manifest, lines, total_steps, age_sec))}</p>",
            f'<progress max="{total_steps}" value="{step}"></progress>',
            *(_figure(key, _drawn(panel)) for key, panel in panels.items()),
            "<br>",
            *(_picture(file) for file in pictures_of(folder.path)),
            _table(facts(manifest, lines, constant)),
            "<details><summary>configuration</summary>",
            f"<pre>{escape(yaml.safe_dump(config, sort_keys=False))}</pre></details></body></html>\n",
        ]
    )


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


def panels_of(lines: Lines) -> tuple[dict[str, Curves], dict[str, float]]:
    """Return the curves of each panel by its name, and what has not changed."""
    points: Curves = {}
    for line in lines:
        for key, value in line.items():
            if key not in NO_CURVES and isinstance(value, int | float):
                points.setdefault(key, []).append((line["step"], value))
    constant = {
        key: found[0][1]
        for key, found in points.items()
        if len(found) > 1 and len({value for _, value in found}) == 1
    }
    panels = {"losses": {key: points[key] for key in LOSSES if key in points}}
    panels |= {key: {key: found} for key, found in points.items() if key not in (*LOSSES, *constant)}
    return {key: panel for key, panel in panels.items() if panel}, constant


def standing(manifest: dict[str, Any], lines: Lines, total_steps: int, age_sec: float) -> str:
    """Return how far the run is, and when it ends; `metrics.jsonl` was written so many seconds ago."""
    said = [manifest["status"] + (f" ({manifest['reason']})" if manifest.get("reason") else "")]
    if failure := manifest.get("failure"):
        said.append(failure["reason"])
    if not lines:
        return "; ".join([*said, f"no line of {total_steps} steps yet"])
    step, trained, evaluated = lines[-1]["step"], *(_newest(lines, key) for key in NO_CURVES[2:])
    said.append(f"step {step:,} of {total_steps:,}")
    said.append(f"{_clock(trained)} of training, {_clock(evaluated)} of evaluation")
    if manifest["status"] == "running" and step:
        left = _clock((trained + evaluated) / step * (total_steps - step))
        said.append(f"about {left} left; newest values {_clock(age_sec)} ago")
    return "; ".join(said)


def pictures_of(run: Path) -> list[Path]:
    """Return the newest picture of the training, that of all of them, and those of `sample.py`."""
    files = sorted(run.glob("samples/[!.]*.png"))  # hidden ones are being written
    # The page may be shared, and shows nothing from outside of the run.
    files = [file for file in files if file.is_file() and file.resolve().is_relative_to(run.resolve())]
    trained = [file for file in files if re.fullmatch(r"step_\d{8}", file.stem)]
    return trained[-1:] + [file for file in files if file not in trained]


def facts(manifest: dict[str, Any], lines: Lines, constant: dict[str, Any]) -> dict[str, str]:
    """Return what the run is made of."""
    cost, resolved = manifest["cost"], manifest["resolved"]
    values = {key: value for line in lines for key, value in line.items()}
    newest = {key: value for key, value in values.items() if key not in (*NO_CURVES, *constant)}
    numbers = {key: value for key, value in newest.items() if isinstance(value, int | float)}
    events = {key: [event["step"] for line in lines for event in line.get(key, ())] for key in EVENTS}
    speed = f"{cost['predicted_speedup']:.2f}x as fast as dense ones by FLOPs"
    if measured := manifest.get("speed_check", {}).get("measured_speedup"):
        speed += f", {measured:.2f}x as measured"
    found = {
        "newest values": ", ".join(f"{key} {value:.4g}" for key, value in numbers.items()),
        **{key: ", ".join(map(str, steps)) for key, steps in events.items()},
        "did not change": ", ".join(f"{key} {value:g}" for key, value in constant.items()),
        "command": manifest["command"],
        "network": f"{cost['num_parameters'] / 1e6:.2f}M parameters",
        "routes": "; ".join(manifest["routes"]) or "none",
        "training steps": speed if manifest["routes"] else "",
        "processes": f"{manifest['num_processes']} on {manifest['device']}, {manifest['processor']}",
        "precision": f"{resolved['mixed_precision']}, {'' if resolved['compile'] else 'un'}compiled",
        "code": f"{manifest['commit'] or 'unknown'}{', changed' if manifest['uncommitted_changes'] else ''}",
        "started": ", ".join(f"at step {start['step']:,}" for start in manifest["starts"]),
    }
    return {key: value for key, value in found.items() if value}


def _newest(lines: Lines, key: str) -> float:
    return next((line[key] for line in reversed(lines) if key in line), 0.0)


def _clock(sec: float) -> str:
    return f"{int(sec) // 3600}:{int(sec) // 60 % 60:02}:{int(sec) % 60:02}"


def _drawn(curves: Curves) -> str:
    """Return a picture of curves as the address of itself."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.0, 2.6), layout="constrained")
    axes = figure.subplots()
    for key, points in curves.items():
        axes.plot(*zip(*points, strict=True), ".-" if len(points) < 30 else "-", linewidth=1.2, label=key)
    axes.set(xlabel="step")
    axes.spines[["top", "right"]].set_visible(False)
    if len(curves) > 1:
        axes.legend(frameon=False, fontsize=8)
    drawn = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(drawn, format="svg", transparent=True)
    return _address("svg+xml", drawn.getvalue())


def _picture(file: Path) -> str:
    with file.open("rb") as opened:
        return _figure(file.stem, _address("png", read_bounded(opened, MAX_PICTURE_BYTES)))


def _figure(name: str, address: str) -> str:
    name = escape(name)
    return f'<figure><figcaption>{name}</figcaption><img alt="{name}" src="{address}"></figure>'


def _address(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _table(rows: dict[str, str]) -> str:
    cells = (f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in rows.items())
    return f"<table>{''.join(cells)}</table>"


class Handler(BaseHTTPRequestHandler):
    """Answers a browser on this machine with the page as the run stands then."""

    folder: RunFolder
    timeout = REFRESH_SEC  # of a connection that asks nothing

    def do_GET(self) -> None:
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        if self.path != "/" or host not in HOSTS:  # a page from elsewhere asks by another name
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            status, content = HTTPStatus.OK, page(self.folder, REFRESH_SEC)
        except (ValueError, OSError) as error:  # the run may be moved, and come back
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            content = f'<meta http-equiv="refresh" content="{REFRESH_SEC}">{escape(str(error))}'
        with suppress(ConnectionError):  # its window was closed
            self.send_response(status)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(content.encode())

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing of each request."""


def serve(folder: RunFolder, port: int) -> None:
    """Answer browsers until Ctrl-C.

    Raises:
        OSError: the port cannot be had.
    """
    Handler.folder = folder
    try:
        server = ThreadingHTTPServer((HOSTS[0], port), Handler)
    except (OSError, OverflowError) as error:
        raise OSError(f"--serve={port}: {error}; give another port, 0 takes a free one") from error
    with server, suppress(KeyboardInterrupt):
        port = server.server_port
        print(f"{folder.path}: http://{HOSTS[0]}:{port} (Ctrl-C ends it)", flush=True)
        print(f"From another machine: ssh -L {port}:{HOSTS[0]}:{port} THIS_MACHINE, then the same address")
        server.serve_forever()


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page, or serve it."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m training.report", None, __doc__, formatter_class=raw)
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("--serve", nargs="?", type=int, const=PORT, metavar="PORT", help=f"default: {PORT}")
    asked = parser.parse_args(arguments)
    folder = RunFolder(asked.run)
    with user_mistakes():
        folder.check_started()
        if asked.serve is not None:
            serve(folder, asked.serve)
        else:
            write_text(asked.run / REPORT, page(folder))
            print(asked.run / REPORT)


if __name__ == "__main__":
    run_main(main)
