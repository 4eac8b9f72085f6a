"""HunyuanDiT: blocks of the first half hand their output to those of the second."""

from routing.adapters.families.parts import Family

FAMILIES = {
    "HunyuanDiT2DModel": Family(refused="skip connections join blocks of the first half to the second"),
}
