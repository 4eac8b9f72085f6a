"""All measurements that need a GPU, in one command: stages of at most eight minutes, recorded row by row.

    python -m benchmarks.gpu OUT                    all stages, in this order; an estimated hour on an H200
    python -m benchmarks.gpu OUT step sample        some of check, step, sample, families
    python -m benchmarks.gpu OUT --tiny             all of them in minutes, at sizes that a CPU can do
    python -m benchmarks.gpu --collect OUT          records to benchmarks/results/, figures to the pages

OUT gets a record and a log of each stage, written after every row. The same command resumes where it was
stopped, and measures again what has failed. What the project has recorded of the same device and torch is
left out, unless `--again` is given. benchmarks/README.md says what each stage does.
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

LIMIT_SEC, GRACE_SEC = 420, 60  # of a stage: when its rows should have ended, and when it is ended
TIME_IS_UP, DEVICE_FAILED = 3, 4
ENDS = {
    0: "done",
    1: "some rows have failed",
    TIME_IS_UP: "time is up: the same command resumes",
    DEVICE_FAILED: "an error of CUDA has ended it: the same command goes on with the other rows",
}


class Stage(NamedTuple):
    """What measures each setting, from short to long, and how its rows are shown."""

    plan: Callable[[torch.device, bool], dict[str, Callable[[], Rows]]]  # device, tiny
    columns: dict[str, str]


STAGES = {
    "check": Stage(check.plan, check.COLUMNS),
    "step": Stage(train_step.plan, train_step.COLUMNS),
    "sample": Stage(sampling.plan, sampling.COLUMNS),
    "families": Stage(families.plan, families.COLUMNS),
}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The request of the command line."""
    parser = program_parser("benchmarks.gpu", __doc__)
    parser.add_argument("out", type=Path, help="folder of the records")
    parser.add_argument("stages", nargs="*", metavar="stage", help="none: all")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: the same code in seconds")
    parser.add_argument("--limit", type=float, default=LIMIT_SEC, help="seconds for each stage")
    parser.add_argument("--again", action="store_true", help="measure what is recorded in the project, too")
    parser.add_argument("--here", action="store_true", help="run one stage in this process, without a log")
    parser.add_argument("--collect", action="store_true", help="put the records of OUT into the project")
    parser.add_argument("--into", type=Path, default=PROJECT, help="with --collect: a copy of the project")
    asked = parser.parse_intermixed_args(arguments)
    if unknown := set(asked.stages) - set(STAGES):
        parser.error(f"{', '.join(sorted(unknown))}: the stages are {', '.join(STAGES)}")
    asked.stages = asked.stages or list(STAGES)
    return asked


def main() -> None:
    """Run stages, or collect their records."""
    asked = parse()
    if asked.collect:
        columns = {name: stage.columns for name, stage in STAGES.items()}
        collect(asked.out, columns, asked.into, asked.tiny)
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.here:
        sys.exit(run_stage(asked.stages[0], asked.out, asked.tiny, asked.limit, asked.again))
    options = ["--tiny"] * asked.tiny + ["--again"] * asked.again
    ends = {name: run_apart(name, asked.out, asked.limit, *options) for name in asked.stages}
    for name, end in ends.items():
        print(f"\n{name}: {end}")
        for file in asked.out.glob(f"gpu_{name}_*.csv"):
            print(aligned(markdown(read_results(file), STAGES[name].columns)))
    sys.exit(any(end != "done" for end in ends.values()))


def run_apart(name: str, out: Path, limit_sec: float, *options: str) -> str:
    """Run a stage in a process of its own, so that none brings down another; how it ended, in words."""
    command = [sys.executable, "-m", "benchmarks.gpu", str(out), name, "--here", f"--limit={limit_sec}"]
    command += options
    print(f"\n{name}: the log is {out / name}.log", flush=True)
    with (
        (out / f"{name}.log").open("ab") as log,
        subprocess.Popen(
            command, cwd=PROJECT, process_group=0, stdout=log, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            process.wait(limit_sec + GRACE_SEC)
        except subprocess.TimeoutExpired:
            return "cut off within a row: the same command resumes"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and all that it has started
    return ENDS.get(process.returncode, f"ended with status {process.returncode}")


def run_stage(name: str, out: Path, tiny: bool, limit_sec: float, again: bool = False) -> int:
    """Measure setting after setting while there is time.

    Args:
        again: measure what the committed record of this device has, too.

    Returns:
        0; 1 if rows have failed; TIME_IS_UP; DEVICE_FAILED.
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
    # What failed or was cut off is measured again when all others have had their turn.
    for setting, measure in sorted(settings.items(), key=lambda item: item[0] in record.started()):
        if setting in record.done():
            continue
        row_start = time.perf_counter()
        if row_start - start + row_sec > limit_sec:  # one takes about as long as the one before
            return TIME_IS_UP
        record.add(setting, [{"failed": NOT_ENDED}])
        print(setting, flush=True)
        try:
            rows = measure()
        except (Exception, UserError) as error:  # the other settings are worth the time of the device
            traceback.print_exc()
            rows = [{"failed": " ".join(f"{type(error).__name__}: {error}".split())[:300]}]
        row_sec = time.perf_counter() - row_start
        record.add(setting, rows)
        print(f"{aligned(markdown(rows, stage.columns))}\n({row_sec:.0f} s)", flush=True)
        if not clear(device):
            print(f"{setting}: CUDA does not go on in this process; the same command resumes", flush=True)
            return DEVICE_FAILED
    return int(not settings.keys() <= record.done())


def clear(device: torch.device) -> bool:
    """Free the memory of a setting; False where an error of CUDA has broken the process."""
    gc.collect()  # compiled blocks refer to themselves
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
