"""Networks from files, as public code saves them and as `models.export` writes them."""

import argparse
import json
import math

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import save_file

import sample
from builders import config as configuration
from builders.public import CONFIG
from builders.sampling import check_sampling, open_run, open_weights_file
from data import LatentManifest, LatentWriter
from tests.programs import start
from tests.runs import composed, tiny_run
from training.run_folder import RunFolder

WIDTH, HEADS, DEPTH, PATCH, CHANNELS, SIDE, CLASSES = 384, 6, 7, 2, 4, 8, 10


class PublicDiT(nn.Module):
    """A DiT written from the paper alone, with the names of public checkpoints."""

    def __init__(self, learn_sigma):
        super().__init__()
        D, out = WIDTH, CHANNELS * (2 if learn_sigma else 1)
        self.x_embedder = nn.ModuleDict({"proj": nn.Conv2d(CHANNELS, D, PATCH, PATCH)})
        self.t_embedder = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(256, D), nn.SiLU(), nn.Linear(D, D))})
        self.y_embedder = nn.ModuleDict({"embedding_table": nn.Embedding(CLASSES + 1, D)})
        self.pos_embed = nn.Parameter(torch.randn(1, (SIDE // PATCH) ** 2, D), requires_grad=False)
        self.blocks = nn.ModuleList()
        for _ in range(DEPTH):
            attn = nn.ModuleDict({"qkv": nn.Linear(D, 3 * D), "proj": nn.Linear(D, D)})
            mlp = nn.ModuleDict({"fc1": nn.Linear(D, 4 * D), "fc2": nn.Linear(4 * D, D)})
            ada = nn.Sequential(nn.SiLU(), nn.Linear(D, 6 * D))
            self.blocks.append(nn.ModuleDict({"attn": attn, "mlp": mlp, "adaLN_modulation": ada}))
        last = {"linear": nn.Linear(D, PATCH**2 * out)}
        last["adaLN_modulation"] = nn.Sequential(nn.SiLU(), nn.Linear(D, 2 * D))
        self.final_layer = nn.ModuleDict(last)

    def forward(self, x, t, y):
        N, D = x.shape[0], WIDTH
        h = self.x_embedder["proj"](x).flatten(2).transpose(1, 2) + self.pos_embed
        frequencies = torch.exp(-math.log(10000) * torch.arange(128) / 128)
        angles = t[:, None] * frequencies
        c = self.t_embedder["mlp"](torch.cat([angles.cos(), angles.sin()], dim=1))
        c = c + self.y_embedder["embedding_table"](y)
        norm = lambda h: F.layer_norm(h, (D,), eps=1e-6)  # noqa: E731
        for block in self.blocks:
            a, b, gate, d, e, gate2 = block["adaLN_modulation"](c)[:, None].chunk(6, dim=2)
            q, k, v = block["attn"]["qkv"](norm(h) * (1 + b) + a).view(N, -1, 3, HEADS, D // HEADS).unbind(2)
            weights = torch.einsum("nqhd,nkhd->nhqk", q, k).div(math.sqrt(D // HEADS)).softmax(-1)
            mixed = torch.einsum("nhqk,nkhd->nqhd", weights, v).reshape(N, -1, D)
            h = h + gate * block["attn"]["proj"](mixed)
            inner = F.gelu(block["mlp"]["fc1"](norm(h) * (1 + e) + d), approximate="tanh")
            h = h + gate2 * block["mlp"]["fc2"](inner)
        shift, scale = self.final_layer["adaLN_modulation"](c)[:, None].chunk(2, dim=2)
        h = self.final_layer["linear"](norm(h) * (1 + scale) + shift)
        g, p = SIDE // PATCH, PATCH
        return torch.einsum("nijpqc->ncipjq", h.view(N, g, g, p, p, -1)).reshape(N, -1, g * p, g * p)


class PublicLightningDiT(nn.Module):
    """A LightningDiT written from its description, with the names of its checkpoints."""

    def __init__(self):
        super().__init__()
        D, inner, d = WIDTH, 2 * 4 * WIDTH // 3, WIDTH // HEADS
        self.x_embedder = nn.ModuleDict({"proj": nn.Conv2d(CHANNELS, D, PATCH, PATCH)})
        self.t_embedder = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(256, D), nn.SiLU(), nn.Linear(D, D))})
        self.y_embedder = nn.ModuleDict({"embedding_table": nn.Embedding(CLASSES + 1, D)})
        self.pos_embed = nn.Parameter(torch.randn(1, (SIDE // PATCH) ** 2, D), requires_grad=False)
        self.feat_rope = nn.Module()  # its tables are in the file
        self.feat_rope.register_buffer("freqs_cos", torch.zeros((SIDE // PATCH) ** 2, d))
        self.feat_rope.register_buffer("freqs_sin", torch.zeros((SIDE // PATCH) ** 2, d))
        self.blocks = nn.ModuleList()
        for _ in range(DEPTH):
            attn = nn.ModuleDict({"qkv": nn.Linear(D, 3 * D), "proj": nn.Linear(D, D)})
            mlp = nn.ModuleDict({"w12": nn.Linear(D, 2 * inner), "w3": nn.Linear(inner, D)})
            block = {"norm1": nn.RMSNorm(D), "norm2": nn.RMSNorm(D), "attn": attn, "mlp": mlp}
            block["adaLN_modulation"] = nn.Sequential(nn.SiLU(), nn.Linear(D, 6 * D))
            self.blocks.append(nn.ModuleDict(block))
        last = {"norm_final": nn.RMSNorm(D), "linear": nn.Linear(D, PATCH**2 * CHANNELS)}
        last["adaLN_modulation"] = nn.Sequential(nn.SiLU(), nn.Linear(D, 2 * D))
        self.final_layer = nn.ModuleDict(last)

    def turned(self, q):  # (N, T, H, d): half of each head by the row, half by the column, pair by pair
        d, side = WIDTH // HEADS, SIDE // PATCH
        speed = 10000.0 ** -(torch.arange(0, d // 2, 2) / (d // 2))
        rows, columns = torch.arange(side).repeat_interleave(side), torch.arange(side).repeat(side)
        angles = torch.cat([rows[:, None] * speed, columns[:, None] * speed], dim=1)  # (T, d / 2)
        pairs = torch.view_as_complex(q.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones(()), angles)[:, None]).flatten(-2)

    def forward(self, x, t, y):
        N, D = x.shape[0], WIDTH
        norm = lambda module, h: h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt() * module.weight  # noqa: E731
        h = self.x_embedder["proj"](x).flatten(2).transpose(1, 2) + self.pos_embed
        angles = t[:, None] * torch.exp(-math.log(10000) * torch.arange(128) / 128)
        c = self.t_embedder["mlp"](torch.cat([angles.cos(), angles.sin()], dim=1))
        c = c + self.y_embedder["embedding_table"](y)
        for block in self.blocks:
            a, b, gate, d, e, gate2 = block["adaLN_modulation"](c)[:, None].chunk(6, dim=2)
            inner = norm(block["norm1"], h) * (1 + b) + a
            q, k, v = block["attn"]["qkv"](inner).view(N, -1, 3, HEADS, D // HEADS).unbind(2)
            weights = torch.einsum("nqhd,nkhd->nhqk", self.turned(q), self.turned(k))
            weights = weights.div(math.sqrt(D // HEADS)).softmax(-1)
            mixed = torch.einsum("nhqk,nkhd->nqhd", weights, v).reshape(N, -1, D)
            h = h + gate * block["attn"]["proj"](mixed)
            gated, value = block["mlp"]["w12"](norm(block["norm2"], h) * (1 + e) + d).chunk(2, dim=-1)
            h = h + gate2 * block["mlp"]["w3"](F.silu(gated) * value)
        shift, scale = self.final_layer["adaLN_modulation"](c)[:, None].chunk(2, dim=2)
        h = self.final_layer["linear"](norm(self.final_layer["norm_final"], h) * (1 + scale) + shift)
        g, p = SIDE // PATCH, PATCH
        return torch.einsum("nijpqc->ncipjq", h.view(N, g, g, p, p, -1)).reshape(N, -1, g * p, g * p)


def public(learn_sigma, kind=PublicDiT):
    torch.manual_seed(0)
    net = PublicDiT(learn_sigma) if kind is PublicDiT else kind()
    for name, parameter in net.named_parameters():
        # Large queries and keys, or attention would be a mean, and positions would not matter.
        parameter.data = torch.randn_like(parameter) * (0.1 if "qkv.weight" in name else 0.05)
        parameter.data += 1.0 if "norm" in name else 0.0
    return net.eval()


def saved_as(code, net, file):
    """Save a network the way that public code saves it."""
    state = net.state_dict()
    content = {
        "dit": lambda: state,  # the published files are the averaged weights alone
        "sit": lambda: state,
        "dit_training": lambda: {"model": {}, "ema": state, "opt": {}, "args": argparse.Namespace(lr=1e-4)},
        "repa": lambda: {
            "model": {},
            "ema": state | {"projectors.0.0.weight": torch.zeros(3, 3)},
            "steps": 4,
        },
        "lightning": lambda: {
            "model": {},
            "ema": state,
            "opt": {},
            "config": {"train": {"max_steps": 80000}},
        },
        "tread": lambda: {"ema": {f"module.{k}": v for k, v in state.items()}},
    }[code]()
    torch.save(content, file)


# code, objective, learned variance, and D_x of its network by the words of its paper
CASES = {
    "dit": ("ddpm", True),
    "dit_training": ("ddpm", True),
    "sit": ("sit", True),
    "repa": ("flow", False),
    "lightning": ("sit", False),
    "tread": ("edm", False),
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
    objective, learn_sigma = CASES[code]
    kind = PublicLightningDiT if code == "lightning" else PublicDiT
    net, file = public(learn_sigma, kind), tmp_path / f"{code}.pt"
    saved_as(code, net, file)
    opened = open_weights_file(file, objective)
    t = {"ddpm": 700.0, "edm": 1.7}.get(objective, 0.6)
    x, y = torch.randn(3, CHANNELS, SIDE, SIDE), torch.tensor([1, 9, 10])
    with torch.no_grad():
        expected = denoised_by_the_paper(objective, net, x, t, y)
        torch.testing.assert_close(opened.precond(x, torch.tensor(t), y), expected, rtol=1e-3, atol=1e-4)
    assert opened.details["data"]["manifest"]["scale"] == 0.18215
    has_routes = objective in ("edm", "flow") or code == "lightning"
    assert bool(opened.precond.net.routes) == has_routes, "what sparse guidance needs"


def test_latents_of_another_autoencoder_have_to_be_described(tmp_path):
    """By a folder of them: a file does not say how they are scaled."""
    state = public(False).state_dict()
    state["x_embedder.proj.weight"] = torch.zeros(WIDTH, 6, PATCH, PATCH)
    state["final_layer.linear.weight"] = torch.zeros(6 * PATCH**2, WIDTH)
    state["final_layer.linear.bias"] = torch.zeros(6 * PATCH**2)
    torch.save(state, tmp_path / "six.pt")
    with pytest.raises(ValueError, match=r"latents of 6 channels, not those of .*: give latents=FOLDER"):
        open_weights_file(tmp_path / "six.pt", "sit")
    scale = tuple(0.1 * (i + 1) for i in range(6))
    manifest = LatentManifest(2, (6, SIDE, SIDE), "float32", "samples", CLASSES, "OWNER/NAME", scale=scale)
    with LatentWriter(tmp_path / "latents", manifest) as writer:
        writer.append(np.zeros((2, 6, SIDE, SIDE), np.float32), np.zeros(2, np.int64))
    opened = open_weights_file(tmp_path / "six.pt", "sit", latents=str(tmp_path / "latents"))
    assert opened.details["data"]["manifest"]["scale"] == scale
    # A network that predicts no change draws noise, which this scale and shift make white.
    white = LatentManifest(
        2, (3, SIDE, SIDE), "float32", "samples", CLASSES, "identity", scale=100.0, shift=1.0
    )
    with LatentWriter(tmp_path / "white", white) as writer:
        writer.append(np.ones((2, 3, SIDE, SIDE), np.float32), np.zeros(2, np.int64))
    state["x_embedder.proj.weight"] = torch.zeros(WIDTH, 3, PATCH, PATCH)
    state["final_layer.linear.weight"] = torch.zeros(3 * PATCH**2, WIDTH)
    state["final_layer.linear.bias"] = torch.zeros(3 * PATCH**2)
    torch.save(state, tmp_path / "three.pt")
    asked = ("objective=sit", f"latents={tmp_path}/white", "num_samples=2", "sampler=euler", "num_steps=2")
    asked += (f"checkpoint={tmp_path}/three.pt", f"output={tmp_path}/white.npz", "compile=false")
    sample.main(composed(*asked, config_name="sample"))
    assert np.load(tmp_path / "white.npz")["arr_0"].min() > 230
    for asked, told in (
        (f"checkpoint={tmp_path}/six.pt objective=sit", "give latents=FOLDER"),
        (f"run={tmp_path} latents=x", "latents=x must not be given with run"),
    ):
        request = configuration.resolve(composed(*asked.split(), config_name="sample"))
        with pytest.raises(ValueError, match=told):
            check_sampling(request)


@pytest.mark.parametrize(
    "objective, content, told",
    [
        (None, "dit", "objective must be given"),
        ("vae", "dit", "objective=vae"),
        ("edm", "other", "does not have the names and shapes of a DiT"),
        ("edm", "without blocks", "does not have the names and shapes of a DiT"),
        ("edm", "wide", "hidden_size=400 must be a published width"),
    ],
)
def test_what_a_file_does_not_say_has_to_be_given(objective, content, told, tmp_path):
    state = public(False).state_dict()
    if content == "other":
        state = {"weight": torch.zeros(3)}
    if content == "without blocks":
        state = {name: tensor for name, tensor in state.items() if not name.startswith("blocks.")}
    if content == "wide":
        state["x_embedder.proj.weight"] = torch.zeros(400, CHANNELS, PATCH, PATCH)
    torch.save(state, tmp_path / "file.pt")
    with pytest.raises(ValueError, match=told):
        open_weights_file(tmp_path / "file.pt", objective)


def test_files_of_this_project_say_what_they_are(tmp_path):
    net = {"pos_embed": torch.zeros(1)}
    save_file(net, tmp_path / "cut.safetensors", metadata={CONFIG: "{}"})
    with pytest.raises(ValueError, match="has no manifest of its latents"):
        open_weights_file(tmp_path / "cut.safetensors")
    (step := tmp_path / "r/checkpoints/step_00000004").mkdir(parents=True)
    save_file(net, step / "ema.safetensors")
    with pytest.raises(ValueError, match=f"is of a run: give run={tmp_path}/r checkpoint=step_00000004"):
        open_weights_file(step / "ema.safetensors", "edm")


@pytest.mark.slow
def test_an_exported_run_is_sampled_by_the_same_command(tmp_path):
    tiny_run(tmp_path / "r", "diffusion=flow")
    start("-m models.export", f"run={tmp_path}/r", f"output={tmp_path}/net.safetensors")
    few = ("num_samples=4", "num_steps=2", "guidance_scale=1.5")
    for source, name in (("run", "r"), ("checkpoint", "net.safetensors")):
        start("sample.py", f"{source}={tmp_path}/{name}", *few, f"output={tmp_path}/{source}.npz")
    arrays = [np.load(tmp_path / f"{source}.npz") for source in ("run", "checkpoint")]
    assert np.array_equal(arrays[0]["arr_0"], arrays[1]["arr_0"])
    record = json.loads((tmp_path / "checkpoint.json").read_text())
    assert record["cost_per_image"]["network_evaluations"] == 6
    assert open_run(tmp_path / "r").config == open_weights_file(tmp_path / "net.safetensors").config
    tiny_run(tmp_path / "next", "diffusion=flow", f"train.init_from={tmp_path}/net.safetensors")
    assert not RunFolder(tmp_path / "next").manifest()["init_from"]["other_objective"]
