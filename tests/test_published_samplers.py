"""The published samplers of diffusion/README.md, against samplers written from their descriptions."""

import math
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from builders import sampling
from builders.config import resolve
from builders.experiment import Experiment
from builders.sampling import SampleConfig, read_request
from builders.schemas import OBJECTIVES
from diffusion import CFG, Branch, FlowPath, sde_sampler
from tests.runs import composed

PAGE = Path(__file__).parents[1] / "diffusion" / "README.md"
LABELS = torch.tensor([1, 3])
PRODUCTS = torch.cat(
    [torch.ones(1), torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0)]
)  # PRODUCTS[k + 1]: alpha^2 after the step of index k


def rows():
    """Yield the rows of the table: name, objective, settings."""
    table = PAGE.read_text().split("## Draw from a file")[1]
    for line in re.findall(r"^\| .*`sampler=.*$", table, re.MULTILINE):
        name, objective, sampler, guidance = (cell.strip() for cell in line.strip("|").split("|"))
        (sampler,) = re.findall("`(.*)`", sampler)
        yield pytest.param(name, objective.split("`")[1], sampler, id=name)
        if guidance.startswith("`"):
            guided = f"{sampler} {guidance.strip('`')}"
            yield pytest.param(name, objective.split("`")[1], guided, id=f"{name}, guided")


def guided(net, x, t, w=1.0, num_channels=4):
    """Return the output of a public network at its time t, with the first channels guided."""
    times = torch.full((len(x),), float(t), dtype=x.dtype)
    output, null = (net(x, times, labels) for labels in (LABELS, torch.full_like(LABELS, 10)))
    steered = (null + w * (output - null))[:, :num_channels]
    return torch.cat([steered, output[:, num_channels:]], dim=1)


def dit(net, x, randn, w=1.5, num_steps=250):
    """Sample by ancestral steps between the kept steps, with the learned variance."""
    kept = [round(i * 999 / (num_steps - 1)) for i in range(num_steps)]
    before = [1.0, *(PRODUCTS[k + 1].item() for k in kept)]
    for k, last, now in list(zip(kept, before[:-1], before[1:], strict=True))[::-1]:
        eps, v = guided(net, x, k, w, 3).chunk(2, dim=1)
        beta = 1 - now / last
        x_0 = (x - math.sqrt(1 - now) * eps) / math.sqrt(now)
        x = (math.sqrt(last) * beta * x_0 + math.sqrt(1 - beta) * (1 - last) * x) / (1 - now)
        if last < 1:
            low, high = math.log((1 - last) / (1 - now) * beta), math.log(beta)
            x = x + ((low + (v + 1) / 2 * (high - low)) / 2).exp() * randn(x)
    return x


# w(u) of SiT on its path from noise; u = 1 is data. The norm is a factor, except in `decreasing`.
DIFFUSIONS = {
    "constant": lambda u, norm: norm,
    "sigma": lambda u, norm: norm * (1 - u),
    "linear": lambda u, norm: norm * (1 - u),
    "decreasing": lambda u, norm: (norm * math.cos(math.pi * u) + 1) ** 2 / 4,
    "increasing_decreasing": lambda u, norm: norm * math.sin(math.pi * u) ** 2,
}


def sit(net, x, randn, w=1.5, num_points=250, diffusion="sigma", norm=1.0):
    """Sample by Euler-Maruyama from u = 0 to 0.96, then the mean of a step of 0.04."""
    times = [0.96 * i / (num_points - 1) for i in range(num_points)]
    for u, h in zip(times, [0.96 / (num_points - 1)] * (num_points - 1) + [0.04], strict=True):
        v, c = guided(net, x, u, w, 3)[:, :4], DIFFUSIONS[diffusion](u, norm)
        x = x + h * (v + c * (u * v - x) / (1 - u))
        x = x + math.sqrt(2 * c * h) * randn(x) if u < times[-1] else x
    return x


