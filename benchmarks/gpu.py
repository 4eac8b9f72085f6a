"""All measurements that need a GPU, in one command: stages with a time limit, recorded row by row.

    python -m benchmarks.gpu OUT                    all stages, in this order; an estimated hour on an H200
    python -m benchmarks.gpu OUT step sample        some of check, step, sample, families, twins
    python -m benchmarks.gpu OUT --tiny             all stages in minutes, at sizes for a CPU
    python -m benchmarks.gpu --collect OUT          copy records to the project, write tables to RESULTS.md

A stage ends within nine minutes, `twins` within 32. OUT gets a record and a log of each stage, written after
every row. Run the same command again to resume and to repeat failed settings. Settings that the project has
recorded for the same device and torch are skipped unless `--again` is given; `twins` skips what OUT has.
benchmarks/README.md explains each stage.
"""

import argparse
import gc
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks import check, families, sampling, train_step
from benchmarks.collect import collect
from benchmarks.processes import program_parser
from benchmarks.results import NOT_ENDED, RESULTS, Record, Rows, done_in, markdown, read_results
from runtime.config import run_main
from runtime.errors import UserError
from runtime.machine import start_process
from runtime.provenance import PROJECT, environment
from runtime.tables import aligned

GRACE_SEC = 60  # from the limit of a stage to SIGTERM; and from there to SIGKILL, to save its trainings
TIME_IS_UP, DEVICE_FAILED = 3, 4
ENDS = {
    0: "done",
    1: "some rows failed",
    TIME_IS_UP: "time is up: run the same command again to resume",
    DEVICE_FAILED: "stopped by a CUDA error: run the same command again for the other rows",
}


class Stage(NamedTuple):
    """A function that plans the measurements of a stage, and the columns of its table."""

    plan: Callable[[torch.device, bool], dict[str, Callable[[], Rows]]]  # (device, tiny) -> measurements
    columns: dict[str, str]  # key -> format


STAGES = {
    "check": Stage(check.plan, check.COLUMNS),
    "step": Stage(train_step.plan, train_step.COLUMNS),
    "sample": Stage(sampling.plan, sampling.COLUMNS),
    "families": Stage(families.plan, families.COLUMNS),
}
# Stages that are separate programs, called as `python -m MODULE OUT ARGUMENTS [--tiny]`.
PROGRAMS = {"twins": ("study.twins", "glyphs-s2", "--jobs=4")}
NAMES = (*STAGES, *PROGRAMS)
LIMITS_SEC = dict.fromkeys(STAGES, 420) | {"twins": 1800}  # a stage starts no setting after its limit


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = program_parser("benchmarks.gpu", __doc__)
    parser.add_argument("out", type=Path, help="folder of the records")
    parser.add_argument("stages", nargs="*", metavar="stage", help=f"{', '.join(NAMES)} (default: all)")
    parser.add_argument("--tiny", action="store_true", help="rehearse the same code at small sizes")
    parser.add_argument("--limit", type=float, help="seconds for each stage (default: 420; twins: 1800)")
    parser.add_argument("--again", action="store_true", help="repeat settings that the project has recorded")
    parser.add_argument("--here", action="store_true", help="run one stage in this process, without a log")
    parser.add_argument("--collect", action="store_true", help="copy the records of OUT into the project")
    parser.add_argument("--into", type=Path, default=PROJECT, help="with --collect: a copy of the project")
    request = parser.parse_intermixed_args(arguments)
    choices = STAGES if request.here else NAMES
    if unknown := set(request.stages).difference(choices):
        parser.error(f"stage {', '.join(sorted(unknown))}: must be one of {', '.join(choices)}")
    request.stages = request.stages or list(choices)
    request.limits = LIMITS_SEC if request.limit is None else dict.fromkeys(NAMES, request.limit)
    return request


def main() -> None:
    """Run stages, or collect their records."""
    request = parse()
    if request.collect:
        columns = {name: stage.columns for name, stage in STAGES.items()}
        collect(request.out, columns, request.into, request.tiny)
        return
    request.out.mkdir(parents=True, exist_ok=True)
    calls = [
        (name, request.out, request.tiny, request.limits[name], request.again) for name in request.stages
    ]
    if request.here:
        sys.exit(run_stage(*calls[0]))
    ends = {call[0]: launch_stage(*call) for call in calls}
    for name, end in ends.items():
        print(f"\n{name}: {end}")
        for file in request.out.glob(f"gpu_{name}_*.csv"):
            print(aligned(markdown(read_results(file), STAGES[name].columns)))
    sys.exit(any(end != "done" for end in ends.values()))


def launch_stage(name: str, out: Path, tiny: bool, limit_sec: float, again: bool = False) -> str:
    """Run a stage in a separate process, so that stages cannot break each other. Return its end in words."""
    here = ("benchmarks.gpu", name, "--here", f"--limit={limit_sec:g}", *["--again"] * again)
    module, *arguments = PROGRAMS.get(name, here)
    command = [sys.executable, "-m", module, str(out), *arguments, *["--tiny"] * tiny]
    print(f"\n{name}: the log is {out / name}.log", flush=True)
    with (out / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(command, cwd=PROJECT, process_group=0, stdout=log, stderr=log)
    with process:
        try:
            process.wait(limit_sec + GRACE_SEC)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SEC)
            return ENDS[TIME_IS_UP]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with its child processes
    return ENDS.get(process.returncode, f"ended with status {process.returncode}")


def run_stage(name: str, out: Path, tiny: bool, limit_sec: float, again: bool = False) -> int:
    """Measure one setting after the other within the time limit.

    Args:
        again: True repeats settings that the committed record of this device has.

    Returns:
        0; 1 if rows failed; TIME_IS_UP; DEVICE_FAILED.
    """
    start, row_sec, stage = time.perf_counter(), 0.0, STAGES[name]
    device = start_process().device
    record = Record(f"gpu_{name}", out, environment(device) | {"tiny": tiny})
    settings = stage.plan(device, tiny)
    committed = RESULTS / record.file.name
    if committed.exists() and not (tiny or again):
        recorded = done_in(read_results(committed))
        print(f"{len(settings.keys() & recorded)} settings are recorded in {committed}", flush=True)
        settings = {setting: measure for setting, measure in settings.items() if setting not in recorded}
    # Settings that failed or were interrupted come last.
    for setting, measure in sorted(settings.items(), key=lambda item: item[0] in record.started()):
        if setting in record.done():
            continue
        row_start = time.perf_counter()
        if row_start - start + row_sec > limit_sec:  # a setting takes about as long as the previous one
            return TIME_IS_UP
        record.add(setting, [{"failed": NOT_ENDED}])
        print(setting, flush=True)
        try:
            rows = measure()
        except (Exception, UserError) as error:  # continue with the other settings
            traceback.print_exc()
            rows = [{"failed": " ".join(f"{type(error).__name__}: {error}".split())[:300]}]
        row_sec = time.perf_counter() - row_start
        record.add(setting, rows)
        print(f"{aligned(markdown(rows, stage.columns))}\n({row_sec:.0f} s)", flush=True)
        if not clear(device):
            print(f"{setting}: CUDA failed in this process; run the same command again", flush=True)
            return DEVICE_FAILED
    return int(not settings.keys() <= record.done())


def clear(device: torch.device) -> bool:
    """Free the memory of a setting. False if a CUDA error has broken the process."""
    gc.collect()  # compiled blocks contain reference cycles
    if device.type == "cuda":
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:  # every further call raises the same error
            traceback.print_exc()
            return False
    return True


if __name__ == "__main__":
    run_main(main)
