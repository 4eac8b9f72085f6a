"""The mathematics of diffusion: paths, objectives, samplers, guidance, generation."""

from diffusion.ddpm import DDPMLoss, DDPMPath, DDPMPrecond
from diffusion.edm import EDMLoss, EDMPrecond, OptimalPrecond
from diffusion.flow import FlowLoss, FlowPrecond
from diffusion.generate import generate, random_labels
from diffusion.guidance import (
    CFG,
    AutoGuidance,
    Branch,
    Guidance,
    InternalGuidance,
    PathDropGuidance,
    SparseGuidance,
)
from diffusion.objective import Loss, Precond
from diffusion.path import EDMPath, FlowPath, Path, VEPath, VPPath, on_path
from diffusion.samplers import adaptive_sampler, ddpm_sampler, edm_sampler, ode_sampler, sde_sampler
from diffusion.samplers.times import iddpm_times, respaced_times, rho_times, uniform_times, ve_times, vp_times
from diffusion.x0 import X0Loss, X0Precond
