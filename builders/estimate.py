"""What a training will take in time, memory and disk: said before it starts, with warnings where it does not
fit.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.nn as nn

from models.cost import Cost
from runtime.launch import Launch
from training.speed import product_flops_per_sec

UTILISATION = 0.4  # of the rate of large products, in training; small networks reach less
COMPILE_SEC = 40
PRODUCT_SIZES, REPEATS = {"cuda": 4096, "cpu": 512}, 5  # sides of matrices, of a few milliseconds
LONG_SEC = 7 * 24 * 3600
# Bytes a weight takes: itself, its gradient, the two averages of AdamW, the average that samples are drawn
# from. A checkpoint has all but the gradient.
WEIGHT, GRADIENT, OPTIMIZER, AVERAGE = 4, 4, 8, 4


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step, bytes in memory of each process, bytes of the checkpoints on disk."""

    step_sec: float
    weights: int
    activations: int
    checkpoints: int

    @property
    def memory(self) -> int:
        """Bytes in memory of each process, without those of the program itself."""
        return self.weights + self.activations


def estimate(
    config: dict[str, Any],
    resolved: dict[str, Any],
    cost: Cost,
    step: Callable[[], torch.Tensor],
    net: nn.Module,
    launch: Launch,
) -> Estimate:
    """Return what a training will take.

    Args:
        step: the loss of one image, by the network `net`, with routes as at the first step.
    """
    train = config["train"]
    dtype = torch.bfloat16 if resolved["mixed_precision"] == "bf16" else torch.float32
    device = launch.device
    rate = UTILISATION * product_flops_per_sec(device, dtype, PRODUCT_SIZES[device.type], REPEATS)
    sharing = launch.world_size if device.type == "cuda" else 1  # processes on a CPU share its cores
    num_saved = train["keep_last"]
    if train["milestone_every"]:
        num_saved += train["total_steps"] // train["milestone_every"]
    return Estimate(
        step_sec=cost.routed_training_flops * train["batch_size"] / (rate * sharing),
        weights=cost.num_parameters * (WEIGHT + GRADIENT + OPTIMIZER + AVERAGE),
        activations=kept_bytes(step, net.parameters()) * resolved["micro_batch_size"],
        checkpoints=cost.num_parameters * (WEIGHT + OPTIMIZER + AVERAGE) * num_saved,
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
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with torch.compiler.set_stance("force_eager"), hooks:
        loss = forward()
    del loss  # kept until here, so that no two tensors had one place
    return sum(kept.values())


def free_memory(launch: Launch) -> int:
    """Return the bytes that a process may take, what it has taken on a GPU included."""
    if launch.device.type == "cuda":
        return torch.cuda.mem_get_info(launch.device)[0] + torch.cuda.memory_allocated(launch.device)
    return psutil.virtual_memory().available // launch.world_size
