"""The manifest of a latent folder. data/README.md describes its keys."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runtime.errors import as_value_error
from runtime.files import read_json

FORMAT_VERSION = 1
KINDS = ("samples", "moments")
DTYPES = ("float16", "float32")
CONDITIONING_TYPES = (None, "mask", "segmentation")
BLOCK_BYTES = 2**26
MAX_CLASSES, NAMES_SHOWN = 1_000_000, 10
MAX_NUMBERS = 2**26  # in one entry: 4 channels of 4096x4096
MAX_BLOCK_BYTES = 2**40
MAX_SCALE = 1e18
FAR_STD = 1.8  # factor: data sets differ by less, and a missing or repeated scale changes much more
FILES = {"manifest": "manifest.json", "latents": "latents.npy", "labels": "labels.npy", "masks": "masks.npy"}
FILES |= {"features": "features.npy", "text": "text.npy"}
MAX_TEXT_TOKENS, MAX_WORDS = 512, 32_767  # tokens of a caption; word ids are int16
MAX_PROMPTS, MAX_LETTERS = 1000, 4096

Numbers = float | tuple[float, ...]


@dataclass(frozen=True)
class LatentManifest:
    """The keys of a latent folder's manifest.

    Raises:
        ValueError: a value is invalid. The message has the key, the value and the rule.
    """

    count: int
    shape: tuple[int, int, int]  # stored (C, H, W) of one image; `moments` have twice the channels
    dtype: str
    kind: str  # `samples`, or `moments`: mean, then log-variance, along the channels
    num_classes: int  # 0: no classes
    encoder: str  # `identity`, a folder, or OWNER/NAME on the hub
    encoder_hash: str | None = None  # hash of its weights; None: no weights, or unknown
    pixel_range: tuple[float, float] = (-1.0, 1.0)  # black and white in the encoder's pixels
    scale: Numbers = 1.0  # the network sees (latent - shift) * scale; a number, or one per channel
    shift: Numbers = 0.0
    std: float | None = None  # expected standard deviation of the network's input; None: unknown
    hflip: bool = False  # each entry has the image and, at index 1, its flip, encoded separately
    resolution: int | None = None  # side of the images in pixels
    class_names: tuple[str, ...] | None = None  # in the order of the labels
    untrained_classes: tuple[int, ...] = ()  # classes without training entries, ascending
    num_held_out: int = 0  # number of entries that are never trained on
    conditioning_type: str | None = None  # `mask`: bytes weight the loss; `segmentation`: all but 0 weigh 1
    features: dict[str, Any] | None = None  # of the images' patches: `shape` (tokens, numbers) and encoder
    text: dict[str, Any] | None = None  # of captions: their encoder and shape, and some as `prompts`
    origin: dict[str, Any] | None = None  # how the latents were made
    block_bytes: int = BLOCK_BYTES
    checksums: dict[str, list[str]] | None = None  # SHA-256 of each block of block_bytes, by file name
    format_version: int = FORMAT_VERSION

    def __post_init__(self):
        for key, is_valid, rule in self._rules():
            if not is_valid:
                raise ValueError(f"{key}={getattr(self, key)!r:.200} must be {rule}")

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        """Yield (key, True if its value is valid, rule). A rule can rely on the rules before it."""
        yield "format_version", self.format_version == FORMAT_VERSION, f"{FORMAT_VERSION}"
        yield "kind", self.kind in KINDS, f"one of {', '.join(KINDS)}"
        yield "dtype", self.dtype in DTYPES, f"one of {', '.join(DTYPES)}"
        yield "count", _is_count(self.count), "greater than 0"
        shape = self.shape
        is_square = len(shape) == 3 and shape[1] == shape[2] and all(map(_is_count, shape))
        is_square = is_square and math.prod(shape) <= MAX_NUMBERS
        yield "shape", is_square, f"(channels, size, size), at most {MAX_NUMBERS} numbers"
        is_even = self.kind != "moments" or shape[0] % 2 == 0
        yield "shape", is_even, "(channels, size, size) with an even number of channels for kind=moments"
        is_part = isinstance(self.num_held_out, int) and 0 <= self.num_held_out < self.count
        yield "num_held_out", is_part, f"in [0, {self.count - 1}] for count={self.count}"
        yield "hflip", isinstance(self.hflip, bool), "true or false"
        yield "conditioning_type", self.conditioning_type in CONDITIONING_TYPES, "null, mask or segmentation"
        yield "encoder", isinstance(self.encoder, str), "a name"
        features = {"shape": (1, 1)} if self.features is None else self.features
        sizes = features.get("shape") if isinstance(features, dict) else None
        is_shape = isinstance(sizes, list | tuple) and len(sizes) == 2 and all(map(_is_count, sizes))
        is_shape = is_shape and math.prod(sizes) <= MAX_NUMBERS
        yield "features", is_shape, f"null, or have shape: [tokens, numbers], at most {MAX_NUMBERS} numbers"
        rule = None if self.text is None else _text_rule(self.text)
        yield "text", rule is None, f"null, or have {rule}"
        is_bounded = isinstance(self.num_classes, int) and 0 <= self.num_classes <= MAX_CLASSES
        yield "num_classes", is_bounded, f"in [0, {MAX_CLASSES}]"
        names, untrained, classes = self.class_names, self.untrained_classes, range(self.num_classes)
        is_named = names is None or (len(names) == len(classes) and all(isinstance(n, str) for n in names))
        yield "class_names", is_named, f"num_classes={self.num_classes} strings"
        numbers = all(type(label) is int and label in classes for label in untrained)
        is_subset = numbers and all(a < b for a, b in pairwise(untrained))
        is_subset = is_subset and (not untrained or len(untrained) < len(classes))
        yield "untrained_classes", is_subset, f"some of {self.num_classes} classes, ascending"
        for key, rule in (("scale", "a number other than 0"), ("shift", "a number")):
            value = getattr(self, key)
            numbers = value if isinstance(value, tuple) else (value,)
            is_good = all(_is_number(n) and (n or key == "shift") for n in numbers)
            is_good = is_good and len(numbers) in (1, self.in_channels)
            yield key, is_good, f"{rule}, or one per channel ({self.in_channels})"
        is_pair = len(self.pixel_range) == 2 and all(map(_is_number, self.pixel_range))
        is_range = is_pair and self.pixel_range[0] != self.pixel_range[1]
        yield "pixel_range", is_range, "two different numbers: the values of black and white"
        is_std = self.std is None or (_is_number(self.std) and self.std > 0)
        yield "std", is_std, "a number greater than 0, or null"
        is_bounded = _is_count(self.block_bytes) and self.block_bytes <= MAX_BLOCK_BYTES
        yield "block_bytes", is_bounded, f"greater than 0 and at most {MAX_BLOCK_BYTES}"
        files = (self.checksums or {}).items()
        are_inside = all(Path(n).name == n != ".." and isinstance(hashes, list) for n, hashes in files)
        yield "checksums", are_inside, "lists of hashes, by names of files in the folder"

    @property
    def in_channels(self) -> int:
        return self.shape[0] // 2 if self.kind == "moments" else self.shape[0]

    @property
    def trained_classes(self) -> np.ndarray:
        """The classes with training entries, ascending."""
        return np.setdiff1d(np.arange(self.num_classes), self.untrained_classes)

    @property
    def contents(self) -> str:
        """The classes and captions of the entries, for messages."""
        captions = f", captions of up to {self.text['num_tokens']} tokens" if self.text else ""
        return f"{self.num_classes or 'no'} classes{captions}"

    @property
    def num_trained(self) -> int:
        """The number of training entries."""
        return self.count - self.num_held_out

    @property
    def text_shape(self) -> dict[str, int | None] | None:
        """The shape of the captions, as `models.TextShape` takes it; None: there are none."""
        if (text := self.text) is None:
            return None
        vocab_size = len(text["words"]) if "words" in text else None
        sizes = {"num_tokens": text["num_tokens"], "vocab_size": vocab_size}
        return sizes | {"num_features": text.get("num_features")}

    @property
    def input_size(self) -> int:
        return self.shape[1]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of latents.npy: (count, C, H, W), or (count, 2, C, H, W) with hflip."""
        return (self.count, *((2,) if self.hflip else ()), *self.shape)

    def arrays(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the type and shape of each array in the folder, by its key in FILES."""
        arrays = {"latents": (self.dtype, self.stored_shape)}
        if self.num_classes:
            arrays["labels"] = ("int64", (self.count,))
        if self.conditioning_type:
            arrays["masks"] = ("uint8", (self.count, *self.shape[1:]))
        if self.features:
            arrays["features"] = ("float16", (*self.stored_shape[:-3], *self.features["shape"]))
        if text := self.text:
            features = (text["num_features"],) if text.get("num_features") is not None else ()
            sizes = (self.count, text["num_captions"], text["num_tokens"], *features)
            arrays["text"] = ("float16" if features else "int16", sizes)
        return arrays

    def to_latents(self, stored: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """Convert stored latents (N, C', H, W) to the network's input (N, C, H, W) fp32; sample moments."""
        stored = stored.float()
        if self.kind == "moments":
            mean, logvar = stored.chunk(2, dim=1)
            eps = torch.randn(mean.shape, generator=generator, device=mean.device)
            stored = mean + (0.5 * logvar).exp() * eps
        return self._normalise(stored)

    def to_means(self, stored: torch.Tensor) -> torch.Tensor:
        """Convert stored latents to the network's input, with posterior means instead of samples."""
        stored = stored.float()
        return self._normalise(stored.chunk(2, dim=1)[0] if self.kind == "moments" else stored)

    def to_encoder(self, latents: torch.Tensor) -> torch.Tensor:
        """Undo scale and shift: convert the network's latents to the input of the decoder."""
        return latents / _column(self.scale, latents.device) + _column(self.shift, latents.device)

    def check_sizes(self, path: str, sizes: Mapping[str, int | None], text: Mapping | None = None) -> None:
        """Raise a ValueError unless the data have the sizes, by name, that a run expects (None: any)."""
        if text is not None and text != self.text_shape:
            stored, other = _text_words(self.text_shape), "set another data.path, or encode other captions"
            raise ValueError(f"data.text: {_text_words(text)} are expected, but {path} has {stored}: {other}")
        for key, size in sizes.items():
            if size is not None and getattr(self, key) != size:
                rule = f"must be {getattr(self, key)}, as in {path}/{FILES['manifest']}"
                others = "set another data.path for other sizes; data=latents reads them from the manifest"
                raise ValueError(f"data.{key}={size} {rule} ({others})")

    def std_warning(self, std: torch.Tensor) -> str | None:
        """Return a warning if the standard deviation of the network's input is far from the expected one."""
        if self.std is None or self.std / FAR_STD < (std := std.item()) < self.std * FAR_STD:
            return None
        factors = self.scale if isinstance(self.scale, tuple) else (self.scale,)
        fitting = ", ".join(f"{factor * self.std / std:.4g}" for factor in factors if std) or "another value"
        return (
            f"warning: the network's input has a standard deviation of {std:.3g}, the manifest expects "
            f"{self.std:g}. If these are the right latents, set scale to {fitting} in manifest.json"
        )

    def _normalise(self, raw: torch.Tensor) -> torch.Tensor:
        return (raw - _column(self.shift, raw.device)) * _column(self.scale, raw.device)


def read_manifest(path: str | Path) -> LatentManifest:
    file = Path(path) / FILES["manifest"]
    if not file.is_file():
        raise FileNotFoundError(
            f"data.path={path} must be a latent folder, but {file} does not exist: make one with `python -m "
            "data.encode` from images, or `python -m data.convert` from other formats (data/README.md)"
        )
    return manifest_from(read_json(file), str(file))


def manifest_from(fields: dict[str, Any], name: str) -> LatentManifest:
    with as_value_error(f"{name} is not a latent manifest", ValueError, TypeError, KeyError, AttributeError):
        lists = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
        return LatentManifest(**{**fields, **lists})


def drawn_manifest(
    stored: np.ndarray, num_classes: int, num_held_out: int, std: float | None = None
) -> LatentManifest:
    """Describe latents (N, C, H, W) fp32 that are drawn in memory."""
    numbers = (len(stored), stored.shape[1:], "float32", "samples", num_classes)
    return LatentManifest(*numbers, encoder="identity", std=std, num_held_out=num_held_out)


def untrained_classes_of(labels: np.ndarray | None, num_classes: int) -> tuple[int, ...]:
    """List the classes that do not occur in `labels`, ascending."""
    if labels is None:
        return ()
    return tuple(np.flatnonzero(np.bincount(labels, minlength=num_classes) == 0).tolist())


def _text_words(shape: Mapping[str, Any] | None) -> str:
    """Describe the shape of captions."""
    if shape is None:
        return "no captions"
    size = shape.get("vocab_size")
    kind = f"a vocabulary of {size} words" if size else f"embeddings of {shape.get('num_features')} numbers"
    return f"captions of {shape.get('num_tokens')} tokens ({kind})"


def first_classes(manifest: LatentManifest) -> str:
    """Format the number of classes, and the first classes with their names."""
    if not manifest.num_classes:
        return "none"
    names = [str(i) if name == str(i) else f"{i} {name}" for i, name in enumerate(manifest.class_names or ())]
    return str(manifest.num_classes) + (f": {_first(names)}" if names else ", without names")


def class_warnings(manifest: LatentManifest) -> list[str]:
    """Warn about names that are numbers of other classes, and about classes without training images."""
    warnings, names = [], manifest.class_names or ()
    moved = [f"class {i} is {name}" for i, name in enumerate(names) if name.isdecimal() and int(name) != i]
    if moved:
        warnings.append(f"{_first(moved)}: names are sorted as text, 10 before 2 (02 sorts before 10)")
    if untrained := manifest.untrained_classes:
        classes = f"{len(untrained)} of {manifest.num_classes} classes have no images to train on"
        warnings.append(f"{classes} and are never sampled: {_first([*map(str, untrained)])}")
    return warnings


def _first(parts: list[str]) -> str:
    return ", ".join(parts[:NAMES_SHOWN]) + (", ..." if parts[NAMES_SHOWN:] else "")


def _text_rule(text: Any) -> str | None:
    """Return the rule that the description of captions breaks; None: it is valid."""
    if not isinstance(text, dict) or not isinstance(text.get("encoder"), str):
        return "the name of its encoder"
    size = "words" if text["encoder"] == "words" else "num_features"
    if not all(_is_count(text.get(key)) for key in {"num_tokens", "num_captions", size} - {"words"}):
        return f"num_tokens, num_captions and {size}"
    if text["num_tokens"] > MAX_TEXT_TOKENS or text.get("num_features", 1) > MAX_NUMBERS // MAX_TEXT_TOKENS:
        return f"at most {MAX_TEXT_TOKENS} tokens, of at most 2^17 numbers"
    if ("words" in text) != (size == "words") or (size != "words" and not text.get("weights_hash")):
        return "words if its encoder is `words`, else num_features and weights_hash"
    limits = {"prompts": MAX_PROMPTS, "words": MAX_WORDS}
    for key, most in limits.items():
        texts = text.get(key, ["-"] if key == "words" else None)
        is_list = isinstance(texts, list) and 0 < len(texts) <= most
        if not is_list or not all(isinstance(x, str) and len(x) <= MAX_LETTERS for x in texts):
            return f"1 to {most} {key} of at most {MAX_LETTERS} letters"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_SCALE


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


@lru_cache
def _column(value: Numbers, device: torch.device) -> float | torch.Tensor:
    """Return numbers that broadcast to (N, C, H, W). Cached, since a copy to the device synchronizes."""
    return torch.tensor(value, device=device).view(-1, 1, 1) if isinstance(value, tuple) else value
