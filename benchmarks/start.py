"""How long a run takes from its command to its first step: uncompiled, with an empty compile cache, and
started again.

    python -m benchmarks.start                    the default run (digits), and DiT-S/2 on 256 tokens
    python -m benchmarks.start --repeats 1

Each start is a process of its own, `python train.py ...`; the clock stops when the line of the first step is
in metrics.jsonl. The record goes to benchmarks/results/.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.results import measured, write_results
from benchmarks.runs import Setting, write_latents
from runtime.provenance import PROJECT, environment

REPEATS = 3
ONE_STEP = (
    "train.total_steps=1",
    "train.log_every=1",
    "train.eval_every=null",
    "train.sample_every=null",
    "evaluation=none",
)


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.start",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--repeats", type=int, default=REPEATS, help=f"starts of each kind; default {REPEATS}"
    )
    repeats = parser.parse_args().repeats
    found = environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_latents(folder / "latents", Setting("", ()))
        runs = {
            "digits": ("model=tread",),
            "S/2": (
                "model=tread",
                "model/size=s_2",
                "data=latents",
                f"data.path={folder / 'latents'}",
                "train.batch_size=16",
            ),
        }
        seconds: dict[tuple[str, str], list[float]] = {}
        for repeat in tqdm(range(repeats), desc="start"):
            for name, overrides in runs.items():
                cache = folder / f"cache_{name.replace('/', '')}_{repeat}"
                for kind in ("uncompiled", "compiled, empty cache", "compiled, started again"):
                    output = folder / f"run_{len(list(folder.iterdir()))}"
                    compiled = f"train.compile={'false' if kind == 'uncompiled' else 'true'}"
                    seconds.setdefault((name, kind), []).append(start((*overrides, compiled), output, cache))
    rows = [measured(f"{name}: {kind}", "s", times) for (name, kind), times in seconds.items()]
    print("| from the command to the first step | median | least | most | n |\n|---|--:|--:|--:|--:|")
    for row in rows:
        print(
            f"| {row['what']} | {row['median']:.1f} s | {row['least']:.1f} s | {row['most']:.1f} s | "
            f"{row['n']} |"
        )
    write_results("start", rows, found)


def start(overrides: tuple[str, ...], output: Path, cache: Path) -> float:
    """Run one step in a new process; return the seconds from its start to its first line of metrics."""
    began = time.time()  # not perf_counter: compared with the time of a file
    command = [sys.executable, "train.py", *overrides, *ONE_STEP, f"output_dir={output}"]
    variables = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    result = subprocess.run(command, cwd=PROJECT, env=variables, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(command)} has failed:\n{result.stderr[-3000:]}")
    return (output / "metrics.jsonl").stat().st_mtime - began


if __name__ == "__main__":
    main()
