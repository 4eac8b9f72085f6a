"""Networks: the diffusion transformer, and what it costs."""

from models.cost import Cost, cost_of
from models.dit import DiT
from models.layers import token_mask

__all__ = ["Cost", "DiT", "cost_of", "token_mask"]
