"""What a training will take in time, memory and disk, and what there is."""

import math
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn as nn

from builders.network import build_optimizer
from models.cost import Cost
from runtime.launch import Launch
from runtime.machine import return_freed_memory
from training.speed import product_flops_per_sec

UTILISATION = 0.4  # of the rate of large products, in training; small networks reach less
COMPILED_AFTER_SEC = 40
SIDES, REPEATS = {"cuda": 4096, "cpu": 512}, 100  # of matrices whose product takes about a millisecond
LONG_SEC, TOO_LONG_SEC = 7 * 24 * 3600, 30 * 24 * 3600
KEPT_AT_LEAST = 0.5  # of the activations: compiled blocks keep fewer
OWN_GROUPS = Path("/proc/self/cgroup")
# Limits of a container or of a job, in versions 2 and 1 of cgroups: root of the groups, files of the limit
# and of what is in use, key of what is cached.
CGROUPS = {
    Path("/sys/fs/cgroup"): ("memory.max", "memory.current", "inactive_file"),
    Path("/sys/fs/cgroup/memory"): ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
# Bytes a weight takes, beside its share of the optimizer: itself, its gradient, the average that samples are
# drawn from. A checkpoint has all but the gradient.
WEIGHT, GRADIENT, AVERAGE = 4, 4, 4


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step with its share of what is drawn, bytes in memory of each process, bytes of the
    checkpoints on disk.
    """

    step_sec: float
    weights: int
    activations: int
    checkpoints: int

    @property
    def memory(self) -> int:
        """Bytes in memory of each process, without those of the program itself."""
        return self.weights + self.activations


def weights_alone(config: dict[str, Any], net: nn.Module) -> Estimate:
    """Memory of weights, gradients, optimizer and average; the network may be on the meta device."""
    num_parameters = sum(parameter.numel() for parameter in net.parameters())
    num_bytes = num_parameters * (WEIGHT + GRADIENT + AVERAGE) + optimizer_bytes(config, net)
    return Estimate(0.0, num_bytes, 0, 0)


def optimizer_bytes(config: dict[str, Any], net: nn.Module) -> int:
    """Bytes of the state of the optimizer, from a step of stand-ins with one number each."""
    sizes = {name: parameter.numel() for name, parameter in net.named_parameters()}
    ranks = {name: parameter.ndim for name, parameter in net.named_parameters()}
    small = {name: nn.Parameter(torch.zeros([1] * rank, device="cpu")) for name, rank in ranks.items()}
    optimizer = build_optimizer(config, small.items())
    for parameter in small.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(torch.zeros((), device="cpu"))
    states = {p: state for each in optimizer.optimizers.values() for p, state in each.state.items()}
    return sum(
        sizes[name] * value.nbytes
        for name, parameter in small.items()
        for value in states.get(parameter, {}).values()
        if isinstance(value, torch.Tensor) and value.ndim  # counters have no dimension
    )


def estimate(
    config: dict[str, Any],
    resolved: dict[str, Any],
    cost: Cost,
    loss: Callable[[int], torch.Tensor],
    net: nn.Module,
    launch: Launch,
    drawing_flops: float,
) -> Estimate:
    """Estimate time, memory and disk of a training.

    Args:
        loss: that of so many images, by the network `net`, its windows as long as they ever get.
        drawing_flops: of the samples that evaluations draw, for each step.
    """
    train = config["train"]
    dtype = torch.bfloat16 if resolved["mixed_precision"] == "bf16" else torch.float32
    device, micro_batch_size = launch.device, resolved["micro_batch_size"]
    rate = UTILISATION * product_flops_per_sec(device, dtype, SIDES[device.type], REPEATS)
    flops = cost.routed_training_flops * train["batch_size"] + drawing_flops
    # The weights in bf16 are kept, too, whatever the batch.
    two, three = (kept_bytes(partial(loss, num_images), net.parameters()) for num_images in (2, 3))
    num_saved = train["keep_last"] + 1  # the oldest goes once the newest is there
    if train["milestone_every"]:
        num_saved += train["total_steps"] // train["milestone_every"]
    weights = weights_alone(config, net).weights
    return Estimate(
        step_sec=flops / (rate * launch.world_size),
        weights=weights,
        activations=two + (three - two) * (micro_batch_size - 2),
        checkpoints=(weights - GRADIENT * cost.num_parameters) * num_saved,
    )


def kept_bytes(forward: Callable[[], torch.Tensor], parameters: Iterable[nn.Parameter]) -> int:
    """Return the bytes that a forward keeps for its backward, but for the weights.

    Uncompiled: compiled blocks keep less.
    """
    own, kept = {parameter.untyped_storage().data_ptr() for parameter in parameters}, {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an output that its own function keeps would keep itself

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with torch.compiler.set_stance("force_eager"), hooks:
        loss = forward()
    del loss  # kept until here, so that no two tensors had one place
    return sum(kept.values())


def free_memory(launch: Launch) -> int:
    """Bytes that a process may take, including its own on a GPU."""
    if launch.device.type == "cuda":
        return torch.cuda.mem_get_info(launch.device)[0] + torch.cuda.memory_reserved(launch.device)
    return_freed_memory()  # by earlier jobs of a sweep: it would count as taken
    limits = [_free_in_group(root / group, *names) for root, names in CGROUPS.items() for group in _groups()]
    return min(psutil.virtual_memory().available, *limits) // launch.world_size


def _groups() -> set[Path]:
    """The memory groups of this process, each with its parents up to the root."""
    groups = {Path()}
    lines = OWN_GROUPS.read_text().splitlines() if OWN_GROUPS.exists() else []  # on Linux
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if not controllers or "memory" in controllers.split(","):  # none are named in version 2
            own = Path(path.lstrip("/"))
            groups |= {own, *own.parents}
    return groups


def _free_in_group(folder: Path, limit: str, taken: str, cached: str) -> float:
    """Free bytes below a limit; infinity if there is none."""
    try:
        most, now = ((folder / name).read_text().strip() for name in (limit, taken))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:  # another version, or another system
        return math.inf
    return math.inf if most == "max" else int(most) - int(now) + int(stat.get(cached, 0))


def free_disk(checkpoints: Path) -> int:
    """Bytes that checkpoints may take, including those that exist."""
    there = sum(file.stat().st_size for file in checkpoints.glob("*/*"))
    return shutil.disk_usage(checkpoints.parent).free + there
