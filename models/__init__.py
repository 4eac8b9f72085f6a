"""Backbones: the networks, their blocks and their FLOPs."""

from models.backbone import Backbone, Flops
from models.cost import Cost, cost_of
from models.dit import DiT
from models.layers import resolve_attention, token_mask
from models.text import TextShape
