"""Networks: the diffusion transformer, and what it costs."""

from models.cost import Cost, cost_of
from models.dit import DiT
from models.layers import resolve_attention, token_mask

__all__ = ["Cost", "DiT", "cost_of", "resolve_attention", "token_mask"]
