"""Routes beside adapters of peft."""

import pytest
import torch

from routing import Route, attach
from tests.routing.families import FAMILIES, seeded

peft = pytest.importorskip("peft", reason="`make finetune` installs it")

TARGETS = ["to_q", "to_k", "to_v"]


def run(model, arguments, **ours):
    return model(**arguments, **ours, generator=seeded()).sample


@pytest.mark.parametrize("name", FAMILIES)
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
        with pytest.raises(ValueError, match="routing knows no PeftModel"):
            attach(outer, [Route(0.5, 1, -2)])
    else:
        if name == "pixart":
            assert not hasattr(inner, "add_adapter")  # diffusers gives it none
            return
        outer = inner.requires_grad_(False)
        outer.add_adapter(config)
    attach(inner, [Route(0.5, 1, -2)])
    # New adapters add nothing yet.
    output = run(outer, arguments)
    torch.testing.assert_close(output, expected)
    output.square().sum().backward()
    with_gradient = {key for key, parameter in outer.named_parameters() if parameter.grad is not None}
    assert with_gradient
    assert all("lora_" in key or "lokr_" in key for key in with_gradient)
    assert with_gradient == {key for key, parameter in outer.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("before", [True, False], ids=["attached before", "attached after"])
def test_the_order_of_attaching_and_adding_adapters_does_not_matter(before):
    family = FAMILIES["sd3"]
    outputs = []
    for first in (before, not before):
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
