"""What trainers do to a transformer after it got routes, in their order: it routes as it would alone.

The scripts of diffusers prepare it with accelerate; ai-toolkit and musubi-tuner put LoRA into the forward of
its linear layers; OneTrainer puts checkpoints into the forward of its blocks, or wraps them.
"""

from functools import partial

import pytest
import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.utils.checkpoint import checkpoint

from routing import Route, attach
from tests.routing.families import FAMILIES


class AddsLora(nn.Module):
    """Two matrices beside a linear layer, in place of its forward."""

    def __init__(self, layer):
        super().__init__()
        self.down = nn.Linear(layer.in_features, 4, bias=False)
        self.up = nn.Linear(4, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)
        self.plain, layer.forward = [layer.forward], self.forward

    def forward(self, x):
        return self.plain[0](x) + self.up(self.down(x))


class Checkpointed(nn.Module):
    """A block in a wrapper of its own."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, *args, **kwargs):
        return checkpoint(self.block, *args, **kwargs, use_reentrant=False)


def prepared(family, model):
    """As in the scripts of diffusers: all weights."""
    AcceleratorState._reset_state()  # it would keep the precision of the test before
    model.enable_gradient_checkpointing()
    return Accelerator(cpu=True).prepare(model), [*model.parameters()]


def with_lora(family, model):
    """As in ai-toolkit and musubi-tuner."""
    model.requires_grad_(False).eval()
    layers = [layer for block in family.layers(model) for layer in block.modules()]
    lora = nn.ModuleList(AddsLora(layer) for layer in layers if isinstance(layer, nn.Linear))
    model.enable_gradient_checkpointing()
    return model.train(), [*lora.parameters()]


def with_checkpointed_forwards(family, model):
    """As in OneTrainer."""
    for block in family.layers(model):
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model, [*model.parameters()]


def with_wrapped_blocks(family, model):
    """As in OneTrainer where it compiles them."""
    for blocks in (getattr(model, name) for name in family.block_lists):
        for i, block in enumerate(blocks):
            blocks[i] = Checkpointed(block)
    return model, [*model.parameters()]


def loss_of(model, arguments):
    torch.manual_seed(1)  # of the tokens that stay
    return model(**arguments).sample.float().square().mean()


@pytest.mark.parametrize("name", ["flux", "sd3", "wan"])
@pytest.mark.parametrize(
    "habit",
    [prepared, with_lora, with_checkpointed_forwards, with_wrapped_blocks],
    ids=lambda habit: habit.__name__,
)
def test_routes_are_taken_under_what_a_trainer_does(name, habit):
    family, arguments = FAMILIES[name], FAMILIES[name].arguments()
    dense, plain = loss_of(family.build(), arguments), family.build()
    attach(plain, [Route(0.5, 1, -2)])
    model = family.build()
    attach(model, [Route(0.5, 1, -2)])
    outer, trained = habit(family, model)
    loss = loss_of(outer, arguments)
    assert loss == loss_of(plain, arguments) != dense
    with torch.no_grad():
        assert loss_of(outer, arguments) == dense
    loss.backward()
    assert trained and all(parameter.grad is not None for parameter in trained)
    assert {id(p) for p in model.parameters() if p.grad is not None} <= {id(p) for p in trained}
    torch.optim.SGD(trained, lr=0.01).step()
    assert loss_of(outer, arguments) != loss
