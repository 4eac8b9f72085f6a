"""Networks from files, as public code saves them and as `builders.export` writes them."""

import argparse
import json
import math
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from builders.public import CONFIG
from builders.sampling import SamplingConfig, open_run, read_source
from diffusion import CFG, Branch
from tests.latents import write_latents
from tests.networks import small_dit
from tests.programs import start
from tests.public_dit import CHANNELS, CLASSES, PATCH, SIDE, SWITCHES, WIDTH, PublicDiT, public
from tests.runs import open_weights_file, tiny_run
from training import weights
from training.run_folder import RunFolder
from training.weights import load_weights

NET = small_dit()


def legacy(state):
    """REPA's earlier layout, which numbers the blocks after the aligned ones from 0 again."""
    renamed = {}
    for name, tensor in state.items():
        group, _, rest = name.partition(".")
        index, _, part = rest.partition(".")
        is_late = group == "blocks" and int(index) >= 4
        renamed[f"decoder_blocks.{int(index) - 4}.{part}" if is_late else name] = tensor
    return renamed


def saved_as(code, net, file):
    """Save a network the way that public code saves it."""
    state, declared = net.state_dict(), {"num_classes": CLASSES}
    heads = {"projectors.0.0.weight": torch.zeros(3, 3)}
    content = {
        "dit_training": {"model": {}, "ema": state, "opt": {}, "args": argparse.Namespace(**declared)},
        "repa": {"model": {}, "ema": state | heads, "steps": 4},
        "repa_legacy": {"model": {}, "ema": legacy(state) | heads, "steps": 4},
        "lightning": {"model": {}, "ema": state, "opt": {}, "config": {"train": {"max_steps": 8}}},
        "lightning_classes": {"model": {}, "ema": state, "config": {"data": declared}},
        "no_null_class": {"ema": state, "args": argparse.Namespace(**declared)},
        "tread": {"ema": {f"module.{k}": v for k, v in state.items()}},
    }
    torch.save(content.get(code, state), file)  # the published files are the averaged weights alone


# code: objective, and what its network has
CASES = {
    "dit": ("ddpm", {"learn_sigma": True}),
    "dit_training": ("ddpm", {"learn_sigma": True}),
    "sit": ("sit", {"learn_sigma": True}),
    "repa": ("flow", {}),
    "repa_legacy": ("flow", {}),
    "lightning": ("sit", {"switches": SWITCHES}),
    "lightning_classes": ("sit", {"switches": SWITCHES, "num_rows": CLASSES}),
    "no_null_class": ("sit", {"num_rows": CLASSES}),
    "tread": ("edm", {}),
    "shallow": ("edm", {"depth": 5}),
}


def denoised_by_the_paper(objective, net, x, t, y):
    """D_x of one time t, from the public code's own convention of time and output."""
    one = torch.ones(len(x))
    if objective == "ddpm":  # t = k + 1 after step k
        products = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0)
        product = products[int(t) - 1].item()
        eps = net(x, (t - 1) * one, y)[:, :CHANNELS]
        return (x - math.sqrt(1 - product) * eps) / math.sqrt(product)
    if objective == "sit":  # x_u = u x_0 + (1 - u) eps, u = 1 - t; v = x_0 - eps
        return x + t * net(x, (1 - t) * one, y)[:, :CHANNELS]
    if objective == "flow":
        return x - t * net(x, t * one, y)[:, :CHANNELS]
    scale = math.sqrt(t**2 + 0.25)
    return 0.25 / scale**2 * x + t * 0.5 / scale * net(x / scale, math.log(t) / 4 * one, y)[:, :CHANNELS]


