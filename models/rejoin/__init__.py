"""How the tokens of a window rejoin the sequence: one file for each way.

    rejoin(places) -> module                places (1, L, D): what is added to a token for where it is
    module(routed, ids_keep, original, generator) -> x

original (N, L, D) is the sequence before the window; routed (N, K, D) are its tokens ids_keep (N, K) after
the window. ids_keep None: all of them; routed None, too: the window was skipped.
"""

from models.rejoin.bypass import Bypass
from models.rejoin.fuse import Fuse
from models.rejoin.mask import Mask

__all__ = ["Bypass", "Fuse", "Mask"]
