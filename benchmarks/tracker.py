"""How long a training waits for its tracker at a log point: a sound, slow or failing one, a server that never
answers.

    python -m benchmarks.tracker
    python -m benchmarks.tracker --lines 100

Between two lines the program computes for a few milliseconds, as a training does. The record goes to
benchmarks/results/.
"""

import argparse
import os
import socket
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.results import measured, write_results
from runtime.provenance import environment
from training import trackers

LINES = 300
ALLOWED_MS = 1.0
VALUES = dict.fromkeys(
    ("num_images", "loss", "grad_norm", "num_skipped_steps", "images_per_sec", "train_time_sec"), 1.0
)


class Slow:
    """A tracker that takes a second for each line."""

    def open(self) -> None:
        pass

    def log(self, values: dict[str, float], step: int) -> None:
        time.sleep(1.0)

    def close(self) -> None:
        pass


class Failing(Slow):
    """A tracker whose service is down."""

    def log(self, values: dict[str, float], step: int) -> None:
        raise ConnectionError("the service is down")


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tracker",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--lines", type=int, default=LINES, help=f"of each tracker; default {LINES}")
    num_lines = parser.parse_args().lines
    found = environment(torch.device("cpu"))
    rows = []
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as deaf:
        # Answers are never sent, and wandb is pointed at this server before it reads its settings, once.
        os.environ |= {
            "WANDB_BASE_URL": f"http://127.0.0.1:{deaf.getsockname()[1]}",
            "WANDB_API_KEY": "0" * 40,
        }
        wandb = partial(trackers.WandbTracker, run_name="r", folder=folder, project="p")
        kinds = {
            "TensorBoard": partial(trackers.TensorBoardTracker, str(Path(folder) / "tensorboard")),
            "a second for each line": Slow,
            "failing": Failing,
            "wandb, offline": partial(wandb, mode="offline"),
            "wandb, a server that never answers": partial(wandb, mode="online"),
        }
        for name, build in tqdm(kinds.items(), desc="tracker"):
            rows.append(measured(f"log(), {name}", "ms", log_times(build, num_lines)))
    print("| tracker | median | least | most | n |\n|---|--:|--:|--:|--:|")
    for row in rows:
        over = "" if row["median"] < ALLOWED_MS else f" (more than {ALLOWED_MS:g} ms)"
        print(
            f"| {row['what']} | {row['median']:.4f} ms{over} | {row['least']:.4f} ms | {row['most']:.2f} ms "
            f"| {row['n']} |"
        )
    write_results("tracker", rows, found)


def log_times(build: Callable[[], trackers.Tracker], num_lines: int) -> list[float]:
    """Return the milliseconds that log() took, line by line."""
    tracker, x = trackers.BackgroundTracker(build(), tqdm.write), torch.randn(256, 256)
    times = []
    for step in range(num_lines):
        start = time.perf_counter()
        tracker.log(VALUES, step)
        times.append(1000 * (time.perf_counter() - start))
        for _ in range(20):
            x = (x @ x).softmax(dim=1)
    tracker.close(within_sec=1.0)  # what is measured is log(): what is slow is left behind
    return times


if __name__ == "__main__":
    main()
