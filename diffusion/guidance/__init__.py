"""Guidance: guidance(strong) -> denoise(x, t). Each kind has a file; guidance.py holds the base class."""

from diffusion.guidance.auto import AutoGuidance
from diffusion.guidance.cfg import CFG
from diffusion.guidance.guidance import Branch, Guidance, predict
from diffusion.guidance.internal import InternalGuidance
from diffusion.guidance.path_drop import PathDropGuidance
from diffusion.guidance.sparse import SparseGuidance