@pytest.mark.parametrize("code", CASES)
def test_files_of_public_code_give_its_outputs(code, tmp_path):
    objective, options = CASES[code]
    net, file = public(**options), tmp_path / f"{code}.pt"
    saved_as(code, net, file)
    opened = open_weights_file(file, objective)
    t, num_rows = {"ddpm": 700.0, "edm": 1.7}.get(objective, 0.6), options.get("num_rows", CLASSES + 1)
    x, y = torch.randn(3, CHANNELS, SIDE, SIDE), torch.tensor([1, 8, num_rows - 1])
    with torch.no_grad():
        expected = denoised_by_the_paper(objective, net, x, t, y)
        torch.testing.assert_close(opened.precond(x, torch.tensor(t), y), expected, rtol=1e-3, atol=1e-4)
    assert opened.experiment.details["data"]["manifest"]["scale"] == 0.18215
    has_routes = (objective in ("edm", "flow") or "switches" in options) and code != "shallow"
    assert bool(opened.precond.net.routes) == has_routes, "what sparse guidance needs"
    assert opened.precond.net.num_classes == CLASSES
    if num_rows == CLASSES:
        with pytest.raises(ValueError, match=r"for a network whose null class was not trained"):
            CFG(2.0)(Branch(opened.precond, y))


@pytest.mark.parametrize("rope, swiglu, rms_norm", list(product([False, True], repeat=3)))
def test_each_combination_of_lightningdits_switches_is_right_or_refused(rope, swiglu, rms_norm, tmp_path):
    """It is sampled, or a run starts from it; the test above has the supported combinations."""
    on = [name for name, given in zip(SWITCHES, (rope, swiglu, rms_norm), strict=True) if given]
    torch.save({"ema": public(switches=on, depth=1).state_dict()}, tmp_path / "file.pt")
    if len(on) in (0, 3):
        assert open_weights_file(tmp_path / "file.pt", "sit").experiment.model_node.arguments["depth"] == 1
        return
    for read in (partial(open_weights_file, objective="sit"), partial(load_weights, small_dit())):
        with pytest.raises(ValueError, match=r"without RoPE|the model has|differs from the model's rotary"):
            read(tmp_path / "file.pt")


@pytest.mark.parametrize("width, heads", [(1536, 24), (1792, 28)])
def test_the_widths_of_larger_lightningdits_are_known(width, heads, tmp_path, monkeypatch):
    with torch.device("meta"):
        state = PublicDiT(switches=SWITCHES, width=width, heads=heads).state_dict()
    (tmp_path / "file.pt").touch()
    monkeypatch.setattr(weights, "_content", lambda file, shapes_only: state)
    request = SamplingConfig(checkpoint=tmp_path / "file.pt", objective="sit")
    assert read_source(request).model_node.arguments["num_heads"] == heads


def entries(**more):
    """A file of raw weights, with more beside them."""
    return {"model": NET.state_dict(), **more}


FLAT = torch.cat([tensor.flatten() for tensor in NET.state_dict().values()])
STATE = {f"module.{name}": tensor for name, tensor in NET.state_dict().items()}
MOMENTS = {"state": {i: {"exp_avg": torch.zeros(3), "step": 1} for i in range(200)}, "param_groups": []}


