"""Kill runs at random moments, start them again, and compare the results with an undisturbed run."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.runs import ROOT, TINY
from tests.training.test_trainer import assert_same_run
from training.checkpoint import damage_of, steps_in

BIN = Path(sys.executable).parent
INJECT = Path(__file__).with_name("inject.py")
ENVIRONMENT = {**os.environ, "ACCELERATE_USE_CPU": "true"}
ONE = (sys.executable,)
TWO = (str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2")
FOUR = (*TWO[:-1], "4")
ALL_ENDED_WITHIN_SEC = 45  # torchrun waits 30 s after it signals its processes
STARTED_WITHIN_SEC = 120

# Log points, checkpoints and evaluations are at different steps on purpose.
OPTIONS = (*TINY, "run_name=r", "train.total_steps=240", "train.log_every=7", "train.save_every=5")
OPTIONS += ("train.eval_every=40",)

# Moments of a kill, and their relative frequencies; the last is a stop request, not a kill.
MOMENTS = {"starting": 1, "training": 2, "saving": 2, "asked to stop": 1}
# Launcher and overrides of a run.
VARIANTS = {
    "one process": (ONE,),
    "accumulation": (ONE, "train.micro_batch_size=2"),
    "compiled": (ONE, "train.compile=true"),
    "two processes": (TWO, "train.micro_batch_size=2"),
    "sharded": (TWO, "train.micro_batch_size=2", "train.parallel=fsdp"),
    "sharded by four": (FOUR, "train.parallel=fsdp"),
}


@dataclass
class Outcome:
    """Kills and results of the runs of a variant."""

    kills: Counter = field(default_factory=Counter)  # by moment
    compared: int = 0  # runs that were killed and later finished
    lost: list[str] = field(default_factory=list)  # descriptions of what was lost


def process_tree(process: subprocess.Popen) -> list[psutil.Process]:
    """Return a process and its descendants, oldest first; empty if it has ended."""
    whole = [psutil.Process(process.pid)] if process.poll() is None else []
    return whole + [child for parent in whole for child in parent.children(recursive=True)]


def kill(processes: list[psutil.Process]) -> None:
    for victim in processes:
        with suppress(psutil.NoSuchProcess):  # it has just ended
            victim.kill()


def program(launcher, *overrides, folder, fault=()) -> subprocess.CompletedProcess:
    """Run train.py on the tiny network to its end; fault: (name, step, process) to inject."""
    script = [str(part) for part in (INJECT, *fault)] if fault else [str(ROOT / "train.py")]
    command = [*launcher, *script, *TINY, "run_name=r", *overrides]
    options = {"cwd": folder, "env": ENVIRONMENT, "capture_output": True, "text": True, "timeout": 300}
    return subprocess.run(command, **options)


class KilledRun:
    """A run that is killed and started repeatedly.

    Args:
        folder: working directory of its processes; must not exist.
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
        """Run to the end without a kill."""
        if self.start().wait(STARTED_WITHIN_SEC * 5) != 0:
            raise AssertionError(f"{self.folder} did not finish:\n{self.output()[-3000:]}")

    def start_and_kill(self, moment: str, rng: random.Random) -> bool:
        """Start, wait for `moment`, kill; return False if the run had already ended."""
        before = self._last_start()
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
        whole = process_tree(process)
        if moment == "asked to stop":  # as a scheduler does
            process.terminate()
        else:  # all at once, as when a machine fails; or one worker or the launcher
            one_alone = len(whole) > 2 and rng.random() < 0.5
            kill([rng.choice(whole[:3])] if one_alone else whole)
        process.wait(ALL_ENDED_WITHIN_SEC)
        _, alive = psutil.wait_procs(whole, timeout=ALL_ENDED_WITHIN_SEC)
        if alive:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"{alive} still run {ALL_ENDED_WITHIN_SEC} s after a process ended")
        return bool(whole)

    def violations(self) -> list[str]:
        """Describe violations of what must hold at any moment; empty if there are none."""
        damages = {path: damage_of(path) for _, path in steps_in(self.run / "checkpoints")}
        wrong = [f"{path}: {damage}" for path, damage in damages.items() if damage]
        if self._last_start() and "status" not in self.manifest():
            wrong.append("manifest.json is incomplete")
        return wrong

    def _last_start(self) -> float:
        file = self.run / "config.yaml"  # written once per start
        return file.stat().st_mtime if file.exists() else 0.0

    def wait_for_training(self, process: subprocess.Popen, before: float = 0.0) -> None:
        deadline = time.monotonic() + STARTED_WITHIN_SEC
        while process.poll() is None and self._last_start() == before:
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.folder} did not start")
            time.sleep(0.01)


def differences(one: Path, other: Path) -> list[str]:
    """Describe a difference between two runs that should be equal; clocks are ignored."""
    try:
        assert_same_run(one, other)
    except AssertionError as error:
        return [f"{other}: {error}"]
    return []


def kill_often(
    folder: Path, name: str, num_kills: int, seed: int, progress: Callable[[], None] = lambda: None
) -> Outcome:
    """Kill runs of a variant num_kills times in all, finish each, and compare it with an undisturbed run."""
    rng, outcome = random.Random(seed), Outcome()
    whole = KilledRun(folder / "whole", *VARIANTS[name])
    whole.finish()
    while outcome.kills.total() < num_kills:
        killed = KilledRun(folder / f"killed_{outcome.compared}", *VARIANTS[name])
        while outcome.kills.total() < num_kills and killed.manifest().get("status") != "finished":
            (moment,) = rng.choices(list(MOMENTS), MOMENTS.values())
            if killed.start_and_kill(moment, rng):
                outcome.kills[moment] += 1
                progress()
            outcome.lost += killed.violations()
        killed.finish()
        outcome.compared += 1
        outcome.lost += differences(whole.run, killed.run)
    return outcome
