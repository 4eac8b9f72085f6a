"""A sibling of every choice, as a user would write them; each has one YAML file beside it."""

from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
import torch.nn as nn

from data import LatentDataset
from data import digits as open_digits
from diffusion import FlowPath, Guidance, Loss, Precond
from evaluation.metrics import Metric
from evaluation.statistics import FeatureStatistics
from models import Backbone, Flops
from models.blocks import DiTBlock
from models.layers import drop_labels
from routing import Routing, end_route, resolve_routes, start_route
from routing.tokens import keep_lowest
from training.alignment import Alignment


class VelocityPrecond(Precond):
    """The network predicts eps - x_0."""

    path = FlowPath()

    def inputs(self, x, t):
        return x, t

    def clean(self, F_x, x, t):
        return x - t * F_x


class VelocityLoss(Loss):
    """Squared error of the velocity at logit-normal times."""

    def __init__(self, mean: float = 0.0):
        self.mean = mean

    def draw_t(self, num_samples, generator, device):
        return (torch.randn(num_samples, generator=generator, device=device) + self.mean).sigmoid()

    def error(self, precond, F_x, x_t, t, x, eps):
        return (F_x.float() - (eps - x)) ** 2


def euler_sampler(
    denoise, noise, path, *, num_steps: int = 4, t_max: float = 0.99, randn_like=torch.randn_like
):
    """Euler steps along (x - D) / t, for paths with sigma = t."""
    times = torch.linspace(t_max, 0, num_steps + 1, dtype=torch.float64)
    x = noise.double() * path.sigma(times[0])
    for t, t_next in pairwise(times):
        x = x + (t_next - t) * (x - denoise(x, t).double()) / t
    return x


class SparseGuidance(Guidance):
    """The weak branch routes."""

    def __init__(self, guidance_scale: float = 1.5, selection_ratio: float = 0.5):
        super().__init__(guidance_scale)
        self.routing = Routing(selection_ratio)

    def check(self, precond):
        if not precond.net.routes:
            raise ValueError("guidance=toy needs a model with routes")

    def weak(self, strong):
        return replace(strong, routing=self.routing)


def corner_router(x, num_kept: int, /, *, force_keep=None, noise=None, generator=None):
    """Keep the first tokens."""
    positions = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
    return keep_lowest(positions.expand(x.shape[:2]), num_kept, force_keep)


class WarmBlock(DiTBlock):
    """The block with learned scales and shifts in its norms."""

    norm = staticmethod(partial(nn.LayerNorm, eps=1e-3))


class PixelMixer(Backbone):
    """Each pixel a token, blocks that see the mean of all tokens beside their own."""

    def __init__(
        self,
        input_size: int,
        in_channels: int,
        num_classes: int,
        width: int,
        depth: int,
        routes=(),
        router=None,
    ):
        super().__init__()
        self.latent_shape, self.num_classes = (in_channels, input_size, input_size), num_classes
        self.class_dropout_prob = 0.1
        self.num_tokens, self.routes, self.router = input_size**2, resolve_routes(routes, depth), router
        self.embed, self.label = nn.Linear(in_channels + 1, width), nn.Embedding(num_classes + 1, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(depth)
        )
        self.out = nn.Linear(width, in_channels)

    def forward(self, x, c_noise, class_labels, *, routing=None, generator=None):
        routing = Routing() if routing is None else routing
        ratios = routing.ratios(self.routes, active=self.training)
        if self.training:
            class_labels = drop_labels(class_labels, self.num_classes, self.class_dropout_prob, generator)
        time = c_noise.view(-1, 1, 1).expand(-1, self.num_tokens, 1)
        h = self.embed(torch.cat([x.flatten(2).mT, time], dim=-1)) + self.label(class_labels).unsqueeze(1)
        for idx, block in enumerate(self.blocks):
            for i, route in enumerate(self.routes):
                if idx == route.start_layer_idx and ratios[i]:
                    original, ids_keep = h, routing.ids_keep(i, ratios[i], h, self.router, generator)
                    h = start_route(h, ids_keep)
            h = h + block(torch.cat([h, h.mean(dim=1, keepdim=True).expand_as(h)], dim=-1))
            for i, route in enumerate(self.routes):
                if idx == route.end_layer_idx and ratios[i]:
                    h = end_route(h, ids_keep, original)
        return self.out(h).mT.reshape(x.shape)

    def flops(self, num_kept):
        width, lengths = self.out.in_features, [self.num_tokens] * len(self.blocks)
        for route, kept in zip(self.routes, num_kept, strict=True):
            for idx in range(route.start_layer_idx, route.end_layer_idx + 1):
                lengths[idx] = kept
        forward = sum(length * 6 * width**2 for length in lengths)
        return Flops(forward, 3 * forward)


def dimmed_digits(path: str, input_size: int, in_channels: int, num_classes: int, factor: float = 0.5):
    """The digits, less bright."""
    dataset = open_digits(path, input_size, in_channels, num_classes)
    return LatentDataset(factor * dataset.stored, dataset.labels, dataset.manifest)


class SignDescent(torch.optim.Optimizer):
    """Move every weight by the sign of the average of its gradients."""

    def __init__(self, params, lr: float, beta: float = 0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    average = state.get("average", torch.zeros_like(parameter))
                    state["average"] = average.lerp(parameter.grad, 1 - group["beta"])
                    parameter -= group["lr"] * state["average"].sign()


class MeanOfAll:
    """The mean of the weights after every step, from the first one on."""

    def __init__(self, net: nn.Module):
        self.net = deepcopy(net).eval().requires_grad_(False)
        self.num_updates = torch.zeros(())

    @torch.no_grad()
    def update(self, net, skipped):
        self.num_updates += 1 - skipped
        weight = (1 - skipped) / self.num_updates.clamp(min=1)
        for average, parameter in zip(self.net.parameters(), net.parameters(), strict=True):
            average.lerp_(parameter, weight)

    def state_dict(self):
        return {**self.net.state_dict(), "num_updates": int(self.num_updates)}

    def load_state_dict(self, state):
        weights = dict(state)
        self.num_updates.fill_(weights.pop("num_updates"))
        self.net.load_state_dict(weights)


class Brighter(Alignment):
    """Tokens predict the mean of their patch."""

    def projector(self, hidden_size, target_size, grid_size):
        return nn.Linear(hidden_size, target_size)

    def target(self, x, features, grid_size, /):
        return nn.functional.adaptive_avg_pool2d(x, grid_size).mean(dim=1).flatten(1).unsqueeze(2)

    def error(self, predicted, target, /):
        return (predicted - target).square().mean(dim=2)


class Brightness(Metric):
    """The distance between the mean pixels of samples and reference."""

    keys = ("brightness",)
    needs = ((FeatureStatistics, "pixels"),)

    def __init__(self, scale: float = 1.0):
        self.scale = scale

    def __call__(self, reference, samples):
        means = [each[FeatureStatistics, "pixels"].mean for each in (reference, samples)]
        return {"brightness": float(self.scale * (means[1].mean() - means[0].mean()))}