def lightningdit(net, x, randn, w=10.0):
    """Sample by Euler steps between 250 points, guided from u = 0.1."""
    points = [0.3 * i / 249 / (1 - 0.7 * i / 249) for i in range(250)]
    for u, following in pairwise(points):
        x = x + (following - u) * guided(net, x, u, w if u >= 0.1 else 1, 3)[:, :4]
    return x


def repa(net, x, randn, w=1.8):
    """Sample by Euler-Maruyama from t = 1 to 0.04, guided up to 0.7, then the mean of a step to 0."""
    levels = [1 - 0.96 * i / 249 for i in range(250)]
    for t, s in zip(levels, [*levels[1:], 0.0], strict=True):
        v = guided(net, x, t, w if t <= 0.7 else 1)[:, :4]
        x = x + (s - t) * (v + t * (x + (1 - t) * v) / t)
        x = x + math.sqrt(2 * t * (t - s)) * randn(x) if s else x
    return x


PUBLIC = {"DiT": dit, "SiT, SDE": sit, "LightningDiT": lightningdit, "REPA": repa}


def network(objective):
    """Return an experiment and a small random network in float64."""
    model = {"hidden_size": 16, "num_heads": 2, "depth": 2, "patch_size": 4}
    model["learn_sigma"] = str(objective in ("ddpm", "sit")).lower()
    sizes = ["data.input_size=4", "data.in_channels=4", "data.num_classes=10"]
    sizes += [f"model.{key}={value}" for key, value in model.items()]
    experiment = Experiment.compose(["model=dit", "data=synthetic", *OBJECTIVES[objective], *sizes])
    torch.manual_seed(0)
    precond = experiment.precond(experiment.net().double()).eval()
    for parameter in precond.net.parameters():
        parameter.data = 0.2 * torch.randn_like(parameter)
    return experiment, precond


def randn_from(seed):
    generator = torch.Generator().manual_seed(seed)
    return lambda x: torch.randn(x.shape, generator=generator, dtype=x.dtype)


@torch.no_grad()
@pytest.mark.parametrize("name, objective, settings", list(rows()))
def test_the_settings_of_the_table_are_the_published_sampler(name, objective, settings, monkeypatch):
    experiment, precond = network(objective)
    request = resolve(composed("checkpoint=FILE", *settings.split(), config_name="sample"), SampleConfig)
    monkeypatch.setattr(sampling, "read_source", lambda request: experiment)
    _, experiment = read_request(request)
    noise = torch.randn(2, 4, 4, 4, dtype=torch.float64)
    denoise = experiment.guidance(None)(Branch(precond, LABELS))
    x = experiment.sampler()(denoise, noise, precond.path, randn_like=randn_from(1))
    assert x.isfinite().all()
    if name in PUBLIC:
        unguided = {} if "guidance=" in settings else {"w": 1.0}
        expected = PUBLIC[name](precond.net, noise, randn_from(1), **unguided)
        atol = 1e-6 if name == "LightningDiT" else 1e-9
        torch.testing.assert_close(x, expected, rtol=1e-9, atol=atol)


@torch.no_grad()
@pytest.mark.parametrize("norm", [1.0, 0.5])
@pytest.mark.parametrize("diffusion", DIFFUSIONS)
def test_diffusion_coefficients_are_as_in_sit(diffusion, norm):
    _, precond = network("sit")
    noise = torch.randn(2, 4, 4, 4, dtype=torch.float64)
    denoise = CFG(1.0)(Branch(precond, LABELS))
    options = {"num_steps": 20, "coefficient": diffusion, "norm": norm, "randn_like": randn_from(1)}
    x = sde_sampler(denoise, noise, FlowPath(), **options)
    public = sit(precond.net, noise, randn_from(1), 1.0, 20, diffusion, norm)
    same = diffusion != "decreasing" or norm == 1  # DEVIATION
    assert torch.allclose(x, public, rtol=1e-6, atol=1e-6) == same
