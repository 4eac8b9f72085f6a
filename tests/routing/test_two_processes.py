"""Models with routes in two processes, distributed or sharded, take the same step as one process with all
samples.
"""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from routing import Route, Routing, attach
from tests.routing.families import FAMILIES, randn, seeded

NUM_PROCESSES = 2
WINDOW = Route(0.5, 1, -2)
RATIOS = ((0.5, 0.75), (0.5, 0.0))  # of each process, pass by pass: ranks may differ


def routed(model):
    attach(model, [WINDOW])
    return model


def shard(family, model):
    """Shard each block, then the rest of the model, as is usual for large models."""
    for block in family.layers(model):
        fully_shard(block)
    return fully_shard(model)


WAYS = {
    "distributed": lambda family: DistributedDataParallel(routed(family.build())),
    "attached, then sharded": lambda family: shard(family, routed(family.build())),
    "sharded, then attached": lambda family: routed(shard(family, family.build())),
}


def loss_of(output):
    return output.square().mean()


def process(rank, folder):
    """Run every family in every way in one process, and save the results."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    timeout = timedelta(seconds=60)  # in case ranks run different collectives
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=NUM_PROCESSES, timeout=timeout)
    results = {(name, way): outcome(FAMILIES[name], WAYS[way], rank) for name in FAMILIES for way in WAYS}
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


def outcome(family, build, rank):
    """Return the outputs and gradients of one rank's passes, and the local size of each parameter."""
    model, outputs = build(family), []
    for output in passes(model, family, rank):  # gradients add up
        outputs.append(output)
        loss_of(output).backward()
    parameters = {name.removeprefix("module."): parameter for name, parameter in model.named_parameters()}
    return {
        "outputs": torch.stack(outputs).detach(),
        "gradients": {name: whole(p.grad) for name, p in parameters.items() if p.grad is not None},
        "sizes": {
            name: p.to_local().numel() if isinstance(p, DTensor) else p.numel()
            for name, p in parameters.items()
        },
    }


def passes(model, family, rank):
    """Yield the outputs of a rank. Each rank has other samples."""
    arguments, generator = family.arguments(), seeded(rank)
    arguments["hidden_states"] = randn(*arguments["hidden_states"].shape, seed=20 + rank)
    for ratio in RATIOS[rank]:
        yield model(**arguments, routing=Routing(ratio), generator=generator).sample


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.slow
def test_two_processes_take_the_step_of_one(tmp_path, subtests):
    """One test for all, because importing diffusers in each process takes long."""
    torch.multiprocessing.spawn(process, (tmp_path,), NUM_PROCESSES)
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(NUM_PROCESSES)]
    for name, family in FAMILIES.items():
        model = routed(family.build())
        outputs = [torch.stack([*passes(model, family, rank)]) for rank in range(NUM_PROCESSES)]
        (sum(loss_of(output) for of_one in outputs for output in of_one) / NUM_PROCESSES).backward()
        for way in WAYS:
            with subtests.test(name=name, way=way):
                check(
                    model, outputs, [result[name, way] for result in results], is_sharded=way != "distributed"
                )


def check(model, outputs, results, is_sharded):
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for output, result in zip(outputs, results, strict=True):
        torch.testing.assert_close(result["outputs"], output.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(result["gradients"], gradients, rtol=1e-4, atol=1e-5)
    for name, parameter in model.named_parameters():
        sizes = [result["sizes"][name] for result in results]
        assert sum(sizes) == parameter.numel() * (1 if is_sharded else NUM_PROCESSES)
        if is_sharded and len(parameter) > 1:  # a single row is not split
            assert max(sizes) < parameter.numel()
