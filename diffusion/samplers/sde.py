"""Euler-Maruyama solver of the reverse SDE of [SiT], on the path of flow matching."""

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from diffusion.path import EDM_PATH, FLOW_PATH, Denoise, Path, solve_on
from diffusion.samplers.ode import velocity
from diffusion.samplers.times import check_num_steps, uniform_times
from runtime.errors import check_choice, check_not_negative

COEFFICIENTS: dict[str, Callable[[Path, Tensor], Tensor]] = {  # w(t)
    "constant": lambda path, t: torch.ones_like(t),
    # w of the forward SDE on this path
    "sbdm": lambda path, t: (
        path.sigma(t) * path.sigma_dot(t) - path.alpha_dot(t) / path.alpha(t) * path.sigma(t) ** 2
    ),
    "sigma": lambda path, t: path.sigma(t),
    "linear": lambda path, t: t,
    "decreasing": lambda path, t: (1 - torch.cos(math.pi * t)) ** 2 / 4,
    "increasing_decreasing": lambda path, t: torch.sin(math.pi * t) ** 2,
}
LAST_STEPS = ("mean", "denoised")
SIT_TIMES = partial(uniform_times, t_min=0.04)


def sde_sampler(
    denoise: Denoise,
    noise: Tensor,
    path: Path = EDM_PATH,
    *,
    num_steps: int = 250,
    times: Callable[[Path, int], Tensor] = SIT_TIMES,
    coefficient: str = "sigma",
    norm: float = 1.0,
    last_step: str = "mean",
    randn_like: Callable[[Tensor], Tensor] = torch.randn_like,
) -> Tensor:
    """Solve dx = (v - w s) dt + sqrt(2 w) dW backwards in time, where s is the score.

    Args:
        coefficient: w(t), multiplied by `norm`; all choices give the same marginals. DEVIATION: [SiT]
            multiplies the cosine of `decreasing` by its norm, which agrees at norm=1.
        last_step: step from the last level to the data. `mean`: without noise; `denoised`: the denoiser's
            output, which is Tweedie's formula and also an Euler step of the flow.
        The other arguments are documented in `ode_sampler`; the network runs num_steps times.
    """
    check_choice("sampler.coefficient", coefficient, tuple(COEFFICIENTS))
    check_choice("sampler.last_step", last_step, LAST_STEPS)
    check_not_negative("sampler.norm", norm)
    denoise, path = solve_on(denoise, path, FLOW_PATH)
    check_num_steps(num_steps)
    levels = times(path, num_steps)
    if coefficient == "sbdm" and path.alpha(levels[0]) == 0:
        raise ValueError(f"sampler.coefficient=sbdm diverges at t={levels[0]:g}: lower sampler.times.t_max")

    x = noise.to(torch.float64) * path.sigma(levels[0])
    for t, t_next in pairwise(levels):
        D_x, w, h = denoise(x, t).to(torch.float64), norm * COEFFICIENTS[coefficient](path, t), t - t_next
        x = _mean(path, D_x, x, t, w, h) + (2 * w * h).sqrt() * randn_like(x)
    t = levels[-1]
    D_x, w = denoise(x, t).to(torch.float64), norm * COEFFICIENTS[coefficient](path, t)
    return _mean(path, D_x, x, t, w, t) if last_step == "mean" else D_x


def _mean(path: Path, D_x: Tensor, x: Tensor, t: Tensor, w: Tensor, h: Tensor) -> Tensor:
    score = (path.alpha(t) * D_x - x) / path.sigma(t) ** 2
    return x - h * (velocity(path, D_x, x, t) - w * score)
