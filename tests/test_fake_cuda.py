"""A batch on a fake CUDA device: fake tensors have a device and a shape, but no values.

Tensors left on another device fail, and so do reads of a value and copies to the host. What needs a driver is
left to the tests marked gpu: backward, autocast, generators, FLUX (SYNC in routing/adapters/families).
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import diffusion
from builders.kept_tokens import KeptTokensLoss
from data import LatentManifest
from data.encoders import to_uint8
from data.manifest import _column
from evaluation.metrics.inception_score import SplitScores
from evaluation.statistics import FeatureStatistics
from models import DiT
from models.rejoin import Fuse, Mask
from routing import Route, Routing, attach, grid_router, norm_router, random_router
from tests.networks import BLOCKS, PAPER
from tests.routing.families import FAMILIES
from training.ema import EMA

CUDA = torch.device("cuda")
ROUTES = (Route(0.5, 1, 3), Route(0.25, 5, 6))
OPTIONS = [
    {},
    {"block": "modern", "num_prefix_tokens": 2},
    {"block": "mamba", "num_prefix_tokens": 2},
    {"block": "rwkv", "num_prefix_tokens": 2},
    {"block": "sprint", "num_prefix_tokens": 2},
    {"block": "lightning"},
    {"router": partial(norm_router, weight=0.5)},
    {"router": grid_router, "rejoin": Fuse},
    {"rejoin": Mask},
    {"window": "context"},
    {"window": "separate"},
    {"block": "self_logit"},
    {"gradient_checkpointing": True},
    {"fp32_after_route": True},
    {"attention": "explicit"},
    {"num_classes": 0},
]


class NothingComesBack(TorchDispatchMode):
    """Refuses copies of a device's tensors to the host."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        on_host = isinstance(output, torch.Tensor) and output.device.type == "cpu"
        if on_host and any(t.device.type == "cuda" for t in tensors):
            raise AssertionError(f"{func} brings a tensor to the host")
        return output


@pytest.fixture(autouse=True)
def no_device():
    diffusion.ddpm._table.cache_clear()  # fakes have no values to keep
    with FakeTensorMode(), NothingComesBack():
        yield
    diffusion.ddpm._table.cache_clear()
    _column.cache_clear()  # of fake tensors


def net_on_cuda(routes=(PAPER,), num_classes=10, block="dit", **options):
    with CUDA:
        return DiT(8, 2, 3, 32, 8, 4, num_classes=num_classes, routes=routes, block=BLOCKS[block], **options)


def batch(num_classes=10):
    labels = torch.zeros(4, dtype=torch.int64, device=CUDA) if num_classes else None
    return torch.randn(4, 3, 8, 8, device=CUDA), labels


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_a_training_step(options):
    net = net_on_cuda(ROUTES, **options).train()
    ema = EMA(nn.Linear(1, 1), decay=0.9, warmup=True)
    # Fakes have no copy.
    ema.net, ema.num_updates = net_on_cuda(ROUTES, **options), torch.zeros((), device=CUDA)
    x, labels = batch(net.num_classes)
    routing = Routing(force_keep=torch.zeros(4, 16, dtype=torch.bool, device=CUDA))
    mask = torch.rand(4, 8, 8, device=CUDA)
    losses = diffusion.EDMLoss()(diffusion.EDMPrecond(net), x, labels, routing=routing, mask=mask)
    assert losses.device.type == "cuda"
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)  # a backward pass needs a driver
    norm = torch.nn.utils.get_total_norm([p.grad for p in net.parameters()])
    torch.nn.utils.clip_grads_with_norm_(net.parameters(), 1.0, norm)
    ema.update(net, (~norm.isfinite()).float())
    assert {p.device.type for p in ema.net.parameters()} == {"cuda"}


def test_a_loss_of_kept_tokens():
    net, mask = net_on_cuda().train(), torch.rand(4, 8, 8, device=CUDA)
    loss, precond = KeptTokensLoss(diffusion.EDMLoss(), net, 0.1), diffusion.EDMPrecond(net)
    losses = loss(precond, *batch(), routing=Routing(0.5), mask=mask)
    assert losses.device.type == "cuda"


