"""What a training takes in time, memory and disk, and what is free."""

import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.nn as nn

from builders.auto import Resolved
from builders.experiment import Experiment
from models.cost import Cost
from runtime.launch import Launch
from runtime.machine import return_freed_memory
from training.speed import product_flops_per_sec

UTILISATION = 0.4  # of the rate of large products, in training; small networks reach less
COMPILED_AFTER_SEC = 40
SIDES, REPEATS = {"cuda": 4096, "cpu": 512}, 100  # of matrices whose product takes about a millisecond
# Limits of a container or a job: version 2 of cgroups.
CGROUPS, OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Bytes per weight, beside its share of the optimizer: itself, its gradient, its average. A checkpoint has all
# but the gradient.
WEIGHT, GRADIENT, AVERAGE = 4, 4, 4


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step with its share of the samples drawn, bytes in memory of each process before
    activations, bytes of the checkpoints on disk.
    """

    step_sec: float
    memory: int
    checkpoints: int


def bytes_in_memory(experiment: Experiment) -> int:
    """Bytes of weights, gradients, optimizer and average."""
    num_parameters = sum(parameter.numel() for parameter in experiment.meta_net.parameters())
    return num_parameters * (WEIGHT + GRADIENT + AVERAGE) + optimizer_bytes(experiment)


def optimizer_bytes(experiment: Experiment) -> int:
    """Bytes of the state of the optimizer, from a step of stand-ins with one number each."""
    named = dict(experiment.meta_net.named_parameters())
    small = {name: nn.Parameter(torch.zeros([1] * p.ndim, device="cpu")) for name, p in named.items()}
    sizes = {small[name]: parameter.numel() for name, parameter in named.items()}
    optimizer = experiment.optimizer(small.items())
    for parameter in small.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(torch.zeros((), device="cpu"))
    states = [item for each in optimizer.optimizers.values() for item in each.state.items()]
    tensors = [(p, value) for p, state in states for value in state.values() if torch.is_tensor(value)]
    return sum(sizes[p] * value.nbytes for p, value in tensors if value.ndim)  # counters have no dimension


def estimate(
    experiment: Experiment, resolved: Resolved, cost: Cost, launch: Launch, drawing_flops: float
) -> Estimate:
    """Estimate time, memory and disk of a training.

    Args:
        drawing_flops: of the samples that evaluations draw, per step.
    """
    train, device = experiment.train, launch.device
    dtype = torch.bfloat16 if resolved.bf16 else torch.float32
    rate = UTILISATION * product_flops_per_sec(device, dtype, SIDES[device.type], REPEATS)
    flops = cost.routed_training_flops * train.batch_size + drawing_flops
    num_saved = train.keep_last + 1  # the oldest is removed once the newest is complete
    if train.milestone_every:
        num_saved += train.total_steps // train.milestone_every
    memory = bytes_in_memory(experiment)
    checkpoints = (memory - GRADIENT * cost.num_parameters) * num_saved
    return Estimate(flops / (rate * launch.world_size), memory, checkpoints)


def free_memory(launch: Launch) -> int:
    """Bytes that a process may take, including its own on a GPU."""
    if launch.device.type == "cuda":
        return torch.cuda.mem_get_info(launch.device)[0] + torch.cuda.memory_reserved(launch.device)
    return_freed_memory()  # by earlier jobs of a sweep: it would count as taken
    return min([psutil.virtual_memory().available, *_free_in_groups()]) // launch.world_size


def _free_in_groups() -> Iterator[int]:
    """Free bytes below the limits of the memory groups of this process, and of their parents."""
    lines = OWN_GROUP.read_text().splitlines() if OWN_GROUP.exists() else []  # on Linux
    own = [CGROUPS / line.removeprefix("0::/") for line in lines if line.startswith("0::/")]
    for folder in {CGROUPS, *own, *(parent for group in own for parent in group.parents)}:
        limit, usage, stat = (folder / f"memory.{name}" for name in ("max", "current", "stat"))
        with suppress(OSError, KeyError):  # a group that may not be read, or has no limit
            if (most := limit.read_text().strip()) != "max":
                cached = dict(line.split() for line in stat.read_text().splitlines())["inactive_file"]
                yield int(most) - int(usage.read_text()) + int(cached)


def free_disk(checkpoints: Path) -> int:
    """Bytes that checkpoints may take, including those that exist."""
    there = sum(file.stat().st_size for file in checkpoints.glob("*/*"))
    return shutil.disk_usage(checkpoints.parent).free + there
