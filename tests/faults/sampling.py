"""Kill sample.py at random moments, on one and two processes in turn, and compare the file with that of a run
that was left alone.

    python -m tests.faults.sampling run=runs/NAME num_samples=2000 --kills 10
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.faults.killing import ENVIRONMENT, ONE, TWO
from tests.runs import ROOT

LAUNCHERS = {"one process": ONE, "two processes": TWO}
STARTED_WITHIN_SEC, ENDED_WITHIN_SEC = 120, 3600


@dataclass
class Outcome:
    """After how many finished parts kills came, and what was not as it must be."""

    parts_at_kill: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def start(launcher: Sequence[str], output: Path, asked: Sequence[str]) -> subprocess.Popen:
    """Start sample.py."""
    command = [*launcher, str(ROOT / "sample.py"), *asked, f"output={output}"]
    with output.with_suffix(".log").open("a") as log:
        return subprocess.Popen(command, env=ENVIRONMENT, stdout=log, stderr=log, start_new_session=True)


def parts_of(output: Path) -> set[str]:
    """Return the names of the finished parts."""
    return {file.name for file in output.with_name(f"{output.name}.partial").glob("[0-9]*.npz")}


def kill(process: subprocess.Popen) -> None:
    """Kill all processes of a launch at once."""
    whole = [psutil.Process(process.pid)]
    whole += whole[0].children(recursive=True)
    for victim in whole:
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            continue  # it had just come to its end
    process.wait()
    psutil.wait_procs(whole, timeout=30)


def kill_often(folder: Path, asked: Sequence[str], num_kills: int, mean_sec: float, seed: int = 0) -> Outcome:
    """Draw once undisturbed, and once killed so many times: after the first part of each start and a random
    time, of `mean_sec` on average.
    """
    rng, outcome = random.Random(seed), Outcome()
    whole, killed = folder / "whole.npz", folder / "killed.npz"
    if start(ONE, whole, asked).wait(ENDED_WITHIN_SEC):
        raise AssertionError(f"{whole} was not drawn:\n{whole.with_suffix('.log').read_text()[-2000:]}")
    for number in range(num_kills):
        before, launcher = parts_of(killed), list(LAUNCHERS.values())[number % 2]
        process = start(launcher, killed, asked)
        deadline = time.monotonic() + STARTED_WITHIN_SEC
        while process.poll() is None and parts_of(killed) == before and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(rng.expovariate(1 / mean_sec))
        if process.poll() is not None:
            log = killed.with_suffix(".log").read_text()[-2000:]
            outcome.wrong.append(f"start {number} ended by itself:\n{log}")
            break
        kill(process)
        after = parts_of(killed)
        outcome.parts_at_kill.append(len(after))
        if not before < after:
            outcome.wrong.append(f"start {number} lost {sorted(before - after)}, made {len(after - before)}")
    if start(ONE, killed, asked).wait(ENDED_WITHIN_SEC):
        outcome.wrong.append(killed.with_suffix(".log").read_text()[-2000:])
    elif whole.read_bytes() != killed.read_bytes():
        outcome.wrong.append("the files differ")
    return outcome


def main() -> None:
    """Kill, compare and print."""
    parser = argparse.ArgumentParser("python -m tests.faults.sampling", description=__doc__)
    parser.add_argument("asked", nargs="+", metavar="KEY=VALUE", help="keys of sample.py")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument(
        "--mean-sec", type=float, default=5.0, help="from the first part to a kill, on average"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        outcome = kill_often(Path(folder), options.asked, options.kills, options.mean_sec, options.seed)
    print(f"{len(outcome.parts_at_kill)} kills, after {outcome.parts_at_kill} finished parts")
    print("\n".join(outcome.wrong) or "the file is bitwise that of an undisturbed run")
    sys.exit(bool(outcome.wrong))


if __name__ == "__main__":
    main()