@pytest.mark.parametrize(
    ("precond", "loss", "learn_sigma"),
    [
        (diffusion.EDMPrecond, diffusion.EDMLoss(contrastive_weight=0.1), True),
        (diffusion.FlowPrecond, diffusion.FlowLoss(contrastive_weight=0.1), True),
        (diffusion.X0Precond, diffusion.X0Loss(contrastive_weight=0.1), True),
        (diffusion.DDPMPrecond, diffusion.DDPMLoss(), False),
        (diffusion.DDPMPrecond, diffusion.DDPMLoss(), True),
    ],
)
def test_losses(precond, loss, learn_sigma):
    net = net_on_cuda(learn_sigma=learn_sigma).train()
    assert loss(precond(net), *batch()).device.type == "cuda"


@pytest.mark.parametrize(
    ("precond", "sampler", "guidance"),
    [
        (diffusion.EDMPrecond, diffusion.edm_sampler, diffusion.CFG(1.0)),
        (diffusion.EDMPrecond, diffusion.edm_sampler, diffusion.SparseGuidance(1.5)),
        (diffusion.FlowPrecond, diffusion.sde_sampler, diffusion.CFG(1.5)),
        (diffusion.X0Precond, diffusion.ode_sampler, diffusion.CFG(1.5)),
        (diffusion.DDPMPrecond, partial(diffusion.ddpm_sampler, variance="small"), diffusion.CFG(1.5)),
    ],
)
def test_samples(precond, sampler, guidance):
    precond, (noise, labels) = precond(net_on_cuda()).eval(), batch()
    denoise = guidance(diffusion.Branch(precond, labels))
    with torch.no_grad():
        x = sampler(denoise, noise, precond.path, num_steps=3)
    assert (x.device.type, x.dtype) == ("cuda", torch.float64)


@pytest.mark.parametrize(("kind", "channels"), [("moments", 6), ("samples", 3)])
def test_latents_are_scaled_and_decoded(kind, channels):
    scaling = {"scale": (0.5, 1.0, 2.0), "shift": (0.0, 1.0, 2.0)}
    manifest = LatentManifest(4, (channels, 8, 8), "float16", kind, 10, "identity", **scaling)
    x = manifest.to_latents(torch.zeros(4, channels, 8, 8, dtype=torch.float16, device=CUDA))
    pixels = to_uint8(manifest.to_encoder(x))
    assert (x.shape, pixels.device.type, pixels.dtype) == ((4, 3, 8, 8), "cuda", torch.uint8)


def test_statistics():
    statistics, scores = FeatureStatistics(5, CUDA), SplitScores(5, CUDA, 8, 3)
    for start in (0, 4):
        statistics.update(torch.rand(4, 5, device=CUDA))
        scores.update(torch.rand(4, 5, device=CUDA), start)
    assert statistics.covariance.device.type == scores._sums.device.type == "cuda"


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"flux"}))
@pytest.mark.parametrize("router", [random_router, norm_router])
def test_a_routed_pass_of_a_model_with_routes(monkeypatch, name, router):
    family = FAMILIES[name]
    arguments = tree_map_only(torch.Tensor, lambda tensor: tensor.to(CUDA), family.arguments())
    with CUDA:
        model = family.build()
    attach(model, [Route(0.5, 1, 2)], router=router)
    # Seeds are numbers of the host, and a generator needs a driver.
    monkeypatch.setattr("routing.adapters.attached._draw_seed", lambda generator: 0)
    monkeypatch.setattr(torch, "Generator", lambda device: SimpleNamespace(manual_seed=lambda seed: None))
    outputs = [leaf for leaf in tree_leaves(model(**arguments)) if isinstance(leaf, torch.Tensor)]
    assert {tensor.device.type for tensor in outputs} == {"cuda"}


def test_other_devices_copies_and_reads_of_values_fail():
    x, _ = batch()
    with pytest.raises(RuntimeError, match=r"two (different )?devices"):
        x + torch.ones(8)
    with pytest.raises(AssertionError, match="to the host"):
        x.cpu()
    with pytest.raises(DataDependentOutputException):
        int(x.sum())
