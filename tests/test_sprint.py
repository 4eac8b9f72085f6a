"""SPRINT's network: its published files give its outputs, its size and its cost."""

import json
from dataclasses import asdict

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import save_file

from builders.network import build_net
from builders.sampling import open_weights_file
from data import LatentManifest
from models import cost_of
from routing import Routing
from study.published import expected_config, read_header

WIDTH, HEADS, PATCH, CHANNELS, CLASSES = 384, 6, 2, 4, 10
STACKS = ("encoder_blocks", "middle_blocks", "decoder_blocks")


def linear_after_silu(size):
    return nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, size))


def public_block():
    D = WIDTH
    attn = {"qkv": nn.Linear(D, 3 * D), "proj": nn.Linear(D, D)}
    attn |= {name: nn.RMSNorm(D // HEADS) for name in ("q_norm", "k_norm")}
    mlp = nn.ModuleDict({"fc1": nn.Linear(D, 4 * D), "fc2": nn.Linear(4 * D, D)})
    return nn.ModuleDict(
        {"attn": nn.ModuleDict(attn), "mlp": mlp, "adaLN_modulation": linear_after_silu(6 * D)}
    )


class PublicSprint(nn.Module):
    """The network written from its description, with the names and layouts of its files."""

    def __init__(self, depths=(2, 3, 2)):
        super().__init__()
        D, patch = WIDTH, CHANNELS * PATCH**2
        self.x_embedder = nn.ModuleDict({"proj": nn.Linear(patch, D)})
        self.t_embedder = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(256, D), nn.SiLU(), nn.Linear(D, D))})
        self.y_embedder = nn.ModuleDict({"embedding_table": nn.Embedding(CLASSES + 1, D)})
        for stack, depth in zip(STACKS, depths, strict=True):
            self.add_module(stack, nn.ModuleList(public_block() for _ in range(depth)))
        self.mask_token = nn.Parameter(torch.empty(1, 1, D), requires_grad=False)
        self.renoise_linear = nn.Linear(2 * D, D)
        last = {"linear": nn.Linear(D, patch), "adaLN_modulation": linear_after_silu(2 * D)}
        self.final_layer = nn.ModuleDict(last)

    @staticmethod
    def turned(q, places, side):  # (N, L, H, d): half of each head by the row, half by the column
        speed = 10000.0 ** -torch.arange(0, 1, 4 / q.shape[-1])
        angles = torch.cat([(places // side)[..., None] * speed, (places % side)[..., None] * speed], dim=-1)
        sin, cos = angles.sin()[:, :, None], angles.cos()[:, :, None]  # (N, L, 1, d / 2)
        even, odd = q[..., ::2], q[..., 1::2]
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)

    def run(self, blocks, h, c, places, side):
        N, d = len(h), WIDTH // HEADS
        norm = lambda h: F.layer_norm(h, (WIDTH,), eps=1e-6)  # noqa: E731
        rms = lambda q, w: w * q / (q.square().mean(-1, keepdim=True) + 1e-6).sqrt()  # noqa: E731
        for block in blocks:
            a, b, gate, e, f, gate2 = block["adaLN_modulation"](c)[:, None].chunk(6, dim=2)
            attn, mlp = block["attn"], block["mlp"]
            q, k, v = attn["qkv"](norm(h) * (1 + b) + a).view(N, -1, 3, HEADS, d).unbind(2)
            q, k = rms(q, attn["q_norm"].weight), rms(k, attn["k_norm"].weight)
            q, k = self.turned(q, places, side), self.turned(k, places, side)
            weights = torch.einsum("nqhd,nkhd->nhqk", q, k).div(d**0.5).softmax(-1)
            h = h + gate * attn["proj"](torch.einsum("nhqk,nkhd->nqhd", weights, v).flatten(2))
            h = h + gate2 * mlp["fc2"](F.gelu(mlp["fc1"](norm(h) * (1 + f) + e), approximate="tanh"))
        return h

    def forward(self, x, t, y, kept=None):
        """Velocity at time t, 1 at noise. kept (N, K): tokens in the middle; all if None, none if K = 0."""
        N, side = len(x), x.shape[-1] // PATCH
        places = torch.arange(side**2).expand(N, -1)
        patches = torch.einsum("ncipjq->nijcpq", x.view(N, CHANNELS, side, PATCH, side, PATCH))
        h = self.x_embedder["proj"](patches.reshape(N, side**2, -1))
        angles = t[:, None] * 10000 ** -(torch.arange(128) / 128)
        c = self.t_embedder["mlp"](torch.cat([angles.cos(), angles.sin()], dim=1))
        c = c + self.y_embedder["embedding_table"](y)
        dense = self.run(self.encoder_blocks, h, c, places, side)
        kept = places if kept is None else kept
        deep = self.mask_token.expand(N, side**2, -1).clone()
        for i in range(N if kept.shape[1] else 0):
            own = kept[i : i + 1]
            deep[i, own[0]] = self.run(self.middle_blocks, dense[i : i + 1, own[0]], c[i : i + 1], own, side)[
                0
            ]
        h = self.renoise_linear(torch.cat([deep, dense], dim=2))
        h = self.run(self.decoder_blocks, h, c, places, side)
        shift, scale = self.final_layer["adaLN_modulation"](c)[:, None].chunk(2, dim=2)
        h = self.final_layer["linear"](F.layer_norm(h, (WIDTH,), eps=1e-6) * (1 + scale) + shift)
        h = h.view(N, side, side, CHANNELS, PATCH, PATCH)
        return torch.einsum("nijcpq->ncipjq", h).reshape(x.shape)


def public(**arguments):
    torch.manual_seed(0)
    net = PublicSprint(**arguments)
    for name, parameter in net.named_parameters():
        # Large queries and keys, or attention would be a mean, and positions would not matter.
        parameter.data = torch.randn_like(parameter) * (0.02 if name == "mask_token" else 0.05)
        parameter.data += 1.0 if "norm" in name else 0.0
    return net.eval()


def saved(state, file, prefix=""):
    state = {prefix + name: tensor.contiguous() for name, tensor in state.items()}
    save_file(state, file) if file.suffix == ".safetensors" else torch.save(state, file)
    return file


def latents_of(folder, shape):
    manifest = LatentManifest(2, shape, "float32", "samples", CLASSES, "OWNER/NAME", scale=1.0)
    folder.mkdir()
    (folder / "manifest.json").write_text(json.dumps(asdict(manifest)))
    return str(folder)


def inputs(side, num_samples=3):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, CHANNELS, side, side, generator=generator)
    return x, torch.tensor([0.1, 0.6, 0.97]), torch.tensor([1, 9, 10])


@pytest.mark.parametrize(
    "name, prefix", [("model_1.safetensors", ""), ("a.safetensors", "_orig_mod."), ("a.pt", "module.")]
)
@pytest.mark.parametrize("side", [32, 8])
def test_a_file_gives_the_outputs_of_its_network(name, prefix, side, tmp_path):
    """Dense, with a sparse middle, and without one, as path-drop guidance asks for it."""
    net = public()
    state = net.state_dict() | {"projectors.0.weight": torch.zeros(3, 3)}  # of its run with REPA
    latents = None if side == 32 else latents_of(tmp_path / "latents", (CHANNELS, side, side))
    opened = open_weights_file(saved(state, tmp_path / name, prefix), "flow", latents=latents)
    own, kept, (x, t, y) = opened.precond.net, [], inputs(side)
    assert own.latent_shape == (CHANNELS, side, side) and opened.config["method"] == "sprint"
    grid = own.router
    own.router = lambda *args, **kwargs: kept.append(grid(*args, **kwargs)) or kept[-1]
    with torch.no_grad():
        for ratio in (0, 0.75, 1):
            output = own(x, t, y, routing=Routing(ratio))
            ids = {0: None, 0.75: kept[0] if kept else None, 1: torch.empty(3, 0, dtype=torch.long)}[ratio]
            torch.testing.assert_close(output, net(x, t, y, ids), rtol=1e-4, atol=1e-5)
        denoised = x - 0.6 * net(x, torch.full((3,), 0.6), y)  # x_t = (1 - t) x_0 + t eps, v = eps - x_0
        torch.testing.assert_close(opened.precond(x, torch.tensor(0.6), y), denoised, rtol=1e-4, atol=1e-5)
    assert len(kept) == 1 and kept[0].shape == (3, (side // PATCH) ** 2 // 4)


def without(name):
    return lambda state: state.pop(name)


def renamed(old, new):
    def change(state):
        for name in [name for name in state if name.startswith(old)]:
            state[name.replace(old, new)] = state.pop(name)

    return change


def shaped(name, *shape):
    return lambda state: state.update({name: torch.zeros(shape)})


NO_DIT, NOT_AS = "does not have the names and shapes of a DiT", r" is \({}\), not as in SPRINT's networks"
PATCHES, FIRST = "x_embedder.proj.weight", "blocks.2.attn.qkv.weight"
FUSION, BIAS = "renoise_linear.weight", "final_layer.linear.bias"
REFUSED = {
    "one dense block": (renamed("encoder_blocks.1.", "middle_blocks.3."), "has 1 encoder_blocks and 2"),
    "no sparse middle": (renamed("middle_blocks", "encoder_blocks"), "has 3 encoder_blocks and 2"),
    "its first names": (renamed("encoder_blocks.", "mixer_blocks."), "has 0 encoder_blocks and 2"),
    "no fusion": (without(FUSION), NO_DIT),
    "no mask token": (without("mask_token"), NO_DIT),
    "a short mask token": (shaped("mask_token"), r"rejoins\.0\.mask_token is \(1,\)"),
    "no QK-norm": (
        without("decoder_blocks.1.attn.q_norm.weight"),
        r"blocks\.6\.attn\.q_norm\.weight is missing",
    ),
    "a norm with weights": (shaped("encoder_blocks.0.norm1.weight", WIDTH), r"blocks\.0\.norm1\.weight is"),
    "SwiGLU": (
        renamed("middle_blocks.1.mlp.fc1.", "middle_blocks.1.mlp.fc1_g."),
        r"\.3\.mlp\.fc1\.\w+ is missing",
    ),
    "a global modulation": (shaped("global_adaLN_modulation.1.bias", 9), "global_adaLN_modulation.1.bias is"),
    "two for one": (shaped(FIRST, 3 * WIDTH, WIDTH), f"has two tensors for {FIRST}"),
    "an odd patch": (shaped(PATCHES, WIDTH, 9), PATCHES + NOT_AS.format("384, 9")),
    "a patch of one axis": (shaped(PATCHES, WIDTH), PATCHES + NOT_AS.format("384,")),
    "a convolution": (shaped(PATCHES, WIDTH, CHANNELS, PATCH, PATCH), NO_DIT),
    "a fusion of one axis": (shaped(FUSION, WIDTH), FUSION + NOT_AS.format("384,")),
    "an odd output": (shaped(BIAS, 9), BIAS + NOT_AS.format("9,")),
    "a block beyond all": (
        renamed("middle_blocks.2.", "middle_blocks.999."),
        "not those of model.depth=1002",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_as_in_the_public_network_is_refused(case, tmp_path):
    change, told = REFUSED[case]
    state = public().state_dict()
    change(state)
    file = saved(state, tmp_path / "file.safetensors")
    with pytest.raises(ValueError, match=told) as refused:
        open_weights_file(file, "flow")
    assert str(refused.value).startswith(str(file)) and "\n" not in str(refused.value)


def test_the_rows_train_the_published_network_for_the_published_cost():
    """677.48 million parameters; 65.1e6 TFLOP at 400 epochs, 43.7e6 at 200 (forward passes alone)."""
    row = "imagenet256_sprint_xl_2_400ep"
    stages = [expected_config(*read_header(row)["from"][0].split()), expected_config(row)]
    with torch.device("meta"):
        nets = [build_net(stage) for stage in stages]
    costs = [cost_of(net) for net in nets]
    frozen = nets[0].rejoins[0].mask_token.numel()
    assert [round((cost.num_parameters + frozen) / 1e6, 2) for cost in costs] == [677.48, 677.48]
    images = [stage["train"]["total_steps"] * stage["train"]["batch_size"] for stage in stages]
    assert images[0] == pytest.approx(400 * 1_281_167, rel=1e-3)
    for share, published in ((1, 65.1), (1 / 2, 43.7)):
        first, second = (n * cost.routed_forward_flops for n, cost in zip(images, costs, strict=True))
        assert (share * first + second) / 1e18 == pytest.approx(published, rel=0.01)
