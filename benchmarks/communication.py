"""What the processes of a training send to each other, and what that takes.

    python -m benchmarks.communication                    measure S/2 with 2 and 4 processes on this machine
    python -m benchmarks.communication model/size=b_2     the same with other keys of train.py
    python -m benchmarks.communication --predict          compute XL/2 and a network of 3B on 8 to 512 GPUs

Bytes are those of the loopback interface (Linux, gloo) in a step, of all processes together. "Compute" is a
step of DDP that does not synchronise. benchmarks/README.md explains the prediction.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.processes import program_parser
from benchmarks.results import RESULTS, Record, Rows, markdown
from benchmarks.runs import QUIET, Setting, compose, write_latents
from builders.trainer import build_trainer
from models import cost_of
from runtime.machine import start_process
from runtime.provenance import PROJECT, environment
from runtime.tables import aligned
from training.run_folder import RunFolder
from training.sharding import no_sync
from training.trainer import Trainer

NUM_PROCESSES, PARALLEL, TURNS = (2, 4), ("ddp", "fsdp"), 5
# Bytes that a process sends in a step, as a multiple of (n - 1) / n and the bytes of the weights in fp32.
# DDP sums gradients: a reduce-scatter and an all-gather. FSDP gathers the weights in the forward and in the
# backward pass, and reduces and scatters the gradients.
PASSES = {"ddp": 2, "fsdp": 3}
# Bytes per second in each direction: NVLink between 8 H100s, and the 8 network cards of 400 Gb/s of a node,
# which rings use all at once.
NVLINK, NETWORK, GPUS_PER_NODE = 450e9, 8 * 50e9, 8
PEAK, UTILISATION = 989e12, 0.42  # FLOPs per second; measured for XL/2 on an H200
GPUS = (8, 64, 512)
SIZES = {
    "XL/2": ("model/size=xl_2",),
    "3B": ("model/size=xl_2", "model.hidden_size=2304", "model.depth=32", "model.num_heads=18"),
}
COLUMNS = {
    "processes": "{}",
    "parallel": "{}",
    "mib": "{:.1f}",
    "predicted_mib": "{:.1f}",
    "ms": "{:.0f}",
    "compute_ms": "{:.0f}",
    "share": "{:.0%}",
    "n": "{}",
}


def main() -> None:
    """Measure, or predict."""
    parser = program_parser("benchmarks.communication", __doc__)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="keys of train.py")
    parser.add_argument("--predict", action="store_true", help="print a prediction for GPUs")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    request = parser.parse_intermixed_args()
    if request.predict:
        rows = predictions()
        print(markdown(rows, dict.fromkeys(rows[0], "{}")))
    elif request.worker:
        work(request.worker, request.overrides)
    else:
        record = Record("communication", RESULTS, environment(torch.device("cpu")))
        rows = measure(request.overrides or ["model/size=s_2", "train.batch_size=4"])
        record.add(" ".join(request.overrides) or "S/2", rows)
        print(aligned(markdown(rows, COLUMNS)))


def measure(overrides: Sequence[str]) -> Rows:
    """Train some steps in each way; return a row for each."""
    rows = []
    for n in NUM_PROCESSES:
        for parallel in PARALLEL:
            with tempfile.TemporaryDirectory() as folder:
                write_latents(Path(folder) / "latents", Setting("", ()))
                keys = [*QUIET, *overrides, "data=latents_published", f"data.path={folder}/latents"]
                keys += ["model=tread", "train.micro_batch_size=1", f"train.parallel={parallel}"]
                launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
                command = [*launcher, f"--nproc_per_node={n}", "-m", "benchmarks.communication"]
                variables = {**os.environ, "ACCELERATE_USE_CPU": "true"}
                subprocess.run([*command, "--worker", folder, *keys], check=True, cwd=PROJECT, env=variables)
                rows.append({"processes": n, **json.loads((Path(folder) / "row.json").read_text())})
        of_ddp = next(row for row in rows if row["processes"] == n)
        for row in rows[-len(PARALLEL) :]:
            row["compute_ms"] = of_ddp["compute_ms"]
            row["share"] = 1 - row["compute_ms"] / row["ms"]
    return rows


def work(folder: Path, overrides: Sequence[str]) -> None:
    """Train as one of several processes; the first writes the row."""
    launch, experiment = start_process(), compose(overrides)
    run = RunFolder(folder / "run")
    run.lock(launch)
    trainer = build_trainer(experiment, run, experiment.data(launch), launch)
    batches = trainer.batches.from_step(0)
    parallel, n = experiment.train.parallel, launch.world_size

    def step() -> None:
        trainer.train_step(next(batches))

    def compute() -> None:
        with no_sync(trainer.precond.net):
            for batch in next(batches):
                trainer.loss(
                    trainer.precond, batch.x, batch.class_labels, generator=batch.generator
                ).mean().backward()
        trainer.net.zero_grad()

    row: dict[str, Any] = {"parallel": parallel, "n": TURNS}
    sec, num_bytes = timed(step, trainer)
    row |= {"ms": 1000 * sec, "mib": num_bytes / 2**20}
    if parallel == "ddp":
        row["compute_ms"] = 1000 * timed(compute, trainer)[0]
    # (n - 1) / n of the weights from each of n processes
    num_weights = cost_of(experiment.meta_net).num_parameters
    row["predicted_mib"] = PASSES[parallel] * (n - 1) * 4 * num_weights / 2**20
    if launch.is_main:
        (folder / "row.json").write_text(json.dumps(row))
    launch.barrier()
    run.unlock()


def timed(function: Callable[[], None], trainer: Trainer) -> tuple[float, float]:
    """Return the median seconds and bytes of a call, after a warm-up."""
    seconds, counts = [], []
    for _ in range(TURNS + 1):
        trainer.launch.barrier()
        start, before = time.perf_counter(), loopback_bytes()
        function()
        trainer.launch.barrier()
        seconds.append(time.perf_counter() - start)
        counts.append(loopback_bytes() - before)
    return median(seconds[1:]), median(counts[1:])


def loopback_bytes() -> int:
    """Return the bytes that this machine has sent to itself."""
    (line,) = [
        line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")
    ]
    return int(line.split(":")[1].split()[0])


def predictions() -> Rows:
    """Return the time of communication, and the images per GPU that take as long to compute."""
    rows = []
    for size, keys in SIZES.items():
        cost = cost_of(compose(["model=tread", "data=imagenet256", "data.path=FOLDER", *keys]).meta_net)
        flops = {"dense": cost.dense_training_flops, "routed": cost.routed_training_flops}
        for n in GPUS:
            for parallel, passes in PASSES.items():
                # passes (n - 1) / n bytes / speed; the slowest link of a ring decides
                speed = NVLINK if n <= GPUS_PER_NODE else min(NVLINK, NETWORK)
                sec = passes * (n - 1) / n * 4 * cost.num_parameters / speed
                row = {
                    "network": f"{size}, {cost.num_parameters / 1e9:.2f}B",
                    "GPUs": n,
                    "parallel": parallel,
                }
                row |= {"ms": f"{1000 * sec:.0f}"}
                row |= {f"images, {k}": f"{sec * PEAK * UTILISATION / f:.0f}" for k, f in flops.items()}
                rows.append(row)
    return rows


if __name__ == "__main__":
    main()
