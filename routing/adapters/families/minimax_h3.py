"""MiniMax-H3: text, audio and video in one sequence, at places that all samples share."""

from routing.adapters.families.parts import Family

FAMILIES = {
    "MiniMaxH3Transformer3DModel": Family(
        refused="its blocks take positions and modulation that all samples of a batch share"
    ),
}
