"""SANA-Video and SANA-WM: convolutions over the grid in each block."""

from routing.adapters.families.parts import Family

FAMILIES = {
    "SanaWMTransformer3DModel": Family(refused="its blocks convolve over the grid of tokens and its frames"),
    "SanaVideoTransformer3DModel": Family(
        refused="its blocks convolve over the grid of tokens and its frames"
    ),
}
