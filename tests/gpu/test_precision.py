"""Results of a device against float64 on the CPU, and of compiled blocks against eager ones."""

from contextlib import contextmanager
from copy import deepcopy
from functools import partial

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from benchmarks.runs import compose, perturb
from diffusion import CFG, Branch, edm_sampler
from evaluation import FeatureStatistics, InceptionDetector, PrecisionRecall, frechet_distance
from evaluation.detectors.inception import NUM_POOL_FEATURES
from evaluation.detectors.random_weights import write_random_weights
from evaluation.precision import strict_fp32
from models import token_mask
from routing import Routing
from runtime.machine import can_compile

CPU = torch.device("cpu")
TINY = ("model.hidden_size=32", "model.num_heads=4", "model.depth=7", "model.patch_size=2")
BATCH_SIZE, GUIDANCE_SCALE, NUM_SAMPLING_STEPS = 8, 1.5, 5
# Of norms, relative to float64. On a CPU 9e-8, 3e-7 and 2e-6 were measured at S/2 in fp32 and 1e-4, 4e-3 and
# 4e-3 in bf16, on an H200 3e-4 of the gradients in TF32, which has three more bits of mantissa than bf16.
BOUNDS = {
    "fp32": {"loss": 3e-6, "gradients": 1e-5, "samples": 5e-5},
    "bf16": {"loss": 1e-3, "gradients": 2e-2, "samples": 2e-2},
}
BOUNDS["tf32"] = {what: bound / 8 for what, bound in BOUNDS["bf16"].items()}
# Features as above, where 1e-6 was measured; sums in float64; counts of images, a few of them at an edge.
FEATURE_BOUND = 5e-5
SCORE_BOUNDS = {"Frechet distance": 1e-9, "precision": 5e-3, "recall": 5e-3}


class DrawnByGenerator(TorchFunctionMode):
    """Draw on the device of the generator, then move: the same numbers on every device."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        generator, device = kwargs.get("generator"), kwargs.get("device")
        if generator is None or device is None:
            return function(*args, **kwargs)
        return function(*args, **{**kwargs, "device": generator.device}).to(device)


def in_double(net):
    """A copy in float64, between a preconditioning and a loss in fp32, whose own rounding is 1e-7."""

    def to_double(_, inputs):
        return tuple(x.double() if x.is_floating_point() else x for x in inputs)

    net = deepcopy(net).double()
    net.register_forward_pre_hook(to_double)
    return net


@contextmanager
def computing(precision, device):
    """Run fp32 products in TF32, or products of a forward pass in bf16, if that is the precision."""
    allowed, bf16 = precision == "tf32", precision == "bf16"
    with strict_fp32(), torch.backends.cudnn.flags(enabled=True, allow_tf32=allowed):
        torch.backends.cuda.matmul.allow_tf32 = allowed  # strict_fp32 restores it
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            yield


def relative(found, wanted):
    """The norm of the difference of all tensors, divided by the norm of the expected ones."""
    wanted = [tensor.detach().cpu().double() for tensor in wanted]
    apart = [a.detach().cpu().double() - b for a, b in zip(found, wanted, strict=True)]
    return (torch.nn.utils.get_total_norm(apart) / torch.nn.utils.get_total_norm(wanted)).item()


def model(kind, tiny):
    """Experiment and network of a routed or a dense DiT, with no weights at zero."""
    size = ("data.input_size=8", *TINY) if tiny else ("data.input_size=32", "model/size=s_2")
    data = ("data=synthetic", "data.num_classes=1000", "model.class_dropout_prob=0.5")
    experiment = compose((f"model={'tread' if kind == 'routed' else 'dit'}", *data, *size))
    torch.manual_seed(0)
    net = experiment.net()
    perturb(net)
    return experiment, net


def batch(experiment, device):
    """Latents and labels, the same on every device."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH_SIZE, *experiment.latent_shape, generator=generator)
    labels = torch.randint(experiment.num_classes, (BATCH_SIZE,), generator=generator)
    return x.to(device), labels.to(device)


