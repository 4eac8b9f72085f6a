"""Transformers with routes are prepared as trainers do it, and route as they do alone.

The scripts of diffusers prepare the model with accelerate. ai-toolkit and musubi-tuner replace the forward of
linear layers by LoRA. OneTrainer replaces the forward of blocks by a checkpointed one, or wraps blocks.
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
    """LoRA that replaces the forward of a linear layer."""

    def __init__(self, layer):
        super().__init__()
        self.down = nn.Linear(layer.in_features, 4, bias=False)
        self.up = nn.Linear(4, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)
        self.plain, layer.forward = [layer.forward], self.forward

    def forward(self, x):
        return self.plain[0](x) + self.up(self.down(x))


class Checkpointed(nn.Module):
    """A wrapper that checkpoints a block."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, *args, **kwargs):
        return checkpoint(self.block, *args, **kwargs, use_reentrant=False)


def prepared(family, model):
    """As in the scripts of diffusers: all weights."""
    AcceleratorState._reset_state()  # it keeps the precision of an earlier test
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
    torch.manual_seed(1)  # for the kept tokens
    return model(**arguments).sample.float().square().mean()


@pytest.mark.parametrize("name", ["flux", "sd3", "wan"])
@pytest.mark.parametrize(
    "prepare",
    [prepared, with_lora, with_checkpointed_forwards, with_wrapped_blocks],
    ids=lambda prepare: prepare.__name__,
)
def test_a_model_that_a_trainer_prepared_routes_as_alone(name, prepare):
    family, arguments = FAMILIES[name], FAMILIES[name].arguments()
    dense, plain = loss_of(family.build(), arguments), family.build()
    attach(plain, [Route(0.5, 1, -2)])
    model = family.build()
    attach(model, [Route(0.5, 1, -2)])
    outer, trained = prepare(family, model)
    loss = loss_of(outer, arguments)
    assert loss == loss_of(plain, arguments) != dense
    with torch.no_grad():
        assert loss_of(outer, arguments) == dense
    loss.backward()
    assert trained and all(parameter.grad is not None for parameter in trained)
    assert {id(p) for p in model.parameters() if p.grad is not None} <= {id(p) for p in trained}
    torch.optim.SGD(trained, lr=0.01).step()
    assert loss_of(outer, arguments) != loss
