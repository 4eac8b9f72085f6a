"""The mathematics of diffusion: paths, objectives, samplers, guidance, generation."""

from diffusion.edm import EDMLoss, EDMPrecond
from diffusion.generate import ImageSource, balanced_labels, generate, random_labels
from diffusion.guidance import CFG, Branch, Guidance
from diffusion.objective import Loss, Precond
from diffusion.path import EDMPath, Path, on_path
from diffusion.samplers import edm_sampler

__all__ = [
    "CFG",
    "Branch",
    "EDMLoss",
    "EDMPath",
    "EDMPrecond",
    "Guidance",
    "ImageSource",
    "Loss",
    "Path",
    "Precond",
    "balanced_labels",
    "edm_sampler",
    "generate",
    "on_path",
    "random_labels",
]
