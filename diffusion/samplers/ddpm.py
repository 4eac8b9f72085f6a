"""Ancestral sampling of [DDPM], with fewer steps and the learned variance of [IDDPM], as in [DiT]."""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from diffusion.ddpm import DDPMPath, log_beta, log_variance, posterior_log_variance, posterior_mean
from diffusion.path import Denoise, Path, on_path
from diffusion.samplers.times import respaced_times
from runtime.errors import check_choice

VARIANCES = ("learned", "small", "large")
DDPM_PATH = DDPMPath()


def ddpm_sampler(
    denoise: Denoise,
    noise: Tensor,
    path: Path = DDPM_PATH,
    *,
    num_steps: int = 250,
    variance: str = "learned",
    randn_like: Callable[[Tensor], Tensor] = torch.randn_like,
) -> Tensor:
    """Draw x_s from p(x_s | x_t), step by step; the network runs num_steps times.

    Args:
        denoise: called with with_variance=True for the learned variance; it then returns D_x and v.
        path: path of the denoiser; the steps are taken on DDPM's.
        num_steps: number of steps, in [1, 1000].
        variance: `learned`: predicted by the network; `small`: the posterior's; `large`: beta.
    """
    check_choice("sampler.variance", variance, VARIANCES)
    denoise = on_path(denoise, path, DDPM_PATH)
    levels = respaced_times(DDPM_PATH, num_steps)
    x = noise.to(torch.float64)  # p(x_T) = N(0, I), though sigma(1000) is 0.99998
    for t, s in pairwise(levels):
        low, high = posterior_log_variance(DDPM_PATH, t, s), log_beta(DDPM_PATH, t, s)
        if variance == "learned":
            D_x, v = denoise(x, t, with_variance=True)
            log_var = log_variance(v.to(torch.float64), low, high)
        else:
            D_x, log_var = denoise(x, t), low if variance == "small" else high
        x = posterior_mean(DDPM_PATH, D_x.to(torch.float64), x, t, s) + (0.5 * log_var).exp() * randn_like(x)
    return denoise(x, levels[-1]).to(torch.float64)
