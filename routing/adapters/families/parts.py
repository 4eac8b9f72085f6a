"""What families have in common: rotary tables, masks, checks, and the sizes of small models."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from routing.adapters.adapter import Adapter, Arguments, TokenSelection

INPUTS = ("hidden_states", "encoder_hidden_states", "timestep", "return_dict")  # of most models
TEXT_DIM, POOLED_DIM = 48, 24


class Sizes(NamedTuple):
    """Of a small model with random weights, and of its inputs.

    Args:
        side: the image is of side x side tokens.
    """

    width: int = 32
    num_heads: int = 2
    depth: int = 6
    side: int = 4
    batch: int = 2
    num_text: int = 5

    @property
    def heads(self) -> dict[str, int]:
        """What most models call the heads of attention."""
        return {"num_attention_heads": self.num_heads, "attention_head_dim": self.head_dim}

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.width // self.num_heads

    @property
    def text(self) -> torch.Tensor:
        """States of the text (N, P, TEXT_DIM)."""
        return torch.randn(self.batch, self.num_text, TEXT_DIM)

    @property
    def text_mask(self) -> torch.Tensor:
        """Which tokens of the text are no padding (N, P): half of them, one less in each sample."""
        half = self.num_text // 2
        lengths = half - torch.arange(self.batch) % half
        return torch.arange(self.num_text) < lengths.unsqueeze(1)

    def image(self, channels: int, patch_size: int = 2, frames: int = 0) -> torch.Tensor:
        """Return latents (N, C, H, W), or (N, C, frames, H, W)."""
        shape = (frames,) if frames else ()
        return torch.randn(self.batch, channels, *shape, *(patch_size * self.side,) * 2)

    def tokens(self, channels: int) -> torch.Tensor:
        """Return the tokens of an image (N, T, C)."""
        return torch.randn(self.batch, self.side**2, channels)

    @property
    def positions(self) -> torch.Tensor:
        """The coordinates (T, 3) of tokens: 0, row, column."""
        rows, columns = torch.meshgrid(torch.arange(self.side), torch.arange(self.side), indexing="ij")
        return torch.stack([torch.zeros_like(rows), rows, columns], dim=-1).view(-1, 3).float()


Built = tuple[nn.Module, dict[str, Any]]  # a model, and arguments of its forward


@dataclass(frozen=True)
class Family:
    """A class of diffusers: what `attach` must know, and a small model of it with inputs.

    Args:
        refused: why it cannot be routed; then it has no adapter.
    """

    adapter: Adapter | None = None
    build: Callable[[Sizes], Built] | None = None
    refused: str = ""


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


def rotary(tables: tuple[torch.Tensor, torch.Tensor], kept: TokenSelection) -> tuple[TablePerSample, ...]:
    """Gather cosines and sines (T + S, d) that all samples share, of the image alone."""
    return tuple(TablePerSample(kept.gather(table.unsqueeze(0))) for table in tables)


def rotary_beside_text(tables: tuple[torch.Tensor, Any], kept: TokenSelection) -> tuple[TablePerSample, Any]:
    """Gather the table (T + S, d) of the image; that of the text stays."""
    image, text = tables
    return TablePerSample(kept.gather(image.unsqueeze(0))), text


def joint_table(table: torch.Tensor, kept: TokenSelection) -> TablePerSample:
    """Gather a table (P + T + S, d) that all samples share."""
    return TablePerSample(kept.gather_joint(table.unsqueeze(0)))


def joint_rotary(
    tables: tuple[torch.Tensor, torch.Tensor], kept: TokenSelection
) -> tuple[TablePerSample, ...]:
    return tuple(joint_table(table, kept) for table in tables)


def gather_each(tables: tuple[torch.Tensor, ...], kept: TokenSelection) -> tuple[torch.Tensor, ...]:
    """Gather tables (N or 1, T + S, ...)."""
    return tuple(kept.gather(table) for table in tables)


def mask_before_text(mask: torch.Tensor, kept: TokenSelection) -> torch.Tensor:
    """Gather the keys of the image in a mask (N, 1, 1, T + P) of the image and a text behind it."""
    return kept.gather_leading(mask, -1)


def mask_between_text(mask: torch.Tensor, kept: TokenSelection) -> torch.Tensor:
    """Gather the keys of the image in a mask (N, 1, 1, P + T + Q) with a text behind it."""
    return kept.gather_between(mask, -1)


def joint_mask(attention_kwargs: dict[str, Any], kept: TokenSelection) -> dict[str, Any]:
    mask = attention_kwargs.get("attention_mask")
    if mask is None:
        return attention_kwargs
    return {**attention_kwargs, "attention_mask": gather_mask(mask, kept.gather_joint)}


def gather_mask(mask: torch.Tensor, gather: Callable[[torch.Tensor, int], torch.Tensor]) -> torch.Tensor:
    """Gather the keys, and the queries if they differ: (N or 1, L) or (N or 1, ..., 1 or L, L)."""
    mask = gather(mask, -1)
    return gather(mask, -2) if mask.ndim > 2 and mask.shape[-2] > 1 else mask


def checked_by(
    processors: Sequence[str], attention_kwargs: str = "", accepted: Sequence[str] = ("scale",)
) -> Callable[[nn.Module, Arguments], None]:
    """Return a check of how a model attends: by these processors, given these keys of `attention_kwargs`."""

    def check(model: nn.Module, arguments: Arguments) -> None:
        refused = f"of {type(model).__name__} does not go together with routing"
        for key in set(arguments.get(attention_kwargs) or ()) - set(accepted):
            raise ValueError(f"{attention_kwargs}.{key} {refused}, which accepts {', '.join(accepted)}")
        for module in model.modules():
            processor = getattr(module, "processor", None)
            if processor is not None and (name := type(processor).__name__) not in processors:
                raise ValueError(f"{name} {refused}, which accepts {', '.join(processors)}")
        if getattr(model, "is_cache_enabled", False):
            raise ValueError(f"the cache {refused}: model.disable_cache()")
        if getattr(model, "_parallel_config", None) is not None:
            raise ValueError(f"context or tensor parallelism {refused}")
        if (kind := getattr(model.config, "attention_type", "default")) not in ("default", "regular"):
            raise ValueError(f"attention_type={kind} {refused}")

    return check


def num_text_tokens(model: nn.Module, arguments: Arguments) -> int:
    """Return P where the text comes first."""
    return arguments["encoder_hidden_states"].shape[1]


def num_reference_tokens(plane: float) -> Callable[[nn.Module, Arguments], int]:
    """Return what counts S where reference images come last in `img_ids`.

    Args:
        plane: the first coordinate of the image itself; references have others.
    """

    def count(model: nn.Module, arguments: Arguments) -> int:
        img_ids = arguments["img_ids"]
        is_reference = (img_ids[0] if img_ids.ndim == 3 else img_ids)[:, 0] != plane  # (T + S,)
        num_tokens = int(is_reference.sum())  # SYNC: shapes depend on it
        if num_tokens == len(is_reference):
            raise ValueError(
                "img_ids: there must be tokens of the image itself (in diffusers their first coordinate is "
                f"{plane})"
            )
        if num_tokens and not is_reference[-num_tokens:].all():
            raise ValueError(
                f"img_ids: the tokens of reference images (first coordinate not {plane}) must come last"
            )
        return num_tokens

    return count


def double_and_single(sizes: Sizes) -> dict[str, int]:
    """Return numbers of double and single blocks, a third and two thirds of the depth."""
    return {"num_layers": sizes.depth // 3, "num_single_layers": sizes.depth - sizes.depth // 3}


def axes_of(head_dim: int) -> tuple[int, int, int]:
    """Return how many channels of a head rotate by each of three coordinates."""
    first = head_dim // 8 if head_dim * 7 % 32 == 0 else head_dim // 4
    return first, (head_dim - first) // 2, (head_dim - first) // 2
