"""Times of the steps of a solver: times(path, num_steps) -> levels (num_steps,), descending and above 0.

The step from the last level ends at the data: it returns the denoiser's output.
"""

import math
from itertools import accumulate, repeat

import torch
from torch import Tensor

from diffusion.ddpm import DDPMPath
from diffusion.path import Path, VPPath
from runtime.errors import check_not_negative, check_positive

MAX_STEPS = 100_000  # 0.8 MB of levels


def check_num_steps(num_steps: int) -> None:
    """Raise a ValueError unless the number of steps is in [1, MAX_STEPS]."""
    if not 1 <= num_steps <= MAX_STEPS:
        raise ValueError(f"sampler.num_steps={num_steps} must be in [1, {MAX_STEPS}]")


def rho_times(
    path: Path, num_steps: int, /, *, sigma_min: float = 0.002, sigma_max: float = 80, rho: float = 7
) -> Tensor:
    """Return times whose noise levels sigma / alpha are denser towards the data. [EDM] eq. 5"""
    _check_range(sigma_min, sigma_max)
    check_positive("sampler.times.rho", rho)
    return path.time_at(rho_levels(num_steps, sigma_min, sigma_max, rho))


def rho_levels(num_steps: int, sigma_min: float, sigma_max: float, rho: float) -> Tensor:
    """Return noise levels (num_steps,) from sigma_max to sigma_min, in float64. [EDM] eq. 5"""
    # sigma_i = (sigma_max^(1/rho) + i/(n-1) (sigma_min^(1/rho) - sigma_max^(1/rho)))^rho
    first, last = sigma_max ** (1 / rho), sigma_min ** (1 / rho)
    return (first + _ramp(num_steps) * (last - first)) ** rho


def uniform_times(
    path: Path, num_steps: int, /, *, t_min: float = 0, t_max: float | None = None, shift: float | None = None
) -> Tensor:
    """Return equally spaced times, from the end of the path.

    Args:
        t_min: last time; 0: one spacing before the data.
        t_max: first time; None: the end of the path.
        shift: s > 1 moves the times towards noise, u -> s u / (1 + (s - 1) u), u = t / t_max [SD3]; None: 1
    """
    check_positive("sampler.times.shift", shift)
    t_max, shift = path.t_max if t_max is None else t_max, shift or 1
    if not 0 < t_max <= path.t_max:
        raise ValueError(f"sampler.times.t_max={t_max} must be in (0, {path.t_max}], the range of the path")
    if not 0 <= t_min < t_max:
        raise ValueError(f"sampler.times.t_min={t_min} must be in [0, {t_max})")
    if t_min:
        last = t_min / (shift * t_max - (shift - 1) * t_min)  # t_min after the shift
        u = torch.linspace(1, last, num_steps, dtype=torch.float64)
    else:
        u = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)[:-1]
    return shift * u / (1 + (shift - 1) * u) * t_max


def respaced_times(path: Path, num_steps: int, /) -> Tensor:
    """Return evenly strided steps of DDPM's path, including the first and the last. [IDDPM]

    DEVIATION: a single step is the last one, at pure noise; [IDDPM]'s rule gives the first.
    """
    if not isinstance(path, DDPMPath):
        rule = "needs diffusion=ddpm, and sampler=heun or euler with sampler.solve_on=null"
        raise ValueError(f"sampler/times=respaced {rule}")
    if not 1 <= num_steps <= path.t_max:
        raise ValueError(
            f"sampler.num_steps={num_steps} must be in [1, {path.t_max:g}], the number of steps of the path"
        )
    if num_steps == 1:
        return torch.tensor([path.t_max], dtype=torch.float64)
    # PARITY: the stride is summed step by step; its rounding error decides between equally near steps.
    stride = (path.t_max - 1) / (num_steps - 1)
    indices = accumulate(repeat(stride, num_steps - 1), initial=0.0)
    return torch.tensor([1.0 + round(index) for index in indices], dtype=torch.float64).flip(0)


def vp_times(path: Path, num_steps: int, /, *, epsilon_s: float = 1e-3) -> Tensor:
    """Return equally spaced times of the variance-preserving SDE, [EDM] Table 1, column VP."""
    if not 0 < epsilon_s < 1:
        raise ValueError(f"sampler.times.epsilon_s={epsilon_s} must be in (0, 1)")
    vp, t = VPPath(), torch.linspace(1, epsilon_s, num_steps, dtype=torch.float64)
    return path.time_at(vp.sigma(t) / vp.alpha(t))


def ve_times(path: Path, num_steps: int, /, *, sigma_min: float = 0.02, sigma_max: float = 100) -> Tensor:
    """Return times whose noise levels form a geometric progression, [EDM] Table 1, column VE."""
    _check_range(sigma_min, sigma_max)
    return path.time_at(sigma_max * (sigma_min / sigma_max) ** _ramp(num_steps))


def iddpm_times(
    path: Path, num_steps: int, /, *, M: int = 1000, j_0: int = 8, C_1: float = 0.001, C_2: float = 0.008
) -> Tensor:
    """Return levels of the cosine schedule, [EDM] Table 1, column iDDPM."""
    for key, value in (("M", M), ("C_1", C_1)):
        check_positive(f"sampler.times.{key}", value)
    check_not_negative("sampler.times.C_2", C_2)
    if not 0 <= j_0 < M:
        raise ValueError(f"sampler.times.j_0={j_0} must be in [0, {M})")
    # alpha_j = sin^2(pi/2 j / (M (C_2 + 1)))
    # u_{j-1} = sqrt((u_j^2 + 1) / max(alpha_{j-1} / alpha_j, C_1) - 1)
    alpha = (torch.arange(M + 1, dtype=torch.float64) / (M * (C_2 + 1)) * math.pi / 2).sin() ** 2
    u = torch.zeros(M + 1, dtype=torch.float64)
    for j in range(M, 0, -1):
        u[j - 1] = ((u[j] ** 2 + 1) / (alpha[j - 1] / alpha[j]).clamp(min=C_1) - 1).sqrt()
    return path.time_at(u[(j_0 + (M - 1 - j_0) * _ramp(num_steps)).round().long()])


def _ramp(num_steps: int) -> Tensor:
    return torch.arange(num_steps, dtype=torch.float64) / max(num_steps - 1, 1)  # i / (n - 1)


def _check_range(sigma_min: float, sigma_max: float) -> None:
    check_positive("sampler.times.sigma_min", sigma_min)
    if not sigma_min < sigma_max:
        raise ValueError(f"sampler.times.sigma_max={sigma_max} must be greater than sigma_min={sigma_min}")
