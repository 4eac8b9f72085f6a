"""Transformers of diffusers whose tokens may be routed, by the names of their classes: a file for each line.

Written against the signatures of diffusers, which is imported only where a model is built or its text is
counted. Layers are counted through all lists of a model: FLUX's and AuraFlow's double blocks first, then the
single ones.

`python -m routing.adapters.families` says what is known of each class of the installed version, and tries it.
"""

import torch.nn as nn

from routing.adapters.adapter import Adapter, plain_forward
from routing.adapters.families import (
    ace_step,
    allegro,
    anyflow,
    auraflow,
    bria_fibo,
    chroma,
    cogvideox,
    cogview,
    cosmos,
    dit,
    easyanimate,
    ernie,
    flux,
    flux2,
    flux3,
    flux_like,
    helios,
    hidream,
    hunyuan_dit,
    hunyuan_image,
    hunyuan_video,
    ideogram,
    joyimage,
    kandinsky,
    krea,
    latte,
    longcat_audio,
    ltx,
    lumina,
    minimax_h3,
    minimax_music3,
    mochi,
    motif_video,
    nucleus,
    omnigen,
    pixart,
    proteina,
    prx,
    qwen_image,
    sana,
    sana_video,
    sd3,
    stable_audio,
    stable_audio3,
    t5_film,
    unet,
    wan,
    z_image,
)
from routing.adapters.families.parts import Built, Family, Sizes

# fmt: off
LINES = (
    ace_step, allegro, anyflow, auraflow, bria_fibo, chroma, cogvideox, cogview, cosmos, dit,
    easyanimate, ernie, flux, flux2, flux3, flux_like, helios, hidream, hunyuan_dit, hunyuan_image,
    hunyuan_video, ideogram, joyimage, kandinsky, krea, latte, longcat_audio, ltx, lumina,
    minimax_h3, minimax_music3, mochi, motif_video, nucleus, omnigen, pixart, proteina, prx,
    qwen_image, sana, sana_video, sd3, stable_audio, stable_audio3, t5_film, unet, wan, z_image,
)
# fmt: on
FAMILIES: dict[str, Family] = {}
for _line in LINES:
    FAMILIES |= _line.FAMILIES


def adapter_of(model: nn.Module) -> Adapter:
    """Return the adapter that a class has, or the one for a model of diffusers.

    Raises:
        ValueError: the class is not known, or cannot be routed.
    """
    if isinstance(adapter := getattr(type(model), "routing_adapter", None), Adapter):
        return adapter
    for kind in type(model).__mro__:
        known = kind.__module__.startswith("diffusers.") and kind.__name__ in FAMILIES
        if known and plain_forward(type(model)) is kind.forward:  # a class that shards it is derived from it
            family = FAMILIES[kind.__name__]
            if family.adapter is None:
                raise ValueError(f"{kind.__name__} cannot be routed: {family.refused}")
            return family.adapter
    raise ValueError(
        f"routing knows no {type(model).__name__}: pass a class that "
        "`python -m routing.adapters.families` lists, not its wrapper (peft: get_base_model()), "
        "or an adapter with it: routing.propose_adapter writes one"
    )


def routable() -> list[str]:
    """Return the names of the classes that are known."""
    return [name for name, family in FAMILIES.items() if family.adapter]


__all__ = ["FAMILIES", "Built", "Family", "Sizes", "adapter_of", "routable"]
