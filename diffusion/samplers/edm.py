"""The sampler of [EDM], in the paper's symbols."""

import math
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from diffusion.path import EDM_PATH, Denoise, Path, on_path
from diffusion.samplers.times import check_num_steps, rho_levels
from runtime.errors import check_not_negative, check_positive


def edm_sampler(
    denoise: Denoise,
    noise: Tensor,
    path: Path = EDM_PATH,
    *,
    num_steps: int = 40,
    sigma_min: float = 0.002,
    sigma_max: float = 80,
    rho: float = 7,
    S_churn: float = 0,
    S_min: float = 0,
    S_max: float = math.inf,
    S_noise: float = 1,
    randn_like: Callable[[Tensor], Tensor] = torch.randn_like,
) -> Tensor:
    """Sample by Heun's second-order method with optional churn, [EDM] Algorithm 2.

    Args:
        denoise: called with x (N, C, H, W) in float64 and t, a 0-d float64 tensor on the CPU.
        noise: (N, C, H, W) of unit variance.
        path: path of the denoiser; the default is EDM's, where t is sigma.
        num_steps: number of noise levels; the network runs 2 * num_steps - 1 times.
        S_churn, S_min, S_max, S_noise: amount, range and scale of the noise added back. S_churn=0: none.

    Returns:
        x (N, C, H, W) in float64.
    """
    check_num_steps(num_steps)
    check_positive("sampler.sigma_min", sigma_min)
    check_positive("sampler.rho", rho)
    for key, value in (("S_churn", S_churn), ("S_min", S_min), ("S_noise", S_noise)):
        check_not_negative(f"sampler.{key}", value)
    for name, low, high in (("sigma", sigma_min, sigma_max), ("S", S_min, S_max)):
        if not low < high:
            raise ValueError(f"sampler.{name}_max={high} must be greater than sampler.{name}_min={low}")
    denoise = on_path(denoise, path, EDM_PATH)
    sigmas = rho_levels(num_steps, sigma_min, sigma_max, rho)  # [EDM] eq. 5
    sigmas = torch.cat([sigmas, torch.zeros(1, dtype=torch.float64)])

    x = noise.to(torch.float64) * sigmas[0]
    for i, (sigma, sigma_next) in enumerate(pairwise(sigmas)):
        # Churn: raise the noise level to sigma_hat by adding new noise.
        gamma = min(S_churn / num_steps, math.sqrt(2) - 1) if S_churn and S_min <= sigma <= S_max else 0
        sigma_hat = sigma * (1 + gamma)
        if gamma > 0:
            x = x + (sigma_hat**2 - sigma**2).sqrt() * S_noise * randn_like(x)
        # Euler step along dx/dsigma = (x - D(x; sigma)) / sigma.
        d = (x - denoise(x, sigma_hat).to(torch.float64)) / sigma_hat
        x_next = x + (sigma_next - sigma_hat) * d
        if i < num_steps - 1:
            # Heun's correction: the mean of the slopes at both ends.
            d_next = (x_next - denoise(x_next, sigma_next).to(torch.float64)) / sigma_next
            x_next = x + (sigma_next - sigma_hat) * (d + d_next) / 2
        x = x_next
    return x
