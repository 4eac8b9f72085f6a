"""The mathematics of diffusion: preconditioning, loss, samplers, guidance, generation."""

from diffusion.edm import EDMLoss, EDMPrecond
from diffusion.generate import ImageSource, balanced_labels, generate, random_labels
from diffusion.guidance import guided_denoiser
from diffusion.samplers import edm_sampler

__all__ = [
    "EDMLoss",
    "EDMPrecond",
    "ImageSource",
    "balanced_labels",
    "edm_sampler",
    "generate",
    "guided_denoiser",
    "random_labels",
]
