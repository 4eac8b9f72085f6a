"""What the rows of the tables are made of: ways to gather what is indexed by token, counts, checks.

Shapes: as in routing/adapters/adapter.py. A way to gather takes a value of any block and the kept tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from routing.adapters.adapter import Adapter, Arguments, TokenSelection

Gather = Callable[[Any, TokenSelection], Any]
Count = Callable[[nn.Module, Arguments], int]

# Known ways to attend: all tokens alike, whatever their places.
PROCESSORS = """
AceStepAttnProcessor2_0 AllegroAttnProcessor2_0 AnyFlowAttnProcessor AnyFlowCrossAttnProcessor AttnProcessor
AttnProcessor2_0 AudioDiTCrossAttnProcessor AudioDiTSelfAttnProcessor AuraFlowAttnProcessor2_0
BriaAttnProcessor BriaFibo2AttnProcessor BriaFiboAttnProcessor CogVideoXAttnProcessor2_0 CogView4AttnProcessor
CosmosAttnProcessor2_0 DreamLiteAttnProcessor2_0 EasyAnimateAttnProcessor2_0
ErnieImageSingleStreamAttnProcessor Flux2AttnProcessor Flux2ParallelSelfAttnProcessor Flux3AttnProcessor
FluxAttnProcessor FusedAttnProcessor2_0 FusedAuraFlowAttnProcessor2_0 FusedCogVideoXAttnProcessor2_0
FusedJointAttnProcessor2_0 GlmImageAttnProcessor HeliosAttnProcessor HiDreamAttnProcessor
HunyuanImageAttnProcessor HunyuanVideo15AttnProcessor2_0 HunyuanVideoAttnProcessor2_0 Ideogram4AttnProcessor
JointAttnProcessor2_0 JoyImageAttnProcessor JoyImageEditPlusAttnProcessor Kandinsky5AttnProcessor
Kandinsky6AttnProcessor Krea2AttnProcessor LTX2AudioVideoAttnProcessor LTXVideoAttnProcessor
LongCatImageAttnProcessor Lumina2AttnProcessor2_0 LuminaAttnProcessor2_0 MiniMaxMusic3AttnProcessor
MochiAttnProcessor2_0 MotifVideoAttnProcessor2_0 MotifVideoCrossAttnProcessor2_0 NucleusMoEAttnProcessor2_0
OmniGenAttnProcessor2_0 OvisImageAttnProcessor PRXAttnProcessor2_0 QwenDoubleStreamAttnProcessor2_0
QwenImage21AttnProcessor SanaWMLTX2AudioVideoAttnProcessor SanaWMLTX2RefinerAttnProcessor
SkyReelsV2AttnProcessor StableAudio3CrossAttnProcessor StableAudio3SelfAttnProcessor
StableAudioAttnProcessor2_0 WanAttnProcessor ZSingleStreamAttnProcessor
"""
ALL = slice(None)
HEADS_THIRD = ((None, ALL, None, ALL), (None, ALL, None), (ALL, None, ALL))  # for (N, L, heads, d)
HEADS_SECOND = ((None, None, ALL, ALL),)  # for (N, heads, L, d)


class TablePerSample:
    """A rotary table (N, L, d) in place of one (L, d); diffusers adds dimensions before it multiplies."""

    def __init__(self, table: torch.Tensor):
        self.table = table

    @property
    def shape(self) -> torch.Size:
        """That of a table for all samples."""
        return self.table.shape[1:]

    def float(self) -> "TablePerSample":
        """Return the table in single precision."""
        return TablePerSample(self.table.float())

    def unsqueeze(self, dim: int) -> torch.Tensor:
        """Return (N, L, 1, d), where (L, 1, d) was asked for."""
        if dim != 1:
            raise ValueError(f"a rotary table that gets dimension {dim} does not go together with routing")
        return self.table.unsqueeze(2)

    def view(self, *shape: int) -> torch.Tensor:
        """Return (N, L, 1, d), where (1, L, 1, d) was asked for."""
        if shape != (1, self.shape[0], 1, self.shape[1]):
            raise ValueError(f"a rotary table that is viewed as {shape} does not go together with routing")
        return self.table.unsqueeze(2)

    def __getitem__(self, key: tuple | slice) -> "torch.Tensor | TablePerSample":
        if key == slice(-self.shape[0], None):  # the last tokens, where that is all of them
            return self
        if key in HEADS_THIRD:
            return self.table.unsqueeze(2)
        if key in HEADS_SECOND:
            return self.table.unsqueeze(1)
        raise ValueError(f"a rotary table that is indexed by {key} does not go together with routing")


def tokens(x: torch.Tensor, kept: TokenSelection) -> torch.Tensor:
    """Gather (N or 1, T + S, ...)."""
    return kept.gather(x)


def joint(x: torch.Tensor, kept: TokenSelection) -> torch.Tensor:
    """Gather (N or 1, P + T + S, ...)."""
    return kept.gather_joint(x)


def leading(x: torch.Tensor, kept: TokenSelection) -> torch.Tensor:
    """Cut (P + T + S, ...), which is the same for all tokens of the image."""
    return x[: kept.num_prefix_tokens + kept.ids.shape[1]]


def of_all(x: torch.Tensor, kept: TokenSelection) -> torch.Tensor:
    """Gather (T + S, ...) that all samples share."""
    return kept.gather(x.unsqueeze(0))


def table(x: torch.Tensor, kept: TokenSelection) -> TablePerSample:
    """Gather a rotary table (T + S, d) that all samples share."""
    return TablePerSample(of_all(x, kept))


def joint_table(x: torch.Tensor, kept: TokenSelection) -> TablePerSample:
    """Gather a rotary table (P + T + S, d) that all samples share."""
    return TablePerSample(kept.gather_joint(x.unsqueeze(0)))


def mask(x: torch.Tensor, kept: TokenSelection) -> torch.Tensor:
    """Gather the keys (N or 1, ..., P + T + S), and the queries before them if each has a row."""
    x = kept.gather_joint(x, -1)
    return kept.gather_joint(x, -2) if x.ndim > 2 and x.shape[-2] > 1 else x


def mask_before_text(x: torch.Tensor, kept: TokenSelection) -> torch.Tensor:
    """Gather the keys of the image in a mask (N, ..., P + T + S + Q) with a text behind it."""
    return kept.gather_between(x, -1)


def along(dim: int) -> Gather:
    """Gather along another dimension than the second."""
    return lambda x, kept: kept.gather(x, dim)


def if_many(gather: Gather) -> Gather:
    """Gather (N, L, ...), and leave (N, 1, ...) that all tokens share."""
    return lambda x, kept: gather(x, kept) if x.shape[1] > 1 else x


def if_ndim(ndim: int, gather: Gather) -> Gather:
    """Gather what has a dimension of tokens; what has not, all tokens share."""
    return lambda x, kept: gather(x, kept) if x.ndim == ndim else x


def each(gather: Gather) -> Gather:
    """Gather each of a tuple: cosines and sines."""
    return lambda values, kept: tuple(gather(x, kept) for x in values)


rotary = each(joint_table)  # cosines and sines that all samples share


def rope(gather: Gather) -> dict[str, Gather]:
    """Gather positions under the name that most blocks give them."""
    return {"image_rotary_emb": gather}


def part(i: int, gather: Gather) -> Gather:
    """Gather one of a tuple."""
    return lambda values, kept: (*values[:i], gather(values[i], kept), *values[i + 1 :])


def entry(key: str, gather: Gather) -> Gather:
    """Gather an entry of a dictionary, if it is there."""

    def gather_entry(values: dict[str, Any], kept: TokenSelection) -> dict[str, Any]:
        return {**values, key: gather(values[key], kept)} if values.get(key) is not None else values

    return gather_entry


def length(name: str) -> Count:
    """Count the tokens of an argument (N, P, ...), 0 where it is not given."""
    return lambda model, arguments: 0 if arguments.get(name) is None else arguments[name].shape[1]


def num_reference_tokens(plane: float) -> Callable[[nn.Module, Arguments], int]:
    """Count S where reference images come last in `img_ids`.

    Args:
        plane: the first coordinate of the image itself; references have others.
    """

    def count(model: nn.Module, arguments: Arguments) -> int:
        img_ids = arguments["img_ids"]
        is_reference = (img_ids[0] if img_ids.ndim == 3 else img_ids)[:, 0] != plane  # (T + S,)
        num_tokens = int(is_reference.sum())  # SYNC: shapes depend on it
        if is_reference[: len(is_reference) - num_tokens or 1].any():
            raise ValueError(
                f"img_ids: tokens of the image itself (first coordinate {plane}) must come before those of "
                "reference images"
            )
        return num_tokens

    return count


def refuse(what: str, is_there: Callable[[Any, Arguments], Any]) -> Callable[[Any, Arguments], None]:
    """Refuse what is there, by a name; `{}` in it stands for its value."""

    def check(model: Any, arguments: Arguments) -> None:
        if value := is_there(model, arguments):
            raise ValueError(
                f"{what.format(value)} of {type(model).__name__} does not go together with routing"
            )

    return check


def check(row: Adapter, model: nn.Module, arguments: Arguments) -> None:
    """Refuse ways to attend that are not known, and what the row itself refuses."""
    refused = f"of {type(model).__name__} does not go together with routing"
    for name in (name for name in arguments if name.endswith("attention_kwargs")):
        is_gathered = any(name in spec.by_token for spec in row.block_lists)
        accepted = ("scale", "attention_mask") if is_gathered else ("scale",)
        for key in set(arguments.get(name) or ()) - {*accepted}:
            raise ValueError(f"{name}.{key} {refused}, which accepts {', '.join(accepted)}")
    processors = [getattr(module, "processor", None) for module in model.modules()]
    for name in {type(processor).__name__ for processor in processors if processor is not None}:
        if name not in PROCESSORS.split():
            raise ValueError(f"{name} {refused}")
    if getattr(model, "is_cache_enabled", False):
        raise ValueError(f"the cache {refused}: model.disable_cache()")
    if getattr(model, "_parallel_config", None) is not None:
        raise ValueError(f"context or tensor parallelism {refused}")
    if (kind := getattr(model.config, "attention_type", "default")) not in ("default", "regular"):
        raise ValueError(f"attention_type={kind} {refused}")
    row.check(model, arguments)