def loss_and_gradients(experiment, net, device, precision, masked=False, draw_on=CPU):
    """The losses of samples and the gradients of all parameters, as in a training step."""
    precond, loss_fn = experiment.precond(net).train(), experiment.loss_node.bind()()
    x, labels = batch(experiment, device)
    masks = {}  # arguments of the loss
    if masked:
        mask = torch.zeros(len(x), *x.shape[2:], device=device)
        mask[:, : mask.shape[1] // 4] = 1  # fewer tokens than a route keeps
        tokens = token_mask(mask, experiment.model_node.arguments["patch_size"])
        masks = {"routing": Routing(force_keep=tokens), "mask": mask}
    with computing(precision, device):
        losses = loss_fn(precond, x, labels, generator=torch.Generator(draw_on).manual_seed(0), **masks)
    with computing("tf32" if precision == "tf32" else "fp32", device):
        losses.mean().backward()
    gradients = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    return {"loss": [losses.detach()], "gradients": gradients}


@torch.no_grad()
def samples(experiment, net, device, precision):
    """Guided samples of a few steps."""
    noise, labels = batch(experiment, device)
    denoise = CFG(GUIDANCE_SCALE)(Branch(experiment.precond(net).eval(), labels))
    with computing(precision, device):
        return {"samples": [edm_sampler(denoise, noise, num_steps=NUM_SAMPLING_STEPS)]}


def errors(kind, experiment, reference, net, device):
    """Rows that compare a network on a device with the same in float64 on the CPU."""
    ways = {kind: loss_and_gradients}
    if kind == "routed":  # it samples as a dense one does
        ways["routed, masks"] = partial(loss_and_gradients, masked=True)
    else:
        ways["dense, guided"] = samples
    rows = []
    for name, way in ways.items():
        with DrawnByGenerator():
            wanted = way(experiment, in_double(reference), CPU, "fp32")
            for precision in ("fp32", *["tf32"] * (device.type == "cuda"), "bf16"):
                found = way(experiment, net, device, precision)
                rows += apart(f"{name}, {precision}", found, wanted, precision)
    return rows


def apart(name, found, wanted, precision):
    """Rows that compare tensors with others."""
    bounds = BOUNDS[precision]
    return [(f"{name}: {what}", relative(found[what], wanted[what]), bounds[what]) for what in wanted]


@pytest.mark.parametrize("kind", ["dense", "routed"])
def test_precision(device, tiny, kind, check):
    experiment, net = model(kind, tiny)
    check(errors(kind, experiment, net, deepcopy(net).to(device), device))


def features(count, length, seed):
    """Draw features (count, length) like the network's: not negative, correlated, of falling variances."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(256, length, generator=torch.Generator().manual_seed(0)) / 16
    noise = torch.randn(count, length, generator=generator) * torch.logspace(0, -2, length)
    return 0.4 * (torch.randn(count, 256, generator=generator) @ mixing + noise + 0.02 * seed).relu()


def test_scores(device, tiny, check, tmp_path):
    """Features of the Inception network, and scores of features, are as on the CPU."""
    num_images, count, length = (4, 500, 256) if tiny else (64, 5000, NUM_POOL_FEATURES)
    images = np.random.default_rng(0).integers(0, 256, (num_images, 64, 64, 3), dtype=np.uint8)
    file = write_random_weights(tmp_path / "random.pth")
    detectors = [InceptionDetector(file, where, allow_unpublished=True) for where in (device, CPU)]
    found, wanted = (detector(images) for detector in detectors)
    for what in wanted:
        check([(f"Inception network: {what}", relative([found[what]], [wanted[what]]), FEATURE_BOUND)])
    both = features(count, length, 1), features(count, length, 2)
    found, wanted = (scores_of(*(part.to(where) for part in both)) for where in (device, CPU))
    check([(what, abs(found[what] / wanted[what] - 1), bound) for what, bound in SCORE_BOUNDS.items()])


def scores_of(reference, samples):
    """The scores of features, accumulated and compared on their device."""
    moments = []
    for part in (reference, samples):
        statistics = FeatureStatistics(part.shape[1], part.device)
        for rows in part.split(64):
            statistics.update(rows)
        moments += [statistics.mean, statistics.covariance]
    precision, recall = PrecisionRecall().compare(reference, samples)
    return {"Frechet distance": frechet_distance(*moments), "precision": precision, "recall": recall}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["routed", "dense"])
def test_compiled_blocks(device, tiny, kind, check):
    if not can_compile(device):
        pytest.skip("needs a compiler")
    torch._dynamo.reset()  # which clears the counters in some versions of torch
    experiment, net = model(kind, tiny)
    way = partial(loss_and_gradients, experiment, net.to(device), device, draw_on=device)
    precisions = ("fp32",) if tiny else ("fp32", "bf16")
    eager = {precision: way(precision) for precision in precisions}
    num_graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for block in net.blocks:
        block.compile(dynamic=False)
    for precision in precisions:
        check(apart(f"{kind}, {precision}", way(precision), eager[precision], precision))
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"] - num_graphs
    check([(f"{kind}: blocks that ran without being compiled", float(compiled == 0), 0)])


@torch.no_grad()
def a_weight_off(net):
    net.blocks[3].attn.proj.weight[0, 0] += 1


@torch.no_grad()
def weights_in_tf32(net):
    for parameter in net.parameters():
        parameter.copy_(((parameter.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32))


@pytest.mark.parametrize("spoil", [a_weight_off, weights_in_tf32])
def test_changed_weights_are_detected(spoil):
    with torch.random.fork_rng():
        experiment, net = model("routed", tiny=True)
    spoilt = deepcopy(net)
    spoil(spoilt)
    rows = [row for kind in ("routed", "dense") for row in errors(kind, experiment, net, spoilt, CPU)]
    exceeded = {what for what, error, bound in rows if error > bound}
    assert {"routed, fp32: loss", "routed, fp32: gradients", "routed, masks, fp32: gradients"} <= exceeded
    assert "dense, guided, fp32: samples" in exceeded
