"""The stage `check` of `python -m benchmarks.gpu`: results of a device against float64 on the CPU.

Each row has an error and its bound.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from torch.overrides import TorchFunctionMode

from benchmarks import check_runs
from benchmarks.check_runs import BATCH_SIZE, TINY, compared, relative
from benchmarks.evaluation_speed import features, random_detectors
from benchmarks.results import Rows
from benchmarks.runs import compose_config, perturb
from builders.network import build_net, build_precond
from diffusion import CFG, Branch, edm_sampler
from evaluation import FeatureStatistics, frechet_distance, precision_recall
from evaluation.detectors.inception import NUM_POOL_FEATURES
from evaluation.precision import strict_fp32
from models import token_mask
from routing import Routing
from runtime.config import build_node
from runtime.machine import can_compile
from training.speed import most_graphs

COLUMNS = {"setting": "{}", "what": "{}", "error": "{:.2g}", "bound": "{:.2g}", "failed": "{}"}
CPU = torch.device("cpu")
GUIDANCE_SCALE, NUM_SAMPLING_STEPS = 1.5, 5
# Of norms, relative to float64. On a CPU 9e-8, 3e-7 and 2e-6 were measured at S/2 in fp32 and 1e-4, 4e-3 and
# 4e-3 in bf16. TF32, not measured, has three more bits of mantissa than bf16.
BOUNDS = {
    "fp32": {"loss": 3e-6, "gradients": 1e-5, "samples": 5e-5},
    "bf16": {"loss": 1e-3, "gradients": 2e-2, "samples": 2e-2},
}
BOUNDS["tf32"] = {what: bound / 8 for what, bound in BOUNDS["bf16"].items()}
# Features as above, where 1e-6 was measured; sums in float64; counts of images, a few of them at an edge.
FEATURE_BOUND = 5e-5
SCORE_BOUNDS = {"Frechet distance": 1e-9, "precision": 5e-3, "recall": 5e-3}
Tensors = dict[str, list[torch.Tensor]]


def plan(device: torch.device, tiny: bool, out: Path) -> dict[str, Callable[[], Rows]]:
    """Return what measures each setting; see `benchmarks.gpu`."""
    measures = {
        "precision": precision,
        "scores": scores,
        "compiled": compiled,
        "skipped step": check_runs.skipped_step,
        "no host synchronisation": check_runs.no_host_synchronisation,
        "kill and resume": check_runs.kill_and_resume,
        "gpu tests": check_runs.gpu_tests,
    }
    return {name: partial(_alone, measure, device, tiny) for name, measure in measures.items()}


def _alone(measure: Callable[..., Rows], device: torch.device, tiny: bool) -> Rows:
    """Measure, and leave random state, settings and memory as they were."""
    graphs = torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=most_graphs(2))
    try:
        with torch.random.fork_rng(), graphs:
            return measure(device, tiny)
    finally:
        torch._dynamo.reset()
        gc.collect()


class DrawnByGenerator(TorchFunctionMode):
    """Draw on the device of the generator, then move: the same numbers on every device."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        generator, device = kwargs.get("generator"), kwargs.get("device")
        if generator is None or device is None:
            return function(*args, **kwargs)
        return function(*args, **{**kwargs, "device": generator.device}).to(device)


