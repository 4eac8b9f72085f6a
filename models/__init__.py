"""Networks: the diffusion transformer."""

from models.dit import DiT

__all__ = ["DiT"]
