"""Advice on routes, for runs and for models from elsewhere."""

import json
import shlex
from functools import partial

import numpy as np
import pytest
import torch

from benchmarks import advise
from benchmarks.advise import MIN_SPEEDUP, Candidate, advise_model, model_similarity, override, similarity
from models import cost_of
from routing import Route, attach
from routing.adapters.families import adapter_of
from tests.routing.models import Sizes, build
from tests.runs import TINY, composed, tiny_run, tiny_trainer, validated, written

SIZES = Sizes(depth=8)


def candidate(start, end, measured=1.2, alike=0.9, spread=0.0):
    quartiles = (measured - spread, measured + spread)
    return Candidate(Route(0.5, start, end), 8, 1.3, measured, quartiles, 0.1, alike)


@pytest.mark.parametrize(
    ("published", "other", "expected", "said"),
    [
        ({}, {}, (2, 8), "Recommended: take 0.5"),
        # Faster, and its tokens rejoin a state that is as much alike.
        ({}, {"measured": 1.3}, (1, 9), "Recommended: take 0.5"),
        # Faster, but less alike; alike, but not faster by enough; faster by chance.
        ({}, {"measured": 1.5, "alike": 0.88}, (2, 8), "Recommended: take 0.5"),
        ({}, {"measured": 1.25, "alike": 0.95}, (2, 8), "Recommended: take 0.5"),
        ({}, {"measured": 1.5, "spread": 0.3}, (2, 8), "Recommended: take 0.5"),
        # The published window is not worth it, and another one is; none is.
        ({"measured": 1.03}, {"measured": 1.07, "spread": 0.01}, (1, 9), "Recommended: take 0.5"),
        (
            {"measured": MIN_SPEEDUP - 0.01},
            {"measured": 1.5, "alike": 0.5},
            None,
            "No route is worth it here",
        ),
        # Repeats do not agree; all states are alike.
        (
            {"measured": 1.1, "spread": 0.5},
            {"spread": 0.5},
            None,
            "No advice (a step with blocks 2 to 8 at a",
        ),
        ({"measured": 1.5, "alike": 0.99}, {"measured": 1.6, "alike": 0.985}, None, "No advice yet"),
    ],
)
def test_the_published_window_unless_another_is_faster_and_as_alike(published, other, expected, said):
    found = [candidate(2, 8, **published), candidate(1, 9, **other)]
    best, said_of = advise.recommend(found, 12, lambda route: f"take {route.selection_ratio}", "go without")
    windows = best and (best.route.start_layer_idx, best.route.end_layer_idx)
    assert windows == expected
    assert said_of.startswith(said)
    text = advise.report(found, best, said_of)
    assert ("recommended" in text) == (best is not None)


def test_the_recommendation_is_an_override_of_the_command_line():
    (word,) = shlex.split(override(Route(0.25, 1, 3), depth=8))
    routes = written("model=tread", word)["model"]["routes"]
    assert routes == [{"selection_ratio": 0.25, "start_layer_idx": 1, "end_layer_idx": -5}]


def test_similarity_is_the_mean_cosine_of_tokens_between_depths(tmp_path):
    trainer, _ = tiny_trainer(tmp_path, "model=dit", "model.init=xavier")
    experiment = validated("data=synthetic", f"output_dir={tmp_path}")
    dataset = trainer.batches.read.args[0]
    net, states = trainer.net, []
    for block in net.blocks:
        block.register_forward_pre_hook(lambda _, args: states.append(args[0]))
    net.blocks[-1].register_forward_hook(lambda _, __, output: states.append(output))
    alike = similarity(experiment, net, dataset, num_samples=6, batch_size=6, device=torch.device("cpu"))
    for i, j in ((0, 0), (0, 8), (3, 5), (8, 2)):
        expected = torch.cosine_similarity(states[i], states[j], dim=-1).mean().item()
        assert alike[i, j] == pytest.approx(expected, abs=1e-5)
    assert np.allclose(alike, alike.T)
    in_parts = similarity(experiment, net, dataset, num_samples=6, batch_size=4, device=torch.device("cpu"))
    assert np.allclose(in_parts.diagonal(), 1, atol=1e-5)
    assert in_parts[0, 8] == pytest.approx(alike[0, 8], abs=0.05)  # other noise