@pytest.mark.parametrize(
    "content, expected",
    [
        (entries(), "model"),
        (entries(opt=MOMENTS, optimizers=[MOMENTS], ema_decay=0.9, ema={}, step=torch.ones(1)), "model"),
        (entries(opt=MOMENTS, ema=None, ema_steps=torch.tensor(5), vae={"x": torch.zeros(3)}), "model"),
        (entries(avg_meters={str(i): torch.tensor(1.0) for i in range(200)}), "model"),
        ({"ema": STATE, **entries(model_state_dict=STATE)}, "ema"),
        (entries(model_ema=STATE), "under model_ema, which"),
        (entries(EMA=STATE), "under EMA, which"),
        (entries(ema_9999={"shadow": list(STATE.values())}), "under ema_9999.shadow, which"),
        (entries(averages={"0.9999": STATE}), "under averages.0.9999, which"),
        (entries(swa_state={"n_averaged": torch.tensor(5), **STATE}), "under swa_state, which"),
        (entries(optimizer_states=[{"ema": list(STATE.values())}]), "under optimizer_states.0.ema, which"),
        (entries(target_net=STATE), "under target_net, which"),
        (entries(emas=[STATE, STATE | {}]), r"under emas.1, emas.0, which"),
        ({"ema": STATE, "ema_0.999": STATE | {}}, "and under ema_0.999, which"),
        (entries(model_state_dict=STATE), "under model_state_dict, which"),
        (entries(optimizer=[FLAT, FLAT + 1]), "model"),
        (entries(ema_flat=FLAT), "under ema_flat, which"),
        (entries(ema=FLAT), "under ema, which"),
        (entries(ema_params=[FLAT]), "under ema_params, ema_params.0, which"),
        (entries(shadow=list(FLAT.chunk(8))), "under shadow, which"),
        ({"model": FLAT}, r"weights do not match the model: .* is missing"),
        (entries(ema={name: STATE[name] for name in STATE if "table" not in name}), "under model, which"),
        ({"ema": STATE, "encoder": {**NET.state_dict(), "norm.weight": torch.ones(3)}}, "ema"),
        ({"ema": STATE, "model": {**NET.state_dict(), "projectors.0.weight": torch.ones(3)}}, "ema"),
        ({name: tensor.to(torch.int8) for name, tensor in STATE.items()}, "is torch.int8, must be a dense"),
        ({name: tensor.to(torch.complex64) for name, tensor in STATE.items()}, "must be a dense"),
        ({name: tensor.to_sparse() for name, tensor in STATE.items()}, "must be a dense floating-point"),
        ({"ema_model": STATE, "step": 4}, r"must contain named tensors, .*: it has ema_model, step$"),
        ({"state_dict": {**STATE, "net.pos_embed": STATE["module.pos_embed"]}},
         "has module.pos_embed and net.pos_embed, both named pos_embed here: keep one"),
        ({"state_dict": {**STATE, "model_ema.pos_embed": STATE["module.pos_embed"]}},
         r"weights do not match the model: model_ema.pos_embed is \(1, 16, 32\), the model has None"),
        ({**STATE, "model._orig_mod.pos_embed": STATE["module.pos_embed"]}, "both named pos_embed here"),
        ({**NET.state_dict(), "blocks.0.mlp.w12.bias2": torch.zeros(32)}, "has SwiGLU without RoPE"),
        ({**NET.state_dict(), "blocks.0.attn.q_norm.weight": torch.ones(8)}, r"q_norm.weight is \(8,\)"),
    ],
)  # fmt: skip
def test_ambiguous_weights_are_refused(content, expected, tmp_path):
    """Averages under other names, prefixes that collide, and unknown parts."""
    torch.save(content, tmp_path / "file.pt")
    if expected in weights.ENTRIES:
        assert weights.read_weights(tmp_path / "file.pt").entry == expected
    else:
        with pytest.raises(ValueError, match=expected) as raised:
            load_weights(small_dit(), tmp_path / "file.pt")
        assert str(raised.value).startswith(str(tmp_path / "file.pt")) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "num_rows, declared, expected",
    [(11, 11, (11, 0.0)), (10, 9, (9, 0.1)), (11, None, (10, 0.1)), (1001, None, (1000,)), (0, 1000, (0,))],
)
def test_the_number_of_classes_is_read_from_the_file(num_rows, declared, expected, tmp_path):
    """Without a table of labels it has none, even if the arguments of its script have a default."""
    state = public(depth=1, num_rows=num_rows).state_dict()
    state = state if num_rows else {name: tensor for name, tensor in state.items() if "y_embed" not in name}
    args = {"args": {"num_classes": declared}} if declared else {}
    torch.save({"ema": state, **args}, tmp_path / "file.pt")
    net = open_weights_file(tmp_path / "file.pt", "sit").precond.net
    assert (net.num_classes, net.class_dropout_prob)[: len(expected)] == expected


WIDE = {"x_embedder.proj.weight": torch.zeros(400, CHANNELS, PATCH, PATCH)}
ROLLED = {"feat_rope.freqs_sin": public(switches=SWITCHES, depth=1).feat_rope.freqs_sin.roll(1, dims=0)}


