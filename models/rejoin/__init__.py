"""Modules by which bypassed tokens rejoin the sequence, one file each.

    rejoin(pos_embed) -> module             pos_embed (1, L, D): the position embedding of each token
    module(routed, ids_keep, original, generator) -> x (N, L, D)

original (N, L, D) is the sequence before the window. routed (N, K, D) are its tokens ids_keep (N, K) after
the window. ids_keep=None: all tokens were kept. routed=None: the window was skipped.
"""

from models.rejoin.bypass import Bypass
from models.rejoin.fuse import Fuse
from models.rejoin.mask import Mask
