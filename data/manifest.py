"""What a latent folder holds and what it means: one file that explains the arrays beside it. data/README.md
has the table.
"""

import json
import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from runtime.files import MAX_JSON_BYTES, parse_json, read_bounded

FORMAT_VERSION = 1
KINDS = ("samples", "moments")
DTYPES = ("float16", "float32")
CONDITIONING_TYPES = (None, "mask", "segmentation")
BLOCK_BYTES = 2**26
MAX_CLASSES = 1_000_000  # beyond it a label is a mistake
MAX_NUMBERS = 2**26  # of one entry: 4 channels of 4096x4096
MAX_BLOCK_BYTES = 2**40
LARGEST_NUMBER = 1e18  # beyond it a scale is a mistake
FAR_STD = 1.8  # data sets differ by less, a scale that was forgotten or applied twice by much more
FILES = {"manifest": "manifest.json", "latents": "latents.npy", "labels": "labels.npy", "masks": "masks.npy"}

Numbers = float | tuple[float, ...]


@dataclass(frozen=True)
class LatentManifest:
    """What a latent folder holds.

    Args:
        shape: (C, H, W) of the latents of one image as they are stored; C is twice the latent's channels for
            `moments`.
        kind: `samples`, or `moments`: mean, then log-variance, along the channels.
        num_classes: 0 for data without classes.
        encoder: which encoder made the latents: `identity`, a folder, or OWNER/NAME of a public autoencoder.
        encoder_hash: hash of its weights; None for an encoder without weights, or where it is not known.
        pixel_range: what black and white were for the encoder.
        scale, shift: the network sees (latent - shift) * scale; numbers, or one for each channel.
        std: the standard deviation that scale promises of what the network sees; None promises nothing.
        hflip: each entry holds the image and, at index 1, its flip, encoded for itself.
        resolution: side of the images in pixels.
        class_names: one for each class, in the order of the labels.
        num_held_out: this many entries, the same for everyone, are never trained on.
        conditioning_type: None without masks; `mask`: bytes 0..255 weight the loss of each position from 0 to
            1; `segmentation`: every byte other than 0 weights it 1.
        origin: how the latents were made, for people.
        block_bytes, checksums: SHA-256 of each block of so many bytes of each file, by the file's name.

    Raises:
        ValueError: with the key, the value and the rule.
    """

    count: int
    shape: tuple[int, int, int]
    dtype: str
    kind: str
    num_classes: int
    encoder: str
    encoder_hash: str | None = None
    pixel_range: tuple[float, float] = (-1.0, 1.0)
    scale: Numbers = 1.0
    shift: Numbers = 0.0
    std: float | None = None
    hflip: bool = False
    resolution: int | None = None
    class_names: tuple[str, ...] | None = None
    num_held_out: int = 0
    conditioning_type: str | None = None
    origin: dict[str, Any] | None = None
    block_bytes: int = BLOCK_BYTES
    checksums: dict[str, list[str]] | None = None
    format_version: int = FORMAT_VERSION

    def __post_init__(self):
        self._check_arrays()
        self._check_meaning()

    def _check_arrays(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind} must be one of {', '.join(KINDS)}")
        if self.format_version != FORMAT_VERSION:
            raise ValueError(f"format_version={self.format_version} must be {FORMAT_VERSION}")
        if (
            len(self.shape) != 3
            or self.shape[1] != self.shape[2]
            or not all(_is_count(n) for n in self.shape)
        ):
            raise ValueError(f"shape={tuple(self.shape)} must be (channels, size, size)")
        if math.prod(self.shape) > MAX_NUMBERS:
            raise ValueError(f"shape={tuple(self.shape)} must be of at most {MAX_NUMBERS} numbers")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype} must be one of {', '.join(DTYPES)}")
        if self.kind == "moments" and self.shape[0] % 2:
            raise ValueError(
                f"shape={tuple(self.shape)} must have an even number of channels for kind=moments"
            )
        if (
            not _is_count(self.count)
            or not isinstance(self.num_held_out, int)
            or not 0 <= self.num_held_out < self.count
        ):
            raise ValueError(
                f"num_held_out={self.num_held_out} must be in [0, {self.count - 1}], of count={self.count}"
            )
        if not isinstance(self.hflip, bool):
            raise ValueError(f"hflip={self.hflip!r} must be true or false")
        if self.conditioning_type not in CONDITIONING_TYPES:
            raise ValueError(f"conditioning_type={self.conditioning_type} must be null, mask or segmentation")
        if not _is_count(self.block_bytes) or self.block_bytes > MAX_BLOCK_BYTES:
            raise ValueError(
                f"block_bytes={self.block_bytes} must be greater than 0, and at most {MAX_BLOCK_BYTES}"
            )
        if self.checksums is not None and not all(
            isinstance(hashes, list) for hashes in self.checksums.values()
        ):
            raise ValueError("checksums must be null, or a list of hashes for each file")
        outside = [name for name in self.checksums or () if name == ".." or Path(name).name != name]
        if outside:
            raise ValueError(f"checksums are of {outside[0]!r}, must be of files in the folder itself")

    def _check_meaning(self) -> None:
        if not isinstance(self.encoder, str) or not isinstance(self.encoder_hash, str | None):
            raise ValueError(
                f"encoder={self.encoder!r} must be a name, encoder_hash={self.encoder_hash!r} a hash or null"
            )
        if self.resolution is not None and not _is_count(self.resolution):
            raise ValueError(f"resolution={self.resolution!r} must be greater than 0, or null")
        for key in ("scale", "shift"):
            value = getattr(self, key)
            numbers = value if isinstance(value, tuple) else (value,)
            if len(numbers) not in (1, self.in_channels) or not all(
                _is_number(n) and (n or key != "scale") for n in numbers
            ):
                zero = ", other than 0" if key == "scale" else ""
                raise ValueError(
                    f"{key}={value!r} must be a number{zero}, or one for each of {self.in_channels} channels"
                )
        if (
            len(self.pixel_range) != 2
            or not all(map(_is_number, self.pixel_range))
            or self.pixel_range[0] == self.pixel_range[1]
        ):
            raise ValueError(
                f"pixel_range={self.pixel_range} must be two numbers: what black is, and what white is"
            )
        if self.std is not None and not (_is_number(self.std) and self.std > 0):
            raise ValueError(f"std={self.std!r} must be a number greater than 0, or null")
        if not isinstance(self.num_classes, int) or not 0 <= self.num_classes <= MAX_CLASSES:
            raise ValueError(f"num_classes={self.num_classes!r} must be in [0, {MAX_CLASSES}]")
        if self.class_names is not None and len(self.class_names) != self.num_classes:
            raise ValueError(
                f"class_names has {len(self.class_names)} names, must be num_classes={self.num_classes}"
            )

    @property
    def in_channels(self) -> int:
        return self.shape[0] // 2 if self.kind == "moments" else self.shape[0]

    @property
    def input_size(self) -> int:
        return self.shape[1]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the array of latents: (count, C, H, W), or (count, 2, C, H, W) with hflip."""
        return (self.count, *((2,) if self.hflip else ()), *self.shape)

    def to_latents(self, stored: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """Turn stored latents (N, C', H, W) into what a network sees, (N, C, H, W) in fp32; moments are
        sampled.
        """
        stored = stored.float()
        if self.kind == "moments":
            mean, logvar = stored.chunk(2, dim=1)
            eps = torch.randn(mean.shape, generator=generator, device=mean.device)
            stored = mean + (0.5 * logvar).exp() * eps
        return self._normalise(stored)

    def to_means(self, stored: torch.Tensor) -> torch.Tensor:
        """The same, with the mean of a posterior in place of a sample of it."""
        stored = stored.float()
        return self._normalise(stored.chunk(2, dim=1)[0] if self.kind == "moments" else stored)

    def to_encoder(self, latents: torch.Tensor) -> torch.Tensor:
        """Undo scale and shift: what the encoder's decoder takes."""
        return latents / _column(self.scale, latents.device) + _column(self.shift, latents.device)

    def check_sizes(self, path: str, *, input_size: int, in_channels: int, num_classes: int) -> None:
        """Raise a ValueError unless a run that expects these sizes can use what lies at a path."""
        for key, expected in (
            ("input_size", input_size),
            ("in_channels", in_channels),
            ("num_classes", num_classes),
        ):
            if getattr(self, key) != expected:
                raise ValueError(
                    f"data.{key}={expected} must be {getattr(self, key)}, as in {path}/{FILES['manifest']}"
                )

    def std_warning(self, std: torch.Tensor) -> str | None:
        """Say so where the standard deviation of what the network sees is far from the promised one."""
        if self.std is None or self.std / FAR_STD < (std := std.item()) < self.std * FAR_STD:
            return None
        return (
            f"warning: what the network sees has a standard deviation of {std:.3g}, the manifest promises "
            f"{self.std:g}. "
            f"If these are the right latents, {self._fitting(std)} in manifest.json keeps the promise"
        )

    def _fitting(self, std: float) -> str:
        factors = self.scale if isinstance(self.scale, tuple) else (self.scale,)
        return (
            "scale " + ", ".join(f"{factor * self.std / std:.4g}" for factor in factors)
            if std
            else "another scale"
        )

    def _normalise(self, raw: torch.Tensor) -> torch.Tensor:
        return (raw - _column(self.shift, raw.device)) * _column(self.scale, raw.device)


def read_manifest(path: str | Path) -> LatentManifest:
    """Read the manifest of a latent folder.

    Raises:
        FileNotFoundError: there is no such folder, or it holds no manifest.
        ValueError: the manifest is not one.
    """
    file = Path(path) / FILES["manifest"]
    if not file.is_file():
        raise FileNotFoundError(
            f"data.path={path} must be a latent folder, but {file} is not there: "
            "`python -m data.encode` makes one of images, `python -m data.convert` of other formats "
            "(data/README.md)"
        )
    try:
        with file.open("rb") as opened:
            text = read_bounded(opened, MAX_JSON_BYTES)
    except ValueError as error:
        raise ValueError(f"{file} is not a latent manifest: {error}") from error
    return parse_manifest(text, str(file))


def parse_manifest(text: bytes, name: str) -> LatentManifest:
    """Read a manifest from the content of its file.

    Raises:
        ValueError: it is none; the name says which.
    """
    try:
        fields = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not a latent manifest: {error}") from error
    return manifest_from(fields, name)


def manifest_from(fields: dict[str, Any], name: str) -> LatentManifest:
    """Rebuild a manifest from what JSON keeps of it.

    Raises:
        ValueError: it is none; the name says which.
    """
    try:
        lists = {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
        return LatentManifest(**{**fields, **lists})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{name} is not a latent manifest: {error}") from error


def to_json(manifest: LatentManifest) -> str:
    """Return the text of a manifest's file."""
    return json.dumps(asdict(manifest), indent=2) + "\n"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_NUMBER


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


@lru_cache
def _column(value: Numbers, device: torch.device) -> float | torch.Tensor:
    """Return numbers in a form that meets (N, C, H, W); kept, since copying them to a device would make it
    wait.
    """
    return torch.tensor(value, device=device).view(-1, 1, 1) if isinstance(value, tuple) else value
