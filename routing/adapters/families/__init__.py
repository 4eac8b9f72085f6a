"""Transformers of diffusers by the names of their classes: whose tokens may be routed, and which cannot be.

Written against the signatures of diffusers, which is imported only where a text is counted. A row says what
`attach` must know of a class; tests/routing proves each row on a small model.
"""

from dataclasses import replace
from functools import partial

import torch.nn as nn

from routing.adapters.adapter import Adapter, plain_forward
from routing.adapters.families.images import IMAGES
from routing.adapters.families.parts import check
from routing.adapters.families.videos import VIDEOS

FAMILIES = {name: replace(row, check=partial(check, row)) for name, row in (IMAGES | VIDEOS).items()}
REFUSED = {
    "AnyFlowFARTransformer3DModel": "its attention takes a block mask over chunks of frames at their places",
    "Cosmos3OmniTransformer": "its tokens are packed in one row, without a dimension of samples",
    "HunyuanDiT2DModel": "skip connections join blocks of the first half to the second",
    "Kandinsky6SRTransformer3DModel": "its attention chooses among tiles of 8 x 8 tokens",
    "LatteTransformer3DModel": (
        "its blocks attend within frames and along frames in turn, each over tokens in a grid"
    ),
    "MiniMaxH3Transformer3DModel": (
        "its blocks take positions and modulation that all samples of a batch share"
    ),
    "MiniMaxMusic3RVQDepthDecoder": (
        "it predicts the codes of one audio frame one after another: its tokens are codebooks"
    ),
    "PriorTransformer": "the image is a single token, the embedding that CLIP gives it",
    "RFD4ProteinaTransformer": ("between blocks all residues update those of pairs, by which blocks attend"),
    "SanaTransformer2DModel": "its blocks convolve over the grid of tokens",
    "SanaVideoTransformer3DModel": "its blocks convolve over the grid of tokens and its frames",
    "SanaWMTransformer3DModel": "its blocks convolve over the grid of tokens and its frames",
    "TransformerTemporalModel": (
        "the tokens of a row are frames at one place, and the places of an image are samples"
    ),
    "WanAnimateTransformer3DModel": (
        "between its blocks the tokens of each frame attend to the face of that frame"
    ),
    "WanAnimate2Transformer3DModel": "its attention lays tokens out by frame, and masks them by their places",
    "WanVACETransformer3DModel": (
        "its control blocks give hints for all tokens, which it adds between its other blocks"
    ),
}


def adapter_of(model: nn.Module) -> Adapter:
    """Find the adapter of a class: its own `routing_adapter`, or the row of a model of diffusers.

    Raises:
        ValueError: the class is not known, or cannot be routed.
    """
    if isinstance(adapter := getattr(type(model), "routing_adapter", None), Adapter):
        return adapter
    for kind in type(model).__mro__:
        name = kind.__name__
        known = kind.__module__.startswith("diffusers.") and name in FAMILIES | REFUSED
        if known and plain_forward(type(model)) is kind.forward:  # a class that shards it is derived from it
            if name in REFUSED:
                raise ValueError(f"{name} cannot be routed: {REFUSED[name]}")
            return FAMILIES[name]
    raise ValueError(
        f"routing knows no {type(model).__name__}: pass a class that `python -m routing.adapters.families` "
        "lists, not its wrapper (peft: get_base_model()), or an adapter with it: routing.propose_adapter "
        "writes one"
    )