@pytest.fixture
def nothing_timed(monkeypatch):
    """Let all steps take as long: they run once, to count their FLOPs."""

    alike = lambda steps, device, repeats: {key: [1.0] * repeats for key in steps}  # noqa: E731
    monkeypatch.setattr(advise, "interleaved_seconds", alike)


@pytest.mark.usefixtures("nothing_timed")
def test_advice_on_a_run_leaves_a_table_and_figures(tmp_path, capsys):
    run = tmp_path / "run"
    tiny_run(run, "model=tread", "train.total_steps=1")

    def asked(*overrides):
        advise.main(composed(f"run={run}", "num_samples=8", "repeats=1", *overrides, config_name="advise"))
        return capsys.readouterr().out

    said = asked()
    assert "|2to4|0.5|8|" in said.replace(" ", "")  # columns are aligned
    figures = json.loads((run / "advice" / "advice.json").read_text())
    assert len(figures["candidates"]) == 16
    predicted = {}
    for c in figures["candidates"]:
        ratio, start, end = c["route"].values()
        predicted[start, end, ratio] = c["predicted_speedup"]
        # Before the first block of the window, and after the last.
        assert c["similarity"] == figures["similarity"][start][end + 1]
    assert predicted[1, 5, 0.5] > predicted[2, 4, 0.5] > predicted[2, 4, 0.25] > 1
    net = validated("data=synthetic", *TINY).net()
    net.routes = (Route(0.5, 2, 4),)
    assert predicted[2, 4, 0.5] == pytest.approx(cost_of(net).predicted_speedup, rel=0.01)
    _, rest = (run / "advice" / "advice.md").read_text().split("|\n\n", 1)
    assert rest.strip() in said
    covered = asked("mask_coverage=1", f"output={tmp_path / 'covered'}")
    assert "|2to4|0.5|16|1.00x|" in covered.replace(" ", "")


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
    alike, num_tokens = model_similarity(model, adapter, arguments)
    assert alike.shape == (9, 9) and num_tokens == 16
    for i, j in ((0, 0), (3, 6), (7, 1)):
        expected = torch.cosine_similarity(states[i], states[j], dim=-1).mean().item()
        assert alike[i, j] == pytest.approx(expected, abs=1e-5)


@pytest.mark.usefixtures("nothing_timed")
def test_windows_and_recommendations_are_measured_and_routes_are_kept():
    model, arguments = built("SD3Transformer2DModel")
    routes = attach(model, [Route(0.25, 1, -2)])
    advice = advise_model(model, arguments, repeats=1)
    assert model._attached.routes == routes and model.proj_out.weight.grad is None
    found = {candidate.route: candidate for candidate in advice.candidates}
    assert len(found) == 16 and found[Route(0.5, 2, 4)].num_kept == 8
    windows = (Route(0.5, 1, 5), Route(0.5, 1, 3), Route(0.25, 1, 3))
    promised = [found[window].predicted_speedup for window in windows]
    assert promised == sorted(promised, reverse=True) and promised[-1] > 1


def test_windows_of_as_many_blocks_of_each_kind_share_a_measurement():
    """Not those of FLUX, whose first blocks are of another kind."""
    first, second, x = torch.nn.Linear(1, 1), torch.nn.ReLU(), torch.ones(1, 1)
    for blocks, num_steps in ((4 * [first] + 8 * [second], 1 + 18), (12 * [second], 1 + 2 * 5)):
        ran = []
        step = lambda routes, ran=ran: ran.append(x @ x)  # noqa: E731
        found = advise.measure(blocks, 16, np.ones((13, 13)), step, 1, x.device)
        assert len(found) == 18 and len(ran) == 3 * num_steps, "counted, warmed up and timed"


def test_a_short_model_gets_no_advice():
    model, arguments = built("SD3Transformer2DModel", SIZES._replace(depth=7))
    with pytest.raises(ValueError, match="SD3Transformer2DModel has 7 blocks: advice needs 8"):
        advise_model(model, arguments)
