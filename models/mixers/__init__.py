"""Token mixers in place of attention: one file for each.

    mixer(hidden_size, num_heads, ...) -> module
    module(x, positions) -> x       x (N, L, D) in ascending order of the tokens
    module.flops(length)

The sequence of a routed window has gaps: the scan goes over the kept tokens as if they were neighbours.
"""

from models.mixers.rwkv import ChannelMix, SpatialMix
from models.mixers.state_space import StateSpace, column_ranks
