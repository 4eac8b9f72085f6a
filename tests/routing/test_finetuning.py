"""Routes together with adapters of peft and quantized base weights, as in fine-tuning."""

import pytest
import torch
import torch.nn as nn

from routing import Route, Routing, attach, detach
from tests.routing.families import FAMILIES, seeded

bitsandbytes, peft, torchao = (
    pytest.importorskip(name, reason="`make finetune` installs it")
    for name in ("bitsandbytes", "peft", "torchao.quantization")
)

TARGETS = ["to_q", "to_k", "to_v"]
every_family = pytest.mark.parametrize("name", FAMILIES)


def run(model, arguments, **ours):
    return model(**arguments, **ours, generator=seeded()).sample


def to_nf4(blocks):
    """Quantize linear layers to the NF4 of bitsandbytes; diffusers itself refuses to do so without a GPU."""
    for module in [module for block in blocks for module in block.modules()]:
        for name, layer in list(module.named_children()):
            if isinstance(layer, nn.Linear):
                sizes = (layer.in_features, layer.out_features, layer.bias is not None)
                quantized = bitsandbytes.nn.Linear4bit(*sizes, torch.float32, quant_type="nf4")
                quantized.load_state_dict(layer.state_dict())
                setattr(module, name, quantized.to("cpu"))


QUANTIZATIONS = {
    "int8 of torchao": lambda blocks: torchao.quantize_(blocks, torchao.Int8WeightOnlyConfig()),
    "int4 of torchao": lambda blocks: torchao.quantize_(
        blocks, torchao.IntxWeightOnlyConfig(torch.int4, torchao.PerGroup(4))
    ),
    "nf4 of bitsandbytes": to_nf4,
}


@every_family
@pytest.mark.parametrize(
    "config", [peft.LoraConfig(r=4, target_modules=TARGETS), peft.LoKrConfig(r=4, target_modules=TARGETS)]
)
@pytest.mark.parametrize("way", ["add_adapter", "get_peft_model"])
def test_adapters_alone_get_gradients_and_routes_are_taken(name, config, way):
    family, arguments = FAMILIES[name], FAMILIES[name].arguments()
    plain = family.build()
    attach(plain, [Route(0.5, 1, -2)])
    expected = run(plain, arguments)
    inner = family.build()
    if way == "get_peft_model":
        outer = peft.get_peft_model(inner, config)
        with pytest.raises(ValueError, match="no adapter is known for PeftModel"):
            attach(outer, [Route(0.5, 1, -2)])
    else:
        if name == "pixart":
            assert not hasattr(inner, "add_adapter")  # diffusers gives it none
            return
        outer = inner.requires_grad_(False)
        outer.add_adapter(config)
    attach(inner, [Route(0.5, 1, -2)])
    # New adapters add zero.
    output = run(outer, arguments)
    torch.testing.assert_close(output, expected)
    output.square().sum().backward()
    with_gradient = {key for key, parameter in outer.named_parameters() if parameter.grad is not None}
    assert with_gradient
    assert all("lora_" in key or "lokr_" in key for key in with_gradient)
    assert with_gradient == {key for key, parameter in outer.named_parameters() if parameter.requires_grad}


def test_the_order_of_attaching_and_adding_adapters_does_not_matter():
    family, outputs = FAMILIES["sd3"], []
    for first in (True, False):
        torch.manual_seed(0)
        model = family.build().requires_grad_(False)
        if first:
            attach(model, [Route(0.5, 1, -2)])
        torch.manual_seed(1)
        model.add_adapter(peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False))
        if not first:
            attach(model, [Route(0.5, 1, -2)])
        outputs.append(run(model, family.arguments()))
    assert torch.equal(*outputs)


@every_family
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_base_weights_may_be_quantized(name, quantization):
    family, arguments = FAMILIES[name], FAMILIES[name].arguments()
    model = family.build().requires_grad_(False)
    unquantized = model(**arguments).sample
    QUANTIZATIONS[quantization](nn.ModuleList(family.layers(model)))
    peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=TARGETS))
    dense = model(**arguments).sample
    assert 0 < (dense - unquantized).abs().max() < 1
    attach(model, [Route(0.5, 1, -2)])
    assert torch.equal(run(model, arguments, routing=Routing(0)), dense)
    output = run(model, arguments)
    assert not torch.equal(output, dense)
    output.square().sum().backward()
    trained = {key.split(".")[-3] for key, p in model.named_parameters() if p.grad is not None}
    assert trained == {"lora_A", "lora_B"}
    detach(model)
    assert torch.equal(model(**arguments).sample, dense)
