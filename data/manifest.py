"""The manifest of a latent folder; data/README.md has the table."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runtime.files import read_json

FORMAT_VERSION = 1
KINDS = ("samples", "moments")
DTYPES = ("float16", "float32")
CONDITIONING_TYPES = (None, "mask", "segmentation")
BLOCK_BYTES = 2**26
MAX_CLASSES, NAMES_SHOWN = 1_000_000, 10
MAX_NUMBERS = 2**26  # of one entry: 4 channels of 4096x4096
MAX_BLOCK_BYTES = 2**40
MAX_SCALE = 1e18
FAR_STD = 1.8  # a factor: data sets differ by less, a scale forgotten or applied twice by much more
FILES = {"manifest": "manifest.json", "latents": "latents.npy", "labels": "labels.npy", "masks": "masks.npy"}

Numbers = float | tuple[float, ...]


@dataclass(frozen=True)
class LatentManifest:
    """What a latent folder holds; a ValueError names the key, the value and the rule."""

    count: int
    shape: tuple[int, int, int]  # (C, H, W) as stored of one image; `moments` have twice the channels
    dtype: str
    kind: str  # `samples`, or `moments`: mean, then log-variance, along the channels
    num_classes: int  # 0: data without classes
    encoder: str  # `identity`, a folder, or OWNER/NAME of a public autoencoder
    encoder_hash: str | None = None  # of its weights; None: it has none, or they are not known
    pixel_range: tuple[float, float] = (-1.0, 1.0)  # black and white in the encoder's pixels
    scale: Numbers = 1.0  # the network sees (latent - shift) * scale; a number, or one for each channel
    shift: Numbers = 0.0
    std: float | None = None  # what the network sees, as the scale promises; None promises nothing
    hflip: bool = False  # each entry holds the image and, at index 1, its flip, encoded separately
    resolution: int | None = None  # side of the images in pixels
    class_names: tuple[str, ...] | None = None  # in the order of the labels
    untrained_classes: tuple[int, ...] = ()  # without an entry to train on, ascending
    num_held_out: int = 0  # entries, always the same, that are never trained on
    conditioning_type: str | None = None  # `mask`: bytes weight the loss; `segmentation`: all but 0 do
    origin: dict[str, Any] | None = None  # how the latents were made
    block_bytes: int = BLOCK_BYTES
    checksums: dict[str, list[str]] | None = None  # SHA-256 of each block of block_bytes, by the file's name
    format_version: int = FORMAT_VERSION

    def __post_init__(self):
        for key, is_valid, rule in self._rules():
            if not is_valid:
                raise ValueError(f"{key}={getattr(self, key)!r:.200} must be {rule}")

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yield (key, True if its value is valid, the rule); each may rely on those before it."""
        yield "format_version", self.format_version == FORMAT_VERSION, f"{FORMAT_VERSION}"
        yield "kind", self.kind in KINDS, f"one of {', '.join(KINDS)}"
        yield "dtype", self.dtype in DTYPES, f"one of {', '.join(DTYPES)}"
        yield "count", _is_count(self.count), "greater than 0"
        shape = self.shape
        is_square = len(shape) == 3 and shape[1] == shape[2] and all(map(_is_count, shape))
        is_square = is_square and math.prod(shape) <= MAX_NUMBERS
        yield "shape", is_square, f"(channels, size, size), at most {MAX_NUMBERS} numbers"
        is_even = self.kind != "moments" or shape[0] % 2 == 0
        yield "shape", is_even, "of an even number of channels for kind=moments"
        is_part = isinstance(self.num_held_out, int) and 0 <= self.num_held_out < self.count
        yield "num_held_out", is_part, f"in [0, {self.count - 1}], of count={self.count}"
        yield "hflip", isinstance(self.hflip, bool), "true or false"
        yield "conditioning_type", self.conditioning_type in CONDITIONING_TYPES, "null, mask or segmentation"
        yield "encoder", isinstance(self.encoder, str), "a name"
        is_bounded = isinstance(self.num_classes, int) and 0 <= self.num_classes <= MAX_CLASSES
        yield "num_classes", is_bounded, f"in [0, {MAX_CLASSES}]"
        names, untrained, classes = self.class_names, self.untrained_classes, range(self.num_classes)
        is_named = names is None or (len(names) == len(classes) and all(isinstance(n, str) for n in names))
        yield "class_names", is_named, f"num_classes={self.num_classes} texts"
        numbers = all(type(label) is int and label in classes for label in untrained)
        is_some = numbers and all(a < b for a, b in pairwise(untrained))
        is_some = is_some and (not untrained or len(untrained) < len(classes))
        yield "untrained_classes", is_some, f"some of {self.num_classes} classes, ascending"
        for key, rule in (("scale", "a number other than 0"), ("shift", "a number")):
            value = getattr(self, key)
            numbers = value if isinstance(value, tuple) else (value,)
            is_good = all(_is_number(n) and (n or key == "shift") for n in numbers)
            is_good = is_good and len(numbers) in (1, self.in_channels)
            yield key, is_good, f"{rule}, or one for each of {self.in_channels} channels"
        is_pair = len(self.pixel_range) == 2 and all(map(_is_number, self.pixel_range))
        is_range = is_pair and self.pixel_range[0] != self.pixel_range[1]
        yield "pixel_range", is_range, "two numbers: what black is, and what white is"
        is_std = self.std is None or (_is_number(self.std) and self.std > 0)
        yield "std", is_std, "a number greater than 0, or null"
        is_bounded = _is_count(self.block_bytes) and self.block_bytes <= MAX_BLOCK_BYTES
        yield "block_bytes", is_bounded, f"greater than 0, and at most {MAX_BLOCK_BYTES}"
        files = (self.checksums or {}).items()
        are_inside = all(Path(n).name == n != ".." and isinstance(hashes, list) for n, hashes in files)
        yield "checksums", are_inside, "lists of hashes of files in the folder itself"

    @property
    def in_channels(self) -> int:
        return self.shape[0] // 2 if self.kind == "moments" else self.shape[0]

    @property
    def trained_classes(self) -> np.ndarray:
        """Classes that entries to train on have, ascending."""
        return np.setdiff1d(np.arange(self.num_classes), self.untrained_classes)

    @property
    def num_trained(self) -> int:
        """Entries that are trained on."""
        return self.count - self.num_held_out

    @property
    def input_size(self) -> int:
        return self.shape[1]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the array of latents: (count, C, H, W), or (count, 2, C, H, W) with hflip."""
        return (self.count, *((2,) if self.hflip else ()), *self.shape)

    def arrays(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Type and shape of each array beside the manifest, by its key in FILES."""
        found = {"latents": (self.dtype, self.stored_shape)}
        if self.num_classes:
            found["labels"] = ("int64", (self.count,))
        if self.conditioning_type:
            found["masks"] = ("uint8", (self.count, *self.shape[1:]))
        return found

    def to_latents(self, stored: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """Turn stored latents (N, C', H, W) into what a network sees, (N, C, H, W) fp32; sample moments."""
        stored = stored.float()
        if self.kind == "moments":
            mean, logvar = stored.chunk(2, dim=1)
            eps = torch.randn(mean.shape, generator=generator, device=mean.device)
            stored = mean + (0.5 * logvar).exp() * eps
        return self._normalise(stored)

    def to_means(self, stored: torch.Tensor) -> torch.Tensor:
        """The same, with the mean of each posterior in place of a sample."""
        stored = stored.float()
        return self._normalise(stored.chunk(2, dim=1)[0] if self.kind == "moments" else stored)

    def to_encoder(self, latents: torch.Tensor) -> torch.Tensor:
        """Undo scale and shift: what the encoder's decoder takes."""
        return latents / _column(self.scale, latents.device) + _column(self.shift, latents.device)

    def check_sizes(
        self, path: str, *, input_size: int | None, in_channels: int | None, num_classes: int | None
    ) -> None:
        """Raise a ValueError unless a run that expects these sizes (None: any) can use this."""
        expected = {"input_size": input_size, "in_channels": in_channels, "num_classes": num_classes}
        for key, size in expected.items():
            if size is not None and getattr(self, key) != size:
                rule = f"must be {getattr(self, key)}, as in {path}/{FILES['manifest']}"
                raise ValueError(f"data.{key}={size} {rule}; data=latents takes its sizes from there")

    def std_warning(self, std: torch.Tensor) -> str | None:
        """Warn if the standard deviation of what the network sees is far from the promised one."""
        if self.std is None or self.std / FAR_STD < (std := std.item()) < self.std * FAR_STD:
            return None
        factors = self.scale if isinstance(self.scale, tuple) else (self.scale,)
        fitting = ", ".join(f"{factor * self.std / std:.4g}" for factor in factors if std) or "anew"
        return (
            f"warning: what the network sees has a standard deviation of {std:.3g}, the manifest promises "
            f"{self.std:g}. If these are the right latents, set scale {fitting} in manifest.json"
        )

    def _normalise(self, raw: torch.Tensor) -> torch.Tensor:
        return (raw - _column(self.shift, raw.device)) * _column(self.scale, raw.device)


def read_manifest(path: str | Path) -> LatentManifest:
    """Read the manifest of a latent folder."""
    file = Path(path) / FILES["manifest"]
    if not file.is_file():
        raise FileNotFoundError(
            f"data.path={path} must be a latent folder, but {file} is not there: `python -m data.encode` "
            "makes one of images, `python -m data.convert` of other formats (data/README.md)"
        )
    return manifest_from(read_json(file), str(file))


def manifest_from(fields: dict[str, Any], name: str) -> LatentManifest:
    try:
        lists = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
        return LatentManifest(**{**fields, **lists})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{name} is not a latent manifest: {error}") from error


def untrained_classes_of(labels: np.ndarray | None, num_classes: int) -> tuple[int, ...]:
    """The classes without a label in `labels`, ascending."""
    if labels is None:
        return ()
    return tuple(np.flatnonzero(np.bincount(labels, minlength=num_classes) == 0).tolist())


def first_classes(manifest: LatentManifest) -> str:
    """The number of classes, and the first names with their numbers."""
    if not manifest.num_classes:
        return "none"
    names = [f"{i} {name}" for i, name in enumerate(manifest.class_names or ())]
    return str(manifest.num_classes) + (f": {_some(names)}" if names else ", numbers without names")


def class_warnings(manifest: LatentManifest) -> list[str]:
    """A line for numbers that differ from the names, and one for classes without images."""
    found, names = [], manifest.class_names or ()
    moved = [f"class {i} is {name}" for i, name in enumerate(names) if name.isdecimal() and int(name) != i]
    if moved:
        found.append(f"{_some(moved)}: names are sorted as text, so that 10 comes before 2 (02 does not)")
    if untrained := manifest.untrained_classes:
        rule = "have no images to train on, and are never drawn when sampling"
        found.append(
            f"{len(untrained)} of {manifest.num_classes} classes {rule}: {_some([*map(str, untrained)])}"
        )
    return found


def _some(parts: list[str]) -> str:
    return ", ".join(parts[:NAMES_SHOWN]) + (", ..." if parts[NAMES_SHOWN:] else "")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_SCALE


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


@lru_cache
def _column(value: Numbers, device: torch.device) -> float | torch.Tensor:
    """Numbers that broadcast to (N, C, H, W); cached, since a copy to the device synchronizes."""
    return torch.tensor(value, device=device).view(-1, 1, 1) if isinstance(value, tuple) else value
