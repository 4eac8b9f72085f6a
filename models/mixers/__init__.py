"""Token mixers that replace attention, one file each.

    mixer(hidden_size, num_heads, ...) -> module
    module(x, positions) -> x       x (N, L, D) in ascending order of the tokens
    module.flops(length)

In a routed window the sequence has gaps. The scan treats consecutive kept tokens as neighbours.
"""

from models.mixers.rwkv import ChannelMix, SpatialMix
from models.mixers.state_space import StateSpace, column_ranks