def in_double(net: nn.Module) -> nn.Module:
    """Return a copy in float64, between a preconditioning and a loss in fp32, whose own rounding is 1e-7."""

    def to_double(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(x.double() if x.is_floating_point() else x for x in inputs)

    net = deepcopy(net).double()
    net.register_forward_pre_hook(to_double)
    return net


@contextmanager
def computing(precision: str) -> Iterator[None]:
    """Run fp32 products in TF32 if that is the precision."""
    allowed = precision == "tf32"
    with strict_fp32(), torch.backends.cudnn.flags(enabled=True, allow_tf32=allowed):
        torch.backends.cuda.matmul.allow_tf32 = allowed  # strict_fp32 restores it
        yield


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Run the products of a forward pass in bf16 if that is the precision."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def model(kind: str, tiny: bool) -> tuple[dict[str, Any], nn.Module]:
    """Return configuration and network of a routed or a dense DiT, with no weights at zero."""
    size = ("data.input_size=8", *TINY) if tiny else ("data.input_size=32", "model/size=s_2")
    data = ("data=synthetic", "data.num_classes=1000", "model.class_dropout_prob=0.5")
    config = compose_config((f"model={'tread' if kind == 'routed' else 'dit'}", *data, *size))
    torch.manual_seed(0)
    net = build_net(config)
    perturb(net)
    return config, net


def batch(config: dict[str, Any], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return latents and labels, the same on every device."""
    sizes, generator = config["data"], torch.Generator().manual_seed(1)
    shape = (BATCH_SIZE, sizes["in_channels"], sizes["input_size"], sizes["input_size"])
    x = torch.randn(shape, generator=generator)
    return x.to(device), torch.randint(sizes["num_classes"], (BATCH_SIZE,), generator=generator).to(device)


def loss_and_gradients(
    config: dict[str, Any],
    net: nn.Module,
    device: torch.device,
    precision: str,
    masked: bool = False,
    draw_on: torch.device = CPU,
) -> Tensors:
    """Return the losses of samples and the gradients of all parameters, as a training step has them."""
    precond, loss_fn = build_precond(config, net).train(), build_node(config, "diffusion.loss")()
    x, labels = batch(config, device)
    masks = {}  # arguments of the loss
    if masked:
        mask = torch.zeros(len(x), *x.shape[2:], device=device)
        mask[:, : mask.shape[1] // 4] = 1  # fewer tokens than a route keeps
        routing = Routing(force_keep=token_mask(mask, config["model"]["patch_size"]))
        masks = {"routing": routing, "mask": mask}
    generator = torch.Generator(draw_on).manual_seed(0)
    with computing(precision):
        with autocast(precision, device):
            losses = loss_fn(precond, x, labels, generator=generator, **masks)
        losses.mean().backward()
    gradients = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    return {"loss": [losses.detach()], "gradients": gradients}


@torch.no_grad()
def samples(config: dict[str, Any], net: nn.Module, device: torch.device, precision: str) -> Tensors:
    """Return guided samples of a few steps."""
    noise, labels = batch(config, device)
    precond = build_precond(config, net).eval()
    denoise = CFG(GUIDANCE_SCALE)(Branch(precond, labels))
    with computing(precision), autocast(precision, device):
        return {"samples": [edm_sampler(denoise, noise, num_steps=NUM_SAMPLING_STEPS)]}


def precision(device: torch.device, tiny: bool) -> Rows:
    """Compare loss, gradients and samples in each precision of the device with float64 on the CPU."""
    rows = []
    for kind in ("dense", "routed"):
        config, net = model(kind, tiny)
        rows += errors(kind, config, net, deepcopy(net).to(device), device)
    return rows


def errors(
    kind: str, config: dict[str, Any], reference: nn.Module, net: nn.Module, device: torch.device
) -> Rows:
    """Compare a network on a device with the same in float64 on the CPU."""
    ways = {kind: loss_and_gradients}
    if kind == "routed":  # it samples as a dense one does
        ways["routed, masks"] = partial(loss_and_gradients, masked=True)
    else:
        ways["dense, guided"] = samples
    rows = []
    for name, way in ways.items():
        with DrawnByGenerator():
            wanted = way(config, in_double(reference), CPU, "fp32")
            for precision in ("fp32", *["tf32"] * (device.type == "cuda"), "bf16"):
                rows += apart(f"{name}, {precision}", way(config, net, device, precision), wanted, precision)
    return rows


def apart(name: str, found: Tensors, wanted: Tensors, precision: str) -> Rows:
    """Return the rows that compare tensors with others."""
    bounds = BOUNDS[precision]
    return [compared(f"{name}: {what}", relative(found[what], wanted[what]), bounds[what]) for what in wanted]


def scores(device: torch.device, tiny: bool) -> Rows:
    """Compare features of the Inception network, and scores of features, with those on the CPU."""
    num_images, count, length = (4, 500, 256) if tiny else (64, 5000, NUM_POOL_FEATURES)
    images = np.random.default_rng(0).integers(0, 256, (num_images, 64, 64, 3), dtype=np.uint8)
    found, wanted = (detector(images) for detector in random_detectors(device, CPU))
    rows = [
        compared(f"Inception network: {what}", relative([found[what]], [wanted[what]]), FEATURE_BOUND)
        for what in wanted
    ]
    both = features(count, length, 1), features(count, length, 2)
    found, wanted = (scores_of(*(part.to(where) for part in both)) for where in (device, CPU))
    for what, bound in SCORE_BOUNDS.items():
        rows.append(compared(what, abs(found[what] - wanted[what]) / wanted[what], bound))
    return rows


def scores_of(reference: torch.Tensor, samples: torch.Tensor) -> dict[str, float]:
    """Return the scores of features, accumulated and compared on their device."""
    moments = []
    for part in (reference, samples):
        statistics = FeatureStatistics(part.shape[1], part.device)
        for rows in part.split(64):
            statistics.update(rows)
        moments += [statistics.mean, statistics.covariance]
    precision, recall = precision_recall(reference, samples)
    return {"Frechet distance": frechet_distance(*moments), "precision": precision, "recall": recall}


def compiled(device: torch.device, tiny: bool) -> Rows:
    """Compare compiled blocks with eager ones, on the device, with the same seeds."""
    if not can_compile(device):
        return [{"what": "not compared: there is no compiler", "failed": ""}]
    kinds, precisions = (("routed",), ("fp32",)) if tiny else (("routed", "dense"), ("fp32", "bf16"))
    rows, graphs = [], torch._dynamo.utils.counters["stats"]
    for kind in kinds:
        torch._dynamo.reset()  # the routed blocks' graphs would serve the dense ones
        config, net = model(kind, tiny)
        way = partial(loss_and_gradients, config, net.to(device), device, draw_on=device)
        eager = {precision: way(precision) for precision in precisions}
        num_graphs = graphs["unique_graphs"]
        for block in net.blocks:
            block.compile(dynamic=False)
        for precision in precisions:
            rows += apart(f"{kind}, {precision}", way(precision), eager[precision], precision)
        failed = "" if graphs["unique_graphs"] > num_graphs else "they were not"
        rows.append({"what": f"{kind}: blocks were compiled", "failed": failed})
    return rows
