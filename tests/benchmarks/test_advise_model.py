"""Advice on routes for models from elsewhere."""

from functools import partial

import pytest
import torch

from benchmarks.advise_model import advise_model, similarity
from routing import Route, attach
from routing.adapters.families import adapter_of
from tests.routing.models import Sizes, build

SIZES = Sizes(width=32, num_heads=2, depth=12, side=4, batch=2, num_text=5)


def built(name, sizes=SIZES):
    torch.manual_seed(0)
    model, arguments = build(name, sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train(), arguments


@pytest.mark.parametrize("name", ["SD3Transformer2DModel", "AuraFlowTransformer2DModel"])
def test_similarity_is_that_of_the_image_between_depths(name):
    model, arguments = built(name)
    states, adapter = [], adapter_of(model)
    P = adapter.num_prefix_tokens(model, arguments)

    def keep(joint, block, args, kwargs):
        x = kwargs.get("hidden_states", args[0] if args else None)
        states.append(x[:, P:] if joint else x)

    for spec in adapter.block_lists:
        for block in model.get_submodule(spec.name):
            block.register_forward_pre_hook(partial(keep, spec.joint), with_kwargs=True)
    alike, num_tokens = similarity(model, adapter, arguments)
    assert alike.shape == (13, 13) and num_tokens == 16
    for i, j in ((0, 0), (3, 9), (11, 1)):
        expected = torch.cosine_similarity(states[i], states[j], dim=-1).mean().item()
        assert alike[i, j] == pytest.approx(expected, abs=1e-5)


def test_windows_and_recommendations_are_measured_and_routes_are_kept():
    model, arguments = built("SD3Transformer2DModel")
    routes = attach(model, [Route(0.25, 1, -2)])
    advice = advise_model(model, arguments, repeats=1)
    assert model._attached.routes == routes and model.proj_out.weight.grad is None
    names = {candidate.name for candidate in advice.candidates}
    assert names == {"", "basic", "balanced", "max_speed", "high_res", "lora", "masked"}, "advanced overlaps"
    found = {candidate.routes: candidate for candidate in advice.candidates if not candidate.name}
    assert len(found) == 18 and found[Route(0.5, 2, 8),].num_kept == (8,)
    windows = (Route(0.5, 1, 9), Route(0.5, 1, 7), Route(0.25, 1, 7))
    promised = [found[window,].predicted_speedup for window in windows]
    assert promised == sorted(promised, reverse=True) and promised[-1] > 1


def test_the_five_windows_of_wan_are_measured():
    model, arguments = built("WanTransformer3DModel", SIZES._replace(depth=30))
    (five,) = (c for c in advise_model(model, arguments, repeats=1).candidates if c.name == "wan")
    assert [route.selection_ratio for route in five.routes] == [0.1, 0.25, 0.35, 0.25, 0.1]
    assert five.routes[-1] == Route(0.1, 24, 28) and len(five.num_kept) == 5


def test_a_short_model_gets_no_advice():
    model, arguments = built("SD3Transformer2DModel", SIZES._replace(depth=7))
    with pytest.raises(ValueError, match="SD3Transformer2DModel has 7 blocks: advice needs 8"):
        advise_model(model, arguments)
