"""Sana: linear attention, and convolutions over the grid of tokens."""

from routing.adapters.families.parts import Family

FAMILIES = {
    "SanaTransformer2DModel": Family(refused="its blocks convolve over the grid of tokens"),
}