@pytest.mark.parametrize(
    "options, changes, declared, objective, message",
    [
        ({}, {}, None, None, "objective must be given"),
        ({}, WIDE, None, "edm", "hidden_size=400 must be a published width"),
        ({}, {"x_embedder.proj.weight": None}, None, "edm", "does not have the names and shapes of a DiT"),
        ({"switches": SWITCHES}, ROLLED, None, "sit",
         r"feat_rope\.freqs_sin differs from the model's rotary positions"),
        ({"num_rows": 1000}, {}, None, "sit", "1000 rows of labels are 1000 classes, or 999 and the null"),
        ({"num_rows": 10}, {}, None, "sit", "give latents=FOLDER, whose manifest has num_classes"),
        ({"num_rows": 11}, {}, 12, "sit", "11 rows of labels must be num_classes=12, from the file, or"),
    ],
)  # fmt: skip
def test_files_without_a_required_value_are_refused(options, changes, declared, objective, message, tmp_path):
    state = public(depth=1, **options).state_dict() | changes
    state = {name: tensor for name, tensor in state.items() if tensor is not None}
    args = {"args": {"num_classes": declared}} if declared else {}
    torch.save({"ema": state, **args}, tmp_path / "file.pt")
    with pytest.raises(ValueError, match=message):
        open_weights_file(tmp_path / "file.pt", objective)


def test_latents_of_another_autoencoder_need_a_latent_folder(tmp_path):
    """A folder of latents is needed: a file does not contain their scale."""
    state = public(depth=1).state_dict()
    state["x_embedder.proj.weight"] = torch.zeros(WIDTH, 6, PATCH, PATCH)
    state["final_layer.linear.weight"] = torch.zeros(6 * PATCH**2, WIDTH)
    state["final_layer.linear.bias"] = torch.zeros(6 * PATCH**2)
    torch.save({"ema": state}, tmp_path / "six.pt")
    with pytest.raises(
        ValueError, match=r"latents of 6 channels, which .* does not make: give latents=FOLDER"
    ):
        open_weights_file(tmp_path / "six.pt", "sit")
    scale, zeros = tuple(0.1 * (i + 1) for i in range(6)), np.zeros((2, 6, SIDE, SIDE))
    fields = {"encoder": "OWNER/NAME", "num_classes": CLASSES, "scale": scale}
    fields["untrained_classes"] = (3,)  # which the network may have been trained on
    write_latents(tmp_path / "latents", zeros, np.zeros(2, np.int64), **fields)
    opened = open_weights_file(tmp_path / "six.pt", "sit", latents=str(tmp_path / "latents"))
    described = opened.experiment.details["data"]["manifest"]
    assert (described["scale"], described["untrained_classes"]) == (scale, ())


def test_files_of_this_project_need_their_manifest_or_run(tmp_path):
    net = {"pos_embed": torch.zeros(1)}
    save_file(net, tmp_path / "cut.safetensors", metadata={CONFIG: "{}"})
    with pytest.raises(ValueError, match="has no manifest of its latents"):
        open_weights_file(tmp_path / "cut.safetensors")
    (step := tmp_path / "r/checkpoints/step_00000004").mkdir(parents=True)
    save_file(net, step / "ema.safetensors")
    with pytest.raises(ValueError, match=f"belongs to a run: give run={tmp_path}/r checkpoint=step_00000004"):
        open_weights_file(step / "ema.safetensors", "edm")


@pytest.mark.slow
def test_an_exported_run_is_sampled_by_the_same_command(tmp_path):
    tiny_run(tmp_path / "r", "diffusion=flow")
    start("-m builders.export", f"run={tmp_path}/r", f"out={tmp_path}/net.safetensors")
    few = ("num_samples=4", "num_steps=2", "guidance_scale=1.5")
    for source, name in (("run", "r"), ("checkpoint", "net.safetensors")):
        start("sample.py", f"{source}={tmp_path}/{name}", *few, f"out={tmp_path}/{source}.npz")
    arrays = [np.load(tmp_path / f"{source}.npz") for source in ("run", "checkpoint")]
    assert np.array_equal(arrays[0]["arr_0"], arrays[1]["arr_0"])
    record = json.loads((tmp_path / "checkpoint.json").read_text())
    assert record["cost_per_image"]["network_evaluations"] == 6
    opened = open_run(tmp_path / "r"), open_weights_file(tmp_path / "net.safetensors")
    assert opened[0].experiment.written == opened[1].experiment.written
    tiny_run(tmp_path / "next", "diffusion=flow", f"train.init_from={tmp_path}/net.safetensors")
    assert not RunFolder(tmp_path / "next").manifest()["init_from"]["other_objective"]
