"""The base class of all guidance: extrapolation from a weak prediction past a strong one."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from diffusion.objective import Precond
from diffusion.path import Denoise, Path
from routing import Routing, num_tokens_kept
from runtime.errors import check_choice, check_not_negative

SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class Branch:
    """A prediction: a preconditioned network, its class labels and its routing.

    Args:
        class_labels: (N,); None for an unconditional network.
        rand: rand(num) -> (N, num) uniform in [0, 1), drawn per sample. A routed branch selects its tokens by
            this noise. None: the device's default generator.
        inner: the prediction of the network's inner head.
    """

    precond: Precond
    class_labels: Tensor | None
    routing: Routing | None = None
    rand: Callable[[int], Tensor] | None = None
    inner: bool = False

    @property
    def num_kept(self) -> tuple[int, ...]:
        """Number of tokens that each route keeps. Branches of equal length are evaluated together."""
        net = self.precond.net
        ratios = (self.routing or Routing()).ratios(net.routes, active=False)
        return tuple(num_tokens_kept(net.num_tokens, ratio) for ratio in ratios)


def predict(branches: Sequence[Branch], x: Tensor, t: Tensor) -> list[Tensor]:
    """Return F_x of each branch. Branches that share a network and a length share a forward."""
    groups: dict[Any, dict[Any, Branch]] = {}
    for branch in branches:
        groups.setdefault((branch.precond, branch.num_kept), {})[inputs_of(branch)] = branch
    F_x: dict[Any, Tensor] = {}
    for group in groups.values():
        for inner, output in enumerate(_forward([*group.values()], x, t)):
            if output is not None:
                parts = output.chunk(len(group))
                F_x |= {(inputs, bool(inner)): part for inputs, part in zip(group, parts, strict=True)}
    return [F_x[inputs_of(branch), branch.inner] for branch in branches]


def inputs_of(branch: Branch) -> tuple[Any, ...]:
    """Return a key that is equal for branches with the same network and inputs."""
    return branch.precond, branch.num_kept, id(branch.class_labels), id(branch.routing)


def _forward(branches: Sequence[Branch], x: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
    """Evaluate branches that share a network and lengths in one batch: F_x, and F_x of the inner head."""
    first, n = branches[0], len(branches)
    labels, routing = first.class_labels, first.routing
    if labels is not None:
        labels = torch.cat([b.class_labels for b in branches if b.class_labels is not None])
    if routing is not None and routing.noise is not None:
        noises = [b.routing.noise for b in branches if b.routing is not None and b.routing.noise is not None]
        noise = [torch.cat(parts) for parts in zip(*noises, strict=True)]
        routing = replace(routing, noise=noise)
    return first.precond.predict(torch.cat([x] * n), t, labels, routing=routing)


@dataclass(eq=False)
class Guidance:
    """Base class of guidance. Subclasses implement `weak`, or `branches` to change the strong branch too.

    Args:
        guidance_scale: w. At 1 only the strong branch is evaluated.
        guidance_interval: low and high noise level sigma / alpha; outside of (low, high] w is 1 [IG]. None:
            no limits.
        schedule: `constant`: w is guidance_scale everywhere. `linear`, `cosine`: w rises from 1 at noise to
            guidance_scale at the data, by the share of data 1 / (1 + r) at noise level r.
    """

    guidance_scale: float = 1.0
    guidance_interval: list[float] | None = None
    schedule: str = "constant"

    def __post_init__(self) -> None:
        check_not_negative("guidance.guidance_scale", self.guidance_scale)
        check_choice("guidance.schedule", self.schedule, SCHEDULES)
        match self.guidance_interval:
            case None:
                pass
            case [int() | float() as low, int() | float() as high] if 0 <= low < high:
                pass
            case levels:
                raise ValueError(
                    f"guidance.guidance_interval={levels} must be two noise levels [LOW, HIGH] or null"
                )

    def load(self, open_precond: Callable[[str, str | None], Precond]) -> None:
        """Load the guidance's own networks with open_precond(run, checkpoint)."""

    def check(self, precond: Precond) -> None:
        """Raise a ValueError if this guidance does not apply to the network."""

    def weak(self, strong: Branch) -> Branch:
        raise NotImplementedError

    def branches(self, strong: Branch, t: Tensor) -> tuple[Branch, Branch]:
        """Return the strong and the weak branch at time t, 0-d."""
        return strong, self.weak(strong)

    def scale(self, path: Path, t: Tensor) -> float:
        """Return w at time t, 0-d."""
        if self.guidance_interval is not None:
            low, high = self.guidance_interval
            if not low < noise_level(path, t) <= high:
                return 1.0
        if self.schedule == "constant":
            return self.guidance_scale
        rise = data_share(path, t)
        if self.schedule == "cosine":
            rise = (1 - math.cos(math.pi * rise)) / 2
        return 1 + (self.guidance_scale - 1) * rise

    def branches_at(self, strong: Branch, t: Tensor) -> tuple[float, tuple[Branch, ...]]:
        """Return w and the branches to evaluate at time t, 0-d: only the strong one where w is 1."""
        w, branches = self.scale(strong.precond.path, t), self.branches(strong, t)
        return w, branches[:1] if w == 1 else branches

    def combine(self, D_s: Tensor, D_w: Tensor, w: float) -> Tensor:
        # D = D_w + w (D_s - D_w), [CFG] eq. 6 with w = 1 for no guidance.
        return D_w + w * (D_s - D_w)

    def __call__(self, strong: Branch) -> Denoise:
        """Return a guided denoiser for samplers, called with x (N, C, H, W) and t, 0-d."""
        self.check(strong.precond)

        def denoise(x: Tensor, t: Tensor, *, with_variance: bool = False) -> Any:
            w, branches = self.branches_at(strong, t)
            F_x = predict(branches, x, t)
            D_x = [b.precond.denoised(F, x, t) for b, F in zip(branches, F_x, strict=True)]
            D = D_x[0] if w == 1 else self.combine(D_x[0], D_x[1], w)
            return (D, strong.precond.learned_variance(F_x[0], x)) if with_variance else D

        return denoise


def noise_level(path: Path, t: Tensor) -> float:
    """Return sigma / alpha at time t, 0-d."""
    return float(path.sigma(t) / path.alpha(t))


def data_share(path: Path, t: Tensor) -> float:
    """Return 1 / (1 + r) for the noise level r at time t, 0-d: 0 at noise, 1 at the data."""
    return 1 / (1 + noise_level(path, t))
