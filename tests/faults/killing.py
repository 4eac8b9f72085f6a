"""Kill trainings with SIGKILL at random moments, start them again, and compare what comes out with one that
was not killed.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.runs import ROOT, TINY, metrics
from training.checkpoint import damage_of, latest_checkpoint, steps_in

BIN = Path(sys.executable).parent
INJECT = Path(__file__).with_name("inject.py")
ENVIRONMENT = {**os.environ, "ACCELERATE_USE_CPU": "true"}
ONE = (sys.executable,)
TWO = (str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2")
ALL_ENDED_WITHIN_SEC = 45  # torchrun waits half a minute for processes that it asked to end
STARTED_WITHIN_SEC = 120

# Log points, checkpoints and evaluations do not fall on the same steps, on purpose.
OPTIONS = (*TINY, "run_name=r", "train.total_steps=240", "train.log_every=7", "train.save_every=5")
OPTIONS += ("train.eval_every=40",)

# When a run is killed, and how often compared with the others; the last is a request, not a kill.
MOMENTS = {"starting": 1, "training": 2, "saving": 2, "asked to stop": 1}
# The launcher of a run, and its overrides.
VARIANTS = {
    "one process": (ONE,),
    "accumulation": (ONE, "train.micro_batch_size=2"),
    "compiled": (ONE, "train.compile=true"),
    "two processes": (TWO, "train.micro_batch_size=2"),
}


@dataclass
class Outcome:
    """What was done to the runs of a variant, and what became of them."""

    kills: Counter = field(default_factory=Counter)  # by moment
    compared: int = 0  # runs that were killed on the way and came to their end
    lost: list[str] = field(default_factory=list)  # what was not as it should be


def all_of(process: subprocess.Popen) -> list[psutil.Process]:
    """A process and those that it started, the eldest first; empty if it has ended."""
    whole = [psutil.Process(process.pid)] if process.poll() is None else []
    return whole + [child for parent in whole for child in parent.children(recursive=True)]


def kill(processes: list[psutil.Process]) -> None:
    for victim in processes:
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            continue  # it had just come to its end


def program(launcher, *overrides, folder, fault=()) -> subprocess.CompletedProcess:
    """Run train.py on the tiny network to its end; fault: what to inject, at which step, in which process."""
    script = [str(part) for part in (INJECT, *fault)] if fault else [str(ROOT / "train.py")]
    command = [*launcher, *script, *TINY, "run_name=r", *overrides]
    options = {"cwd": folder, "env": ENVIRONMENT, "capture_output": True, "text": True, "timeout": 300}
    return subprocess.run(command, **options)


class Killed:
    """A run in a folder of its own that is started again and again.

    Args:
        folder: the current directory of its processes.
    """

    def __init__(self, folder: Path, launcher: tuple[str, ...], *overrides: str):
        folder.mkdir(parents=True)
        self.folder, self.run, self.launcher, self.overrides = folder, folder / "runs/r", launcher, overrides

    def start(self) -> subprocess.Popen:
        command = [*self.launcher, str(ROOT / "train.py"), *OPTIONS, *self.overrides]
        with (self.folder / "output").open("a") as output:
            options = {"stdout": output, "stderr": output, "start_new_session": True}
            return subprocess.Popen(command, cwd=self.folder, env=ENVIRONMENT, **options)

    def output(self) -> str:
        return (self.folder / "output").read_text()

    def manifest(self) -> dict:
        file = self.run / "manifest.json"
        return json.loads(file.read_text()) if file.is_file() else {}

    def finish(self) -> None:
        """Run to the end, undisturbed."""
        if self.start().wait(STARTED_WITHIN_SEC * 5) != 0:
            raise AssertionError(f"{self.folder} did not finish:\n{self.output()[-3000:]}")

    def start_and_kill(self, moment: str, rng: random.Random) -> bool:
        """Start, wait for a moment, kill; False if the run had ended before."""
        before = self._last_begin()
        process = self.start()
        if moment == "starting":
            time.sleep(rng.uniform(0, 6))
        else:
            self.wait_for_training(process, before)
        if moment == "saving":
            while process.poll() is None and not list((self.run / "checkpoints").glob(".step_*")):
                time.sleep(0.0005)
            time.sleep(rng.uniform(0, 0.02))
        if moment in ("training", "asked to stop"):
            time.sleep(rng.uniform(0, 1.5))
        whole = all_of(process)
        if moment == "asked to stop":  # as a scheduler does
            process.terminate()
        else:  # all at once, as when a machine fails; or one of several alone, worker or launcher
            one_alone = len(whole) > 2 and rng.random() < 0.5
            kill([rng.choice(whole[:3])] if one_alone else whole)
        process.wait(ALL_ENDED_WITHIN_SEC)
        _, alive = psutil.wait_procs(whole, timeout=ALL_ENDED_WITHIN_SEC)
        if alive:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"{alive} still run {ALL_ENDED_WITHIN_SEC} s after another ended")
        return bool(whole)

    def wrong(self) -> list[str]:
        """What is not as it must be at any moment."""
        damages = {path: damage_of(path) for _, path in steps_in(self.run / "checkpoints")}
        wrong = [f"{path}: {damage}" for path, damage in damages.items() if damage]
        if self._last_begin() and "status" not in self.manifest():
            wrong.append("manifest.json is not whole")
        return wrong

    def _last_begin(self) -> float:
        file = self.run / "config.yaml"  # written once in each start
        return file.stat().st_mtime if file.exists() else 0.0

    def wait_for_training(self, process: subprocess.Popen, before: float = 0.0) -> None:
        deadline = time.monotonic() + STARTED_WITHIN_SEC
        while process.poll() is None and self._last_begin() == before:
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.folder} did not start")
            time.sleep(0.01)


def differences(one: Path, other: Path) -> list[str]:
    """What differs between two runs that should be the same, clocks aside."""
    checkpoints = latest_checkpoint(one), latest_checkpoint(other)
    different = []
    for name in ("net", "ema", "optimizer"):
        first, second = ((checkpoint / f"{name}.safetensors").read_bytes() for checkpoint in checkpoints)
        different += [] if first == second else [f"{name} of {other}"]
    return different + ([] if metrics(one) == metrics(other) else [f"metrics of {other}"])


def kill_often(
    folder: Path, name: str, num_kills: int, seed: int, progress: Callable[[], None] = lambda: None
) -> Outcome:
    """Kill runs of a variant so many times in all, bring each to its end, and compare it with one that was
    left alone.
    """
    rng, outcome = random.Random(seed), Outcome()
    whole = Killed(folder / "whole", *VARIANTS[name])
    whole.finish()
    while outcome.kills.total() < num_kills:
        killed = Killed(folder / f"killed_{outcome.compared}", *VARIANTS[name])
        while outcome.kills.total() < num_kills and killed.manifest().get("status") != "finished":
            (moment,) = rng.choices(list(MOMENTS), MOMENTS.values())
            if killed.start_and_kill(moment, rng):
                outcome.kills[moment] += 1
                progress()
            outcome.lost += killed.wrong()
        killed.finish()
        outcome.compared += 1
        outcome.lost += differences(whole.run, killed.run)
    return outcome
