"""Estimate the time, memory and disk space of a training, and measure the free resources."""

import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from builders.auto import Resolved
from builders.experiment import Experiment
from builders.schemas import TrainConfig
from models.cost import Cost
from runtime.launch import Launch
from runtime.machine import processes_here, return_freed_memory
from training.speed import product_flops_per_sec

UTILISATION = 0.4  # of the speed of large matrix products; small networks reach less
SIDES, REPEATS = {"cuda": 4096, "cpu": 512}, 100  # matrices whose product takes about a millisecond
# Memory limits of a container or a job (cgroups, version 2).
CGROUPS, OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Bytes per weight; the optimizer counts as AdamW, with two moments. Checkpoints do not contain gradients.
WEIGHT, GRADIENT, AVERAGE, OPTIMIZER = 4, 4, 4, 8


@dataclass(frozen=True)
class Estimate:
    """Time, memory and disk space of a training."""

    step_sec: float  # without evaluations
    memory: int  # bytes per process, without activations
    checkpoints: int  # bytes on disk


def bytes_in_memory(experiment: Experiment, num_processes: int) -> int:
    """Count the bytes of weights, gradients, optimizer and averaged weights in each process."""
    num_parameters = sum(parameter.numel() for parameter in experiment.meta_net.parameters())
    average = AVERAGE * experiment.num_averages
    num_bytes = num_parameters * (WEIGHT + GRADIENT + average + OPTIMIZER)
    if experiment.train.parallel == "ddp":
        return num_bytes
    # Weights and average are whole before they are sharded, and during evaluations.
    shared = num_bytes // sharing_processes(experiment.train, num_processes)
    return shared + num_parameters * (WEIGHT + average)


def sharing_processes(train: TrainConfig, num_processes: int) -> int:
    """Return the number of processes that share one copy of the weights.

    Raises:
        ValueError: with `hsdp`, a machine has one process, or machines have different numbers.
    """
    if train.parallel != "hsdp":
        return num_processes
    local = processes_here()
    if local == 1 or num_processes % local:
        rule = f"must be at least 2, and divide the number of processes={num_processes}"
        raise ValueError(f"train.parallel=hsdp: the variable LOCAL_WORLD_SIZE={local} {rule}")
    return local


def estimate(experiment: Experiment, resolved: Resolved, cost: Cost, launch: Launch) -> Estimate:
    train, device = experiment.train, launch.device
    dtype = torch.bfloat16 if resolved.bf16 else torch.float32
    rate = UTILISATION * product_flops_per_sec(device, dtype, SIDES[device.type], REPEATS)
    flops = cost.routed_training_flops * train.batch_size
    num_saved = train.keep_last + 1  # the oldest is removed after the newest is complete
    if train.milestone_every:
        num_saved += train.total_steps // train.milestone_every
    memory = bytes_in_memory(experiment, launch.world_size)
    per_weight = WEIGHT + AVERAGE * experiment.num_averages + OPTIMIZER
    checkpoints = per_weight * cost.num_parameters * num_saved
    return Estimate(flops / (rate * launch.world_size), memory, checkpoints)


def free_memory(launch: Launch) -> int:
    """Return the bytes that a process can use; on a GPU, its reserved memory counts."""
    if launch.device.type == "cuda":
        return torch.cuda.mem_get_info(launch.device)[0] + torch.cuda.memory_reserved(launch.device)
    return_freed_memory()  # memory of earlier jobs of a sweep would count as used
    return min([psutil.virtual_memory().available, *_free_in_groups()]) // processes_here()


def _free_in_groups() -> Iterator[int]:
    """Yield the free bytes below the memory limit of each cgroup of this process, parents included."""
    lines = OWN_GROUP.read_text().splitlines() if OWN_GROUP.exists() else []  # on Linux
    groups = [CGROUPS / line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    for folder in {CGROUPS, *groups, *(parent for group in groups for parent in group.parents)}:
        limit, usage, stat = (folder / f"memory.{name}" for name in ("max", "current", "stat"))
        with suppress(OSError, KeyError):  # not readable, or without a limit
            if (most := limit.read_text().strip()) != "max":
                cached = dict(line.split() for line in stat.read_text().splitlines())["inactive_file"]
                yield int(most) - int(usage.read_text()) + int(cached)


def free_disk(checkpoints: Path) -> int:
    """Return the bytes that checkpoints can use; existing checkpoints count as free."""
    used = sum(file.stat().st_size for file in checkpoints.glob("*/*"))
    return shutil.disk_usage(checkpoints.parent).free + used
