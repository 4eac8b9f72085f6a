"""Ancestral sampling of [DDPM], with fewer steps and the learned variance of [IDDPM], as [DiT] samples."""

from collections.abc import Callable
from itertools import pairwise

import torch

from diffusion.ddpm import DDPMPath, log_beta, log_variance, posterior_log_variance, posterior_mean
from diffusion.path import Denoise, Path, on_path
from diffusion.samplers.times import respaced_times
from runtime.errors import check_choice

VARIANCES = ("learned", "small", "large")


def ddpm_sampler(
    denoise: Denoise,
    noise: torch.Tensor,
    path: Path | None = None,
    *,
    num_steps: int = 250,
    variance: str = "learned",
    randn_like: Callable[[torch.Tensor], torch.Tensor] = torch.randn_like,
) -> torch.Tensor:
    """Draw x_s from p(x_s | x_t), step after step; the network runs num_steps times.

    Args:
        denoise: for the learned variance called with with_variance=True, and returns D_x and v.
        path: of the denoiser; None: that of DDPM, on which the steps are taken.
        num_steps: of the 1,000.
        variance: `learned`, by a network that predicts it; `small`, of the posterior; `large`, beta.
    """
    check_choice("sampler.variance", variance, VARIANCES)
    own = DDPMPath()
    if path is not None:
        denoise = on_path(denoise, path, own)
    levels = respaced_times(own, num_steps)
    x = noise.to(torch.float64)  # p(x_T) = N(0, I), though sigma(1000) is 0.99998
    for t, s in pairwise(levels):
        D_x, v = denoise(x, t, with_variance=True) if variance == "learned" else (denoise(x, t), None)
        low, high = posterior_log_variance(own, t, s), log_beta(own, t, s)
        log_var = log_variance(v.to(torch.float64), low, high) if variance == "learned" else None
        log_var = {"learned": log_var, "small": low, "large": high}[variance]
        x = posterior_mean(own, D_x.to(torch.float64), x, t, s) + (0.5 * log_var).exp() * randn_like(x)
    return denoise(x, levels[-1]).to(torch.float64)
