"""Guidance: guidance(strong branch) -> denoise(x, t). One file for each, beside what they share."""

from diffusion.guidance.cfg import CFG
from diffusion.guidance.guidance import Branch, Guidance, predict

__all__ = ["CFG", "Branch", "Guidance", "predict"]
