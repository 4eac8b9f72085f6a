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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.runs import ROOT, metrics
from training.checkpoint import damage_of, latest_checkpoint, steps_in

BIN = Path(sys.executable).parent
ENVIRONMENT = {**os.environ, "ACCELERATE_USE_CPU": "true"}
ONE = (sys.executable,)
TWO = (str(BIN / "torchrun"), "--standalone", "--nproc_per_node", "2")
ALL_ENDED_WITHIN_SEC = 45  # torchrun waits half a minute for processes that it asked to end
STARTED_WITHIN_SEC = 120

# Log points, checkpoints and evaluations do not fall on the same steps, on purpose.
OPTIONS = (
    "data=synthetic",
    "run_name=r",
    "model.hidden_size=32",
    "model.num_heads=4",
    "model.patch_size=2",
    "train.total_steps=240",
    "train.batch_size=8",
    "train.log_every=7",
    "train.save_every=5",
    "train.eval_every=40",
    "train.mixed_precision=no",
    "train.compile=false",
)

# When a run is killed, and how often compared with the others; the last is a request, not a kill.
MOMENTS = {"starting": 1, "training": 2, "saving": 2, "asked to stop": 1}


@dataclass(frozen=True)
class Variant:
    """How a run is started."""

    launcher: Sequence[str]
    overrides: Sequence[str] = ()


VARIANTS = {
    "one process": Variant(ONE),
    "accumulation": Variant(ONE, ("train.micro_batch_size=2",)),
    "compiled": Variant(ONE, ("train.compile=true",)),
    "two processes": Variant(TWO, ("train.micro_batch_size=2",)),
}


@dataclass
class Outcome:
    """What was done to the runs of a variant, and what became of them."""

    kills: Counter = field(default_factory=Counter)  # by moment
    compared: int = 0  # runs that were killed on the way and came to their end
    lost: list[str] = field(default_factory=list)  # what was not as it should be


class Killed:
    """A run in a folder of its own that is started again and again.

    Args:
        folder: the current directory of its processes.
    """

    def __init__(self, folder: Path, variant: Variant):
        folder.mkdir(parents=True)
        self.folder, self.run, self.variant = folder, folder / "runs/r", variant

    def start(self) -> subprocess.Popen:
        command = [*self.variant.launcher, str(ROOT / "train.py"), *OPTIONS, *self.variant.overrides]
        with (self.folder / "output").open("a") as output:
            return subprocess.Popen(
                command,
                cwd=self.folder,
                env=ENVIRONMENT,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def finish(self) -> None:
        """Run to the end, undisturbed."""
        process = self.start()
        if process.wait(STARTED_WITHIN_SEC * 5) != 0:
            raise AssertionError(
                f"{self.folder} did not finish:\n{(self.folder / 'output').read_text()[-3000:]}"
            )

    def is_finished(self) -> bool:
        file = self.run / "manifest.json"
        return file.is_file() and json.loads(file.read_text()).get("status") == "finished"

    def start_and_kill(self, moment: str, rng: random.Random) -> bool:
        """Start, wait for a moment, kill; return whether there was something left to kill."""
        before = self._last_begin()
        process = self.start()
        if moment == "starting":
            time.sleep(rng.uniform(0, 6))
        else:
            self.wait_for_training(process, before)
        if moment == "training":
            time.sleep(rng.uniform(0, 1.5))
        if moment == "saving":
            self._wait_for_saving(process)
            time.sleep(rng.uniform(0, 0.02))
        if moment == "asked to stop":
            time.sleep(rng.uniform(0, 1.5))
        was_running = process.poll() is None
        if moment == "asked to stop":
            self._ask(process)
        else:
            self._kill(process, rng)
        return was_running

    def wrong(self) -> list[str]:
        """Return what is not as it must be at any moment."""
        found = [
            f"{path}: {damage}"
            for _, path in steps_in(self.run / "checkpoints")
            if (damage := damage_of(path))
        ]
        if self._last_begin() and "status" not in json.loads((self.run / "manifest.json").read_text()):
            found.append("manifest.json is not whole")
        return found

    def _last_begin(self) -> float:
        file = self.run / "config.yaml"  # written once in each start
        return file.stat().st_mtime if file.exists() else 0.0

    def wait_for_training(self, process: subprocess.Popen, before: float) -> None:
        deadline = time.monotonic() + STARTED_WITHIN_SEC
        while process.poll() is None and self._last_begin() == before:
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.folder} did not start")
            time.sleep(0.01)

    def _wait_for_saving(self, process: subprocess.Popen) -> None:
        while process.poll() is None and not list((self.run / "checkpoints").glob(".step_*")):
            time.sleep(0.0005)

    def _ask(self, process: subprocess.Popen) -> None:
        """Send SIGTERM, as a scheduler does."""
        whole = [psutil.Process(process.pid)] if process.poll() is None else []
        whole += [child for parent in whole for child in parent.children(recursive=True)]
        process.terminate()
        process.wait(ALL_ENDED_WITHIN_SEC)
        self._wait_for_all(process, whole)

    def _kill(self, process: subprocess.Popen, rng: random.Random) -> None:
        """Kill all at once, as when a machine fails; or one of several alone, worker or launcher."""
        whole = [psutil.Process(process.pid)] if process.poll() is None else []
        whole += [child for parent in whole for child in parent.children(recursive=True)]
        one_alone = len(whole) > 2 and rng.random() < 0.5
        for victim in [rng.choice(whole[:3])] if one_alone else whole:
            try:
                victim.kill()
            except psutil.NoSuchProcess:
                continue  # it had just come to its end
        process.wait()
        self._wait_for_all(process, whole)

    def _wait_for_all(self, process: subprocess.Popen, whole: list[psutil.Process]) -> None:
        _, alive = psutil.wait_procs(whole, timeout=ALL_ENDED_WITHIN_SEC)
        if alive:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(
                f"{len(alive)} process(es) still run {ALL_ENDED_WITHIN_SEC} s after another ended"
            )


def differences(one: Path, other: Path) -> list[str]:
    """Return what differs between two runs that should be the same, clocks aside."""
    found = []
    checkpoints = latest_checkpoint(one), latest_checkpoint(other)
    for name in ("net", "ema", "optimizer"):
        files = [checkpoint / f"{name}.safetensors" for checkpoint in checkpoints]
        if files[0].read_bytes() != files[1].read_bytes():
            found.append(f"{name} of {other}")
    if metrics(one) != metrics(other):
        found.append(f"metrics of {other}")
    return found


def kill_often(
    folder: Path, variant: Variant, num_kills: int, seed: int, progress: Callable[[], None] = lambda: None
) -> Outcome:
    """Kill runs of a variant so many times in all, bring each to its end, and compare it with one that was
    left alone.
    """
    rng, outcome = random.Random(seed), Outcome()
    whole = Killed(folder / "whole", variant)
    whole.finish()
    number = 0
    while sum(outcome.kills.values()) < num_kills:
        killed = Killed(folder / f"killed_{number}", variant)
        number += 1
        while sum(outcome.kills.values()) < num_kills and not killed.is_finished():
            moment = rng.choices(list(MOMENTS), MOMENTS.values())[0]
            if killed.start_and_kill(moment, rng):
                outcome.kills[moment] += 1
                progress()
            outcome.lost += killed.wrong()
        killed.finish()
        outcome.compared += 1
        outcome.lost += differences(whole.run, killed.run)
    return outcome
