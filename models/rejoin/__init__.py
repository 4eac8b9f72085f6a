"""How the tokens of a window rejoin the sequence: one file for each way.

    rejoin(hidden_size) -> module
    module(routed, ids_keep, original, generator) -> x

original (N, L, D) is the sequence before the window; routed (N, K, D) are its tokens ids_keep (N, K) after
the window. ids_keep None: all of them; routed None, too: the window was skipped.
"""

from models.rejoin.bypass import Bypass
from models.rejoin.fuse import Fuse

__all__ = ["Bypass", "Fuse"]
