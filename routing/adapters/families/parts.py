"""Building blocks for the rows of the table: gather functions, counts and checks.

Shapes: as in routing/adapters/adapter.py. A gather function takes an argument of a block and the kept tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from routing.adapters.adapter import Adapter, Arguments, TokenSelection

Gather = Callable[[Any, TokenSelection], Any]
Count = Callable[[nn.Module, Arguments], int]

# Known attention processors: they treat all tokens alike, whatever their positions in the sequence.
PROCESSORS = """
AceStepAttnProcessor2_0 AllegroAttnProcessor2_0 AnyFlowAttnProcessor AnyFlowCrossAttnProcessor
AttnProcessor2_0 AudioDiTCrossAttnProcessor AudioDiTSelfAttnProcessor AuraFlowAttnProcessor2_0
BriaAttnProcessor BriaFibo2AttnProcessor BriaFiboAttnProcessor CogVideoXAttnProcessor2_0 CogView4AttnProcessor
CosmosAttnProcessor2_0 DreamLiteAttnProcessor2_0 EasyAnimateAttnProcessor2_0
ErnieImageSingleStreamAttnProcessor Flux2AttnProcessor Flux2ParallelSelfAttnProcessor Flux3AttnProcessor
FluxAttnProcessor FusedAttnProcessor2_0 FusedAuraFlowAttnProcessor2_0 FusedCogVideoXAttnProcessor2_0
FusedJointAttnProcessor2_0 GlmImageAttnProcessor HeliosAttnProcessor HiDreamAttnProcessor
HunyuanImageAttnProcessor HunyuanVideo15AttnProcessor2_0 HunyuanVideoAttnProcessor2_0 Ideogram4AttnProcessor
JointAttnProcessor2_0 JoyImageAttnProcessor JoyImageEditPlusAttnProcessor Kandinsky5AttnProcessor
Kandinsky6AttnProcessor Krea2AttnProcessor LongCatImageAttnProcessor LTX2AudioVideoAttnProcessor
LTX2PerturbedAttnProcessor LTXVideoAttnProcessor Lumina2AttnProcessor2_0 LuminaAttnProcessor2_0
MiniMaxH3AttnProcessor MiniMaxMusic3AttnProcessor MochiAttnProcessor2_0 MotifVideoAttnProcessor2_0
MotifVideoCrossAttnProcessor2_0 NucleusMoEAttnProcessor2_0 OmniGenAttnProcessor2_0 OvisImageAttnProcessor
PRXAttnProcessor2_0 QwenDoubleStreamAttnProcessor2_0 QwenImage21AttnProcessor
SanaWMLTX2AudioVideoAttnProcessor SanaWMLTX2RefinerAttnProcessor SkyReelsV2AttnProcessor
StableAudio3CrossAttnProcessor StableAudio3SelfAttnProcessor StableAudioAttnProcessor2_0 WanAttnProcessor
ZSingleStreamAttnProcessor
"""
ALL = slice(None)
HEADS_THIRD = ((None, ALL, None, ALL), (None, ALL, None), (ALL, None, ALL))  # for (N, L, heads, d)
HEADS_SECOND = ((None, None, ALL, ALL),)  # for (N, heads, L, d)


class TablePerSample:
    """A rotary table (N, L, d) that replaces one (L, d); diffusers adds dimensions before it multiplies."""

    def __init__(self, table: torch.Tensor):
        self.table = table

    @property
    def shape(self) -> torch.Size:
        """Shape (L, d) of the table that it replaces."""
        return self.table.shape[1:]

    def float(self) -> "TablePerSample":
        return TablePerSample(self.table.float())

    def unsqueeze(self, dim: int) -> torch.Tensor:
        """Return (N, L, 1, d) in place of (L, 1, d)."""
        if dim != 1:
            raise ValueError(f"unsqueeze({dim}) of a rotary table is not supported with routing")
        return self.table.unsqueeze(2)

    def view(self, *shape: int) -> torch.Tensor:
        """Return (N, L, 1, d) in place of (1, L, 1, d)."""
        if shape != (1, self.shape[0], 1, self.shape[1]):
            raise ValueError(f"view{shape} of a rotary table is not supported with routing")
        return self.table.unsqueeze(2)

    def __getitem__(self, key: tuple | slice) -> "torch.Tensor | TablePerSample":
        if key == slice(-self.shape[0], None):  # the last L tokens: all
            return self
        if key in HEADS_THIRD:
            return self.table.unsqueeze(2)
        if key in HEADS_SECOND:
            return self.table.unsqueeze(1)
        raise ValueError(f"indexing a rotary table by {key} is not supported with routing")


def tokens(x: torch.Tensor, kept: TokenSelection) -> torch.Tensor:
    """Gather (N or 1, T + S, ...)."""
    return kept.gather(x)


def joint(x: torch.Tensor, kept: TokenSelection) -> torch.Tensor:
    """Gather (N or 1, P + T + S, ...)."""
    return kept.gather_joint(x)


def leading(x: torch.Tensor, kept: TokenSelection) -> torch.Tensor:
    """Cut (P + T + S, ...), whose values are equal for all image tokens, to the new length."""
    return x[: kept.num_prefix_tokens + kept.ids.shape[1]]


def unbatched(x: torch.Tensor, kept: TokenSelection) -> torch.Tensor:
    """Gather (T + S, ...) that all samples share."""
    return kept.gather(x.unsqueeze(0))


def of_all(x: torch.Tensor, kept: TokenSelection) -> torch.Tensor:
    """Gather (P + T + S, ...) once for all samples, which keep the same tokens."""
    return kept.gather_joint(x.unsqueeze(0))[0]


def table(x: torch.Tensor, kept: TokenSelection) -> TablePerSample:
    """Gather a rotary table (T + S, d) that all samples share."""
    return TablePerSample(unbatched(x, kept))


def joint_table(x: torch.Tensor, kept: TokenSelection) -> TablePerSample:
    """Gather a rotary table (P + T + S, d) that all samples share."""
    return TablePerSample(kept.gather_joint(x.unsqueeze(0)))


def mask(x: torch.Tensor, kept: TokenSelection) -> torch.Tensor:
    """Gather the keys of a mask (N or 1, ..., P + T + S), and the queries if it has a row for each."""
    x = kept.gather_joint(x, -1)
    return kept.gather_joint(x, -2) if x.ndim > 2 and x.shape[-2] > 1 else x


def mask_before_text(x: torch.Tensor, kept: TokenSelection) -> torch.Tensor:
    """Gather the image keys of a mask (N, ..., P + T + S + Q) that ends with Q text tokens."""
    return kept.gather_between(x, -1)


def along(dim: int) -> Gather:
    """Gather along dimension `dim`."""
    return lambda x, kept: kept.gather(x, dim)


def if_many(gather: Gather) -> Gather:
    """Gather (N, L, ...), but return (N, 1, ...), which all tokens share, unchanged."""
    return lambda x, kept: gather(x, kept) if x.shape[1] > 1 else x


def if_ndim(ndim: int, gather: Gather) -> Gather:
    """Gather tensors of `ndim` dimensions; return others, which have no token dimension, unchanged."""
    return lambda x, kept: gather(x, kept) if x.ndim == ndim else x


def tuple_of(gather: Gather) -> Gather:
    """Gather every entry of a tuple, such as cosines and sines."""
    return lambda values, kept: tuple(gather(x, kept) for x in values)


rotary = tuple_of(joint_table)  # cosines and sines that all samples share


def rope(gather: Gather) -> dict[str, Gather]:
    """Gather `image_rotary_emb`, the name of rotary positions in most blocks."""
    return {"image_rotary_emb": gather}


def part(i: int, gather: Gather) -> Gather:
    """Gather entry `i` of a tuple."""
    return lambda values, kept: (*values[:i], gather(values[i], kept), *values[i + 1 :])


def entry(key: str, gather: Gather) -> Gather:
    """Gather entry `key` of a dictionary, if it has one."""

    def gather_entry(values: dict[str, Any], kept: TokenSelection) -> dict[str, Any]:
        return {**values, key: gather(values[key], kept)} if values.get(key) is not None else values

    return gather_entry


def length(name: str) -> Count:
    """Count the tokens of an argument (N, P, ...); 0 if it is not given."""
    return lambda model, arguments: 0 if arguments.get(name) is None else arguments[name].shape[1]


def num_reference_tokens(plane: float) -> Callable[[nn.Module, Arguments], int]:
    """Count the tokens S of reference images, which come last in `img_ids`.

    Args:
        plane: first coordinate of the image's own tokens; reference images have other values.
    """

    def count(model: nn.Module, arguments: Arguments) -> int:
        img_ids = arguments["img_ids"]
        is_reference = (img_ids[0] if img_ids.ndim == 3 else img_ids)[:, 0] != plane  # (T + S,)
        num_tokens = int(is_reference.sum())  # SYNC: shapes depend on it
        if is_reference[: len(is_reference) - num_tokens or 1].any():
            raise ValueError(
                f"img_ids: tokens of the image itself (first coordinate {plane}) must come before tokens of "
                "reference images"
            )
        return num_tokens

    return count


def refuse(name: str, find: Callable[[Any, Arguments], Any]) -> Callable[[Any, Arguments], None]:
    """Return a check that raises if `find` returns a true value, which replaces `{}` in `name`."""

    def check(model: Any, arguments: Arguments) -> None:
        if value := find(model, arguments):
            raise ValueError(f"{name.format(value)} of {type(model).__name__} is not supported with routing")

    return check


def check(row: Adapter, model: nn.Module, arguments: Arguments) -> None:
    """Raise for unknown attention processors and options, and for what the row itself refuses."""
    refused = f"of {type(model).__name__} is not supported with routing"
    for name in (name for name in arguments if name.endswith("attention_kwargs")):
        is_gathered = any(name in spec.by_token for spec in row.block_lists)
        accepted = ("scale", "attention_mask") if is_gathered else ("scale",)
        for key in set(arguments.get(name) or ()) - {*accepted}:
            raise ValueError(f"{name}.{key} {refused}, which supports {', '.join(accepted)}")
    processors = [getattr(module, "processor", None) for module in model.modules()]
    for name in {type(processor).__name__ for processor in processors if processor is not None}:
        if name not in PROCESSORS.split():
            raise ValueError(f"{name} {refused}")
    if getattr(model, "is_cache_enabled", False):
        raise ValueError(f"the cache {refused}: call model.disable_cache()")
    if getattr(model, "_parallel_config", None) is not None:
        raise ValueError(f"context or tensor parallelism {refused}")
    if (kind := getattr(model.config, "attention_type", "default")) not in ("default", "regular"):
        raise ValueError(f"attention_type={kind} {refused}")
    row.check(model, arguments)
