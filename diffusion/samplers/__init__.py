"""Samplers: each turns noise into latents with a denoiser, on any path.

    sampler(denoise, noise, path, *, randn_like, ...) -> x_0

denoise(x, t) -> D_x has labels and guidance closed over; noise (N, C, H, W) has unit variance; `path` is that
of the denoiser; `randn_like` draws what a sampler adds on its way.
"""

from diffusion.samplers.adaptive import adaptive_sampler
from diffusion.samplers.ddpm import ddpm_sampler
from diffusion.samplers.edm import edm_sampler
from diffusion.samplers.ode import ode_sampler
from diffusion.samplers.sde import sde_sampler
