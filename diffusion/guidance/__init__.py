"""Guidance: guidance(strong branch) -> denoise(x, t). One file for each, beside what they share."""

from diffusion.guidance.auto import AutoGuidance
from diffusion.guidance.cfg import CFG
from diffusion.guidance.guidance import Branch, Guidance, predict
from diffusion.guidance.path_drop import PathDropGuidance
from diffusion.guidance.sparse import SparseGuidance
