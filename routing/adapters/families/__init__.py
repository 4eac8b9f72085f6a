"""Transformers of diffusers by the names of their classes: whose tokens may be routed, and which cannot be.

Written against the signatures of diffusers, which is imported only where a text is counted. A row says what
`attach` must know of a class; tests/routing proves each row on a small model.
"""

from dataclasses import replace
from functools import partial

import torch.nn as nn

from routing.adapters.adapter import Adapter, plain_forward
from routing.adapters.families.parts import check
from routing.adapters.families.table import ROWS

FAMILIES = {name: replace(row, check=partial(check, row)) for name, row in ROWS.items()}
REFUSED = {
    "AnyFlowFARTransformer3DModel": "its attention takes a block mask over chunks of frames at their places",
    "Cosmos3OmniTransformer": "its tokens are packed in one row, without a dimension of samples",
    "HunyuanDiT2DModel": "skip connections join blocks of the first half to the second",
    "Kandinsky6SRTransformer3DModel": "its attention chooses among tiles of 8 x 8 tokens",
    "LatteTransformer3DModel": "its blocks attend within frames and along frames in turn, in a grid",
    "MiniMaxH3Transformer3DModel": "its blocks take positions and modulation that all samples share",
    "MiniMaxMusic3RVQDepthDecoder": "its tokens are the codebooks of one frame of audio",
    "PriorTransformer": "the image is a single token, the embedding that CLIP gives it",
    "RFD4ProteinaTransformer": "between blocks all residues update those of pairs, by which blocks attend",
    "SanaTransformer2DModel": "its blocks convolve over the grid of tokens",
    "SanaVideoTransformer3DModel": "its blocks convolve over the grid of tokens and its frames",
    "SanaWMTransformer3DModel": "its blocks convolve over the grid of tokens and its frames",
    "TransformerTemporalModel": "its tokens are frames at one place, the places of an image are samples",
    "WanAnimateTransformer3DModel": "between its blocks the tokens of a frame attend to the face in it",
    "WanAnimate2Transformer3DModel": "its attention lays tokens out by frame, and masks them by their places",
    "WanVACETransformer3DModel": "between its blocks it adds the hints that control blocks give all tokens",
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
