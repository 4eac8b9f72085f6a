"""Shard weights, gradients and optimizer states across processes (FSDP2).

The engine is torch's `fully_shard`, with weights in fp32. If gradients are summed in fp32, too, they are the
same as under DDP, up to the order of summation. A sharded tensor is a DTensor, of which each process has a
part. Only sharded trainings import its packages, which takes most of a second.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn as nn
from torch.utils._pytree import tree_map

from runtime.launch import Launch


def check_parallel(key: str, parallel: str, world_size: int) -> None:
    """Raise ValueError if weights are to be sharded, but there is only one process."""
    if parallel != "ddp" and world_size == 1:
        rule = "needs several processes: start the program with torchrun or accelerate launch"
        raise ValueError(f"{key}={parallel} {rule}")


def shard(
    net: nn.Module, blocks: Iterable[nn.Module], launch: Launch, group_size: int, reduce_dtype: torch.dtype
) -> None:
    """Shard the weights of a network across processes, in place: one unit per block, and one for the rest.

    Compile the blocks and copy the network before; build its optimizer after.

    Args:
        blocks: submodules of `net` that are called one after the other.
        group_size: number of processes that share one copy of the weights, a divisor of all. With several
            groups, gradients are summed inside each and then over the groups.
        reduce_dtype: dtype of the gradients while they are summed.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    groups = {"replicate": launch.world_size // group_size, "shard": group_size}
    sizes = {name: size for name, size in groups.items() if size > 1 or name == "shard"}
    mesh = init_device_mesh(launch.device.type, (*sizes.values(),), mesh_dim_names=(*sizes,))
    # Autocast decides the precision of the forward pass; a cast of its inputs would round the time.
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    net.register_forward_hook(_copy)
    fully_shard(net, mesh=mesh, mp_policy=policy)


def _copy(net: nn.Module, inputs: Any, output: Any) -> Any:
    """Copy the tensors of an output: `fully_shard` warns of a view."""
    return tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, output)


@contextmanager
def gathered(*nets: nn.Module) -> Iterator[None]:
    """Keep whole weights on every process inside this context, if networks are sharded.

    A forward pass does not communicate, and processes may run different numbers of them. `state_dict()` would
    reshard the weights.
    """
    groups: list[Any] = [module for net in nets for module in net.modules() if shares_weights(module)]
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
    if shares_weights(net):
        net.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            net.set_requires_gradient_sync(True)
    else:
        with net.no_sync() if hasattr(net, "no_sync") else nullcontext():  # DDP, or a single process
            yield


def shares_weights(module: Any) -> bool:
    """True if `fully_shard` was applied to a module."""
    return hasattr(module, "unshard")


def is_sharded(tensor: torch.Tensor) -> bool:
    """True if this process has a part of a tensor."""
    return hasattr(tensor, "placements")


def whole(tensor: Any) -> torch.Tensor:
    """Return a sharded tensor as a plain one (collective); other tensors unchanged."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def part_of(tensor: torch.Tensor, like: Any) -> torch.Tensor:
    """Shard a tensor, which all processes have, as `like` is sharded; unchanged if `like` is not."""
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
