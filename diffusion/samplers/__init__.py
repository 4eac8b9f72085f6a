"""Samplers: each turns noise into latents with a denoiser, on any path.

    sampler(denoise, noise, path, *, randn_like, ...) -> x_0

denoise(x, t) -> D_x includes class labels and guidance. noise (N, C, H, W) has unit variance. `path` is the
denoiser's path. `randn_like` draws the noise that a sampler adds on its way.
"""

from diffusion.samplers.adaptive import adaptive_sampler
from diffusion.samplers.ddpm import ddpm_sampler
from diffusion.samplers.edm import edm_sampler
from diffusion.samplers.ode import ode_sampler
from diffusion.samplers.sde import sde_sampler
