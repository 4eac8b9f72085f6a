"""Backbones: networks that predict, and what they cost."""

from models.backbone import Backbone, Flops
from models.cost import Cost, cost_of
from models.dit import DiT
from models.layers import resolve_attention, token_mask
