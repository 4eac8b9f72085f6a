"""What the processes of a training send to each other, and what that takes.

    python -m benchmarks.communication                  measure S/2 with 2 and 4 processes on this machine
    python -m benchmarks.communication model/size=b_2   the same with other keys of train.py
    python -m benchmarks.communication --predict        compute XL/2 and a network of 3B on 8 to 512 GPUs

A step has one image per process. Bytes are what the loopback interface (Linux, gloo) sends in a step, for all
processes together. `compute_ms` is the time of forward and backward passes that do not synchronise.
benchmarks/README.md explains the prediction.
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

import psutil
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

NUM_PROCESSES, TURNS = (2, 4), 5
KINDS = {
    "ddp": ("train.parallel=ddp",),
    "fsdp": ("train.parallel=fsdp",),
    "fsdp, bf16 sums": ("train.parallel=fsdp", "train.reduce_dtype=bf16"),
}
# Bytes per weight that a process sends in a step, over (n - 1) / n. DDP sums gradients: a reduce-scatter and
# an all-gather. FSDP gathers weights for the forward and the backward pass, and reduce-scatters gradients.
BYTES = {"ddp": 4 + 4, "fsdp": 4 + 4 + 4, "fsdp, bf16 sums": 4 + 4 + 2}
# gloo's reduce-scatter sends what a sum of everything takes.
GLOO_BYTES = {"ddp": 4 + 4, "fsdp": 4 + 4 + 8, "fsdp, bf16 sums": 4 + 4 + 4}
# Bytes per second in each direction: NVLink between 8 H100s; 8 network cards of 400 Gb/s per node.
NVLINK, NETWORK, GPUS_PER_NODE = 450e9, 8 * 50e9, 8
PEAK, UTILISATION = 989e12, 0.42  # FLOPs per second; measured for XL/2 on an H200
GPUS = (8, 64, 512)
SIZES = {
    "XL/2": ("model/size=xl_2",),
    "3B": ("model/size=xl_2", "model.hidden_size=2304", "model.depth=32", "model.num_heads=18"),
}
COLUMNS = {
    "processes": "{}",
    "kind": "{}",
    "mib": "{:.0f}",
    "predicted_mib": "{:.0f}",
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
    parser.add_argument("--record", metavar="NAME", help="add the rows to the record, as this setting")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    request = parser.parse_intermixed_args()
    if request.predict and request.overrides:
        parser.error("--predict takes no keys")
    if request.predict:
        rows = predictions()
        print(markdown(rows, dict.fromkeys(rows[0], "{}")))
    elif request.worker:
        work(request.worker, request.overrides)
    else:
        described = environment(torch.device("cpu"))
        rows = measure(("model/size=s_2", *request.overrides))
        if request.record:
            Record("communication", RESULTS, described).add(request.record, rows)
        print(aligned(markdown(rows, COLUMNS)))


def measure(overrides: Sequence[str]) -> Rows:
    """Train some steps in each way; return a row for each."""
    rows = []
    for n in NUM_PROCESSES:
        compute_ms = 0.0
        for kind, keys in KINDS.items():
            with tempfile.TemporaryDirectory() as folder:
                write_latents(Path(folder) / "latents", Setting("", ()))
                data = ("data=latents_published", f"data.path={folder}/latents")
                arguments = [*QUIET, "model=tread", *overrides, *keys, *data]
                arguments += ["train.micro_batch_size=1", f"train.batch_size={n}"]
                command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
                command += [f"--nproc_per_node={n}", "-m", "benchmarks.communication", "--worker", folder]
                variables = {**os.environ, "ACCELERATE_USE_CPU": "true"}
                subprocess.run([*command, *arguments], check=True, cwd=PROJECT, env=variables)
                row = json.loads((Path(folder) / "row.json").read_text())
            compute_ms = row.pop("compute_ms", compute_ms)
            row |= {"compute_ms": compute_ms, "share": 1 - compute_ms / row["ms"]}
            predicted = GLOO_BYTES[kind] * (n - 1) * row["parameters"] / 2**20
            rows.append({"processes": n, "kind": kind, "predicted_mib": predicted, **row})
    return rows


def work(folder: Path, overrides: Sequence[str]) -> None:
    """Train as one of several processes; the first writes the row."""
    launch, experiment = start_process(), compose(overrides)
    run = RunFolder(folder / "run")
    run.lock(launch)
    trainer = build_trainer(experiment, run, experiment.data(launch), launch)
    batches = trainer.batches.from_step(0)

    def step() -> None:
        trainer.train_step(next(batches))

    def compute() -> None:
        with no_sync(trainer.precond.net):
            for batch in next(batches):
                arguments = (trainer.precond, batch.x, batch.class_labels)
                trainer.loss(*arguments, generator=batch.generator).mean().backward()
        trainer.net.zero_grad()

    sec, num_bytes = time_call(step, trainer)
    row = {"parameters": cost_of(experiment.meta_net).num_parameters}
    row |= {"ms": 1000 * sec, "mib": num_bytes / 2**20, "n": TURNS}
    if experiment.train.parallel == "ddp":
        row["compute_ms"] = 1000 * time_call(compute, trainer)[0]
    if launch.is_main:
        (folder / "row.json").write_text(json.dumps(row))
    launch.barrier()
    run.unlock()


def time_call(function: Callable[[], None], trainer: Trainer) -> tuple[float, float]:
    """Return the median seconds and bytes of a call, after a warm-up."""
    seconds, counts = [], []
    for _ in range(TURNS + 1):
        trainer.launch.barrier()
        start, before = time.perf_counter(), psutil.net_io_counters(pernic=True)["lo"].bytes_sent
        function()
        trainer.launch.barrier()
        seconds.append(time.perf_counter() - start)
        counts.append(psutil.net_io_counters(pernic=True)["lo"].bytes_sent - before)
    return median(seconds[1:]), median(counts[1:])


def predictions() -> Rows:
    """Return the time of communication, and the images per GPU that take as long to compute."""
    rows = []
    for size, keys in SIZES.items():
        cost = cost_of(compose(["model=tread", "data=imagenet256", "data.path=FOLDER", *keys]).meta_net)
        flops = {"dense": cost.dense_training_flops, "routed": cost.routed_training_flops}
        for n in GPUS:
            for kind, num_bytes in BYTES.items():
                # sec = bytes * weights * (n - 1) / n / speed; the slowest link of a ring decides
                speed = NVLINK if n <= GPUS_PER_NODE else min(NVLINK, NETWORK)
                sec = num_bytes * cost.num_parameters * (n - 1) / n / speed
                row = {"network": f"{size}, {cost.num_parameters / 1e9:.2f}B", "GPUs": n, "kind": kind}
                row |= {"ms": f"{1000 * sec:.0f}"}
                row |= {f"images, {k}": f"{sec * PEAK * UTILISATION / f:.0f}" for k, f in flops.items()}
                rows.append(row)
    return rows


if __name__ == "__main__":
    main()
