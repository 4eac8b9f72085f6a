"""Samplers. Each takes denoise(x, sigma) -> D_x, with labels and guidance already closed over, and
unit-variance noise.
"""

import math
from collections.abc import Callable
from itertools import pairwise

import torch


def edm_sampler(
    denoise: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    noise: torch.Tensor,
    *,
    num_steps: int = 40,
    sigma_min: float = 0.002,
    sigma_max: float = 80,
    rho: float = 7,
    S_churn: float = 0,
    S_min: float = 0,
    S_max: float = math.inf,
    S_noise: float = 1,
    randn_like: Callable[[torch.Tensor], torch.Tensor] = torch.randn_like,
) -> torch.Tensor:
    """Heun's second-order sampler with optional churn, [EDM] Algorithm 2.

    Args:
        denoise: called with x (N, C, H, W) in float64 and sigma, a 0-d float64 tensor on the CPU.
        noise: (N, C, H, W) of unit variance.
        num_steps: noise levels; the network runs 2 * num_steps - 1 times.
        S_churn, S_min, S_max, S_noise: amount and range of noise added back; 0 gives the deterministic
            solver.
        randn_like: source of the churn noise.

    Returns:
        x (N, C, H, W) in float64.

    Raises:
        ValueError: no steps.
    """
    if num_steps < 1:
        raise ValueError(f"sampler.num_steps={num_steps} must be at least 1")
    # sigma_i = (sigma_max^(1/rho) + i/(n-1) (sigma_min^(1/rho) - sigma_max^(1/rho)))^rho, sigma_n = 0, [EDM]
    # eq. 5.
    ramp = torch.arange(num_steps, dtype=torch.float64) / max(num_steps - 1, 1)
    sigmas = (sigma_max ** (1 / rho) + ramp * (sigma_min ** (1 / rho) - sigma_max ** (1 / rho))) ** rho
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
