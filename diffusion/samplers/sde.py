"""The reverse SDE by Euler-Maruyama, with the diffusion coefficients and last steps of [SiT].

It is solved on the path of flow matching, for which the coefficients are made.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch

from diffusion.path import Denoise, EDMPath, FlowPath, Path, solve_on
from diffusion.samplers.ode import velocity
from diffusion.samplers.times import check_num_steps, uniform_times
from runtime.errors import check_choice, check_not_negative

COEFFICIENTS = ("constant", "sbdm", "sigma", "linear", "decreasing", "increasing_decreasing")
LAST_STEPS = ("mean", "denoised")
SIT_TIMES = partial(uniform_times, t_min=0.04)


def sde_sampler(
    denoise: Denoise,
    noise: torch.Tensor,
    path: Path | None = None,
    *,
    num_steps: int = 250,
    times: Callable[[Path, int], torch.Tensor] = SIT_TIMES,
    coefficient: str = "sigma",
    norm: float = 1.0,
    last_step: str = "mean",
    randn_like: Callable[[torch.Tensor], torch.Tensor] = torch.randn_like,
) -> torch.Tensor:
    """Take steps of dx = (v - w s) dt + sqrt(2 w) dW backwards in time, where s is the score.

    Args:
        coefficient: w(t), times `norm`; every one gives the same marginals. DEVIATION: [SiT] multiplies the
            cosine of `decreasing` by its norm, which agrees at norm=1.
        last_step: from the last level to the data: `mean`, a step without noise; `denoised`, what the
            denoiser says: Tweedie's formula, and an Euler step of the flow, too.
        The others are those of `ode_sampler`; the network runs num_steps times.
    """
    check_choice("sampler.coefficient", coefficient, COEFFICIENTS)
    check_choice("sampler.last_step", last_step, LAST_STEPS)
    check_not_negative("sampler.norm", norm)
    denoise, path = solve_on(denoise, EDMPath() if path is None else path, FlowPath())
    check_num_steps(num_steps)
    levels = times(path, num_steps)
    if coefficient == "sbdm" and path.alpha(levels[0]) == 0:
        raise ValueError(
            f"sampler.coefficient=sbdm is infinite at t={levels[0]:g}: sampler.times.t_max must be lower"
        )

    x = noise.to(torch.float64) * path.sigma(levels[0])
    for t, t_next in pairwise(levels):
        D_x, w = denoise(x, t).to(torch.float64), norm * _coefficient(coefficient, path, t)
        h = t - t_next
        x = _mean(path, D_x, x, t, w, h) + (2 * w * h).sqrt() * randn_like(x)
    D_x, w = denoise(x, levels[-1]).to(torch.float64), norm * _coefficient(coefficient, path, levels[-1])
    return _mean(path, D_x, x, levels[-1], w, levels[-1]) if last_step == "mean" else D_x


def _mean(
    path: Path, D_x: torch.Tensor, x: torch.Tensor, t: torch.Tensor, w: torch.Tensor, h: torch.Tensor
) -> torch.Tensor:
    score = (path.alpha(t) * D_x - x) / path.sigma(t) ** 2
    return x - h * (velocity(path, D_x, x, t) - w * score)


def _coefficient(name: str, path: Path, t: torch.Tensor) -> torch.Tensor:
    """Return w(t)."""
    alpha, sigma = path.alpha(t), path.sigma(t)
    if name == "constant":
        return torch.ones_like(t)
    if name == "sbdm":  # that of the forward SDE which has this path
        return sigma * path.sigma_dot(t) - path.alpha_dot(t) / alpha * sigma**2
    if name == "sigma":
        return sigma
    if name == "linear":
        return t
    if name == "decreasing":
        return (1 - torch.cos(math.pi * t)) ** 2 / 4
    return torch.sin(math.pi * t) ** 2
