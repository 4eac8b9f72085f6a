"""Share weights, gradients and optimizer states between the processes of a training (FSDP2).

The engine is torch's `fully_shard`, with weights and sums of gradients in fp32. Gradients are the same as
under DDP, bit for bit. A sharded tensor is a DTensor, of which each process has a part.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard(net: nn.Module) -> None:
    """Share the weights of a network between all processes, in place: one group per block, and the rest.

    Compile the blocks and copy the network before; build its optimizer after.
    """
    for block in net.get_submodule("blocks").children():
        fully_shard(block)
    fully_shard(net)


@contextmanager
def gathered(*nets: nn.Module) -> Iterator[None]:
    """Keep whole weights on every process inside this context: a forward pass does not communicate, and
    processes may run different numbers of them. Without effect on networks that are not sharded.
    """
    groups = [module for net in nets for module in net.modules() if isinstance(module, FSDPModule)]
    for group in groups:
        group.set_reshard_after_forward(False, recurse=False)
        group.unshard()
    try:
        yield
    finally:
        for group in groups:
            group.set_reshard_after_forward(group not in nets, recurse=False)  # as fully_shard does
            group.reshard()


@contextmanager
def no_sync(net: Any) -> Iterator[None]:
    """Do not synchronise gradients in the backward passes inside this context."""
    if isinstance(net, FSDPModule):
        net.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            net.set_requires_gradient_sync(True)
    elif hasattr(net, "no_sync"):  # DDP
        with net.no_sync():
            yield
    else:
        yield


def is_sharded(tensor: torch.Tensor) -> bool:
    """True if this process has a part of a tensor."""
    return isinstance(tensor, DTensor)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a sharded tensor as a plain one, which all processes must call; other tensors unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_of(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Shard a tensor, which all processes have, as `like` is sharded; unchanged if `like` is not."""
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
