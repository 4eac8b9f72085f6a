"""Fixed-step solvers of the probability flow on any path. They include EDM's sampler. [EDM]"""

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from diffusion.path import EDM_PATH, PATHS, Denoise, Path
from diffusion.path import solve_on as on_other_path
from diffusion.samplers.times import check_num_steps, uniform_times
from runtime.errors import check_choice, check_not_negative

SOLVERS = ("euler", "heun")


def ode_sampler(
    denoise: Denoise,
    noise: Tensor,
    path: Path = EDM_PATH,
    *,
    num_steps: int = 40,
    times: Callable[[Path, int], Tensor] = uniform_times,
    solver: str = "heun",
    solve_on: str | None = None,
    midpoint: float = 1.0,
    S_churn: float = 0,
    S_min: float = 0,
    S_max: float = math.inf,
    S_noise: float = 1,
    randn_like: Callable[[Tensor], Tensor] = torch.randn_like,
) -> Tensor:
    """Solve dx/dt = alpha' D + sigma' (x - alpha D) / sigma, with optional churn. [EDM] Algorithms 1 and 2

    Args:
        denoise: called with x (N, C, H, W) in float64 and t, a 0-d float64 tensor on the CPU.
        noise: (N, C, H, W) of unit variance.
        path: path of the denoiser.
        num_steps: number of levels; the network runs num_steps (euler) or 2 * num_steps - 1 (heun) times.
        times: times(path, num_steps) -> levels, see `diffusion.samplers.times`.
        solve_on: path on which the flow is solved: `vp`, `ve`, `edm`, `flow`; None: `path`.
        midpoint: position of heun's second evaluation in a step, in (0, 1]; alpha of [EDM].
        S_churn, S_min, S_max, S_noise: amount, range (in sigma / alpha) and scale of the noise added back.

    Returns:
        x (N, C, H, W) in float64.
    """
    check_choice("sampler.solver", solver, SOLVERS)
    for key, value in (("S_churn", S_churn), ("S_min", S_min), ("S_noise", S_noise)):
        check_not_negative(f"sampler.{key}", value)
    if not 0 < midpoint <= 1:
        raise ValueError(f"sampler.midpoint={midpoint} must be in (0, 1]")
    if solve_on is not None:
        check_choice("sampler.solve_on", solve_on, tuple(PATHS))
        denoise, path = on_other_path(denoise, path, PATHS[solve_on])
    check_num_steps(num_steps)
    levels = times(path, num_steps)

    def add_churn(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        # Raise the noise level by adding new noise, [EDM] Algorithm 2.
        level = path.sigma(t) / path.alpha(t)
        if not S_churn or not S_min <= level <= S_max or level.isinf():
            return x, t
        t_hat = path.time_at(level * (1 + min(S_churn / num_steps, math.sqrt(2) - 1)))
        level_hat = path.sigma(t_hat) / path.alpha(t_hat)  # at most the end of the path
        added = (level_hat**2 - level**2).sqrt() * S_noise * randn_like(x)
        return path.alpha(t_hat) * (x / path.alpha(t) + added), t_hat

    def slope(x: Tensor, t: Tensor) -> Tensor:
        return velocity(path, denoise(x, t).to(torch.float64), x, t)

    x = noise.to(torch.float64) * path.sigma(levels[0])
    for t, t_next in pairwise(levels):
        x, t = add_churn(x, t)
        h, d = t_next - t, slope(x, t)
        if solver == "euler":
            x = x + h * d
        else:
            # Weights 1 - 1 / (2 a) at the start and 1 / (2 a) at t + a h: second order for any a.
            d_mid = slope(x + midpoint * h * d, t + midpoint * h)
            x = x + h * ((1 - 1 / (2 * midpoint)) * d + 1 / (2 * midpoint) * d_mid)
    return denoise(*add_churn(x, levels[-1])).to(torch.float64)


def velocity(path: Path, D_x: Tensor, x: Tensor, t: Tensor) -> Tensor:
    """Return dx/dt of the probability flow."""
    eps = (x - path.alpha(t) * D_x) / path.sigma(t)
    return path.alpha_dot(t) * D_x + path.sigma_dot(t) * eps
