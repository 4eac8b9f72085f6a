"""Latte: blocks over the tokens of a frame take turns with blocks over the frames."""

from routing.adapters.families.parts import Family

FAMILIES = {
    "LatteTransformer3DModel": Family(
        refused="its blocks attend within frames and along frames in turn, each over tokens in a grid"
    ),
}
