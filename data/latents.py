"""The latent folder: memory-mapped latents or posterior moments, labels, masks, and a manifest that explains them.

The format is written down in data/README.md. What a network sees is z = (latent - shift) * scale, applied once, from the
manifest alone; moments (mean and log-variance of a Gaussian posterior) are sampled anew each time.

Shapes: N samples, C channels, H = W.
"""

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

FORMAT_VERSION = 1
KINDS = ("samples", "moments")
DTYPES = ("float16", "float32")
CONDITIONING_TYPES = (None, "mask", "segmentation")
NUM_FINGERPRINT_ENTRIES = 64
HELD_OUT_SEED = 0
FILES = {"manifest": "manifest.json", "latents": "latents.npy", "labels": "labels.npy", "masks": "masks.npy"}


@dataclass(frozen=True)
class LatentManifest:
    """What a latent folder holds.

    Args:
        shape: (C, H, W) of a stored entry; C is twice the latent's channels where `kind` is `moments`.
        kind: `samples`, or `moments`: mean, then log-variance, along the channels.
        num_classes: 0 for data without classes.
        encoder: which encoder made the latents.
        encoder_hash: hash of its weights; None for an encoder without weights.
        scale, shift: the network sees (latent - shift) * scale.
        num_held_out: this many entries, the same for everyone, are never trained on.
        conditioning_type: None without masks; `mask`: bytes 0..255 weight the loss of each position from 0 to 1;
            `segmentation`: every byte other than 0 weights it 1.
    """

    count: int
    shape: tuple[int, int, int]
    dtype: str
    kind: str
    num_classes: int
    encoder: str
    encoder_hash: str | None = None
    scale: float = 1.0
    shift: float = 0.0
    num_held_out: int = 0
    conditioning_type: str | None = None
    format_version: int = FORMAT_VERSION

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind} must be one of {', '.join(KINDS)}")
        if self.format_version != FORMAT_VERSION:
            raise ValueError(f"format_version={self.format_version} must be {FORMAT_VERSION}")
        if len(self.shape) != 3 or self.shape[1] != self.shape[2]:
            raise ValueError(f"shape={tuple(self.shape)} must be (channels, size, size)")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype} must be one of {', '.join(DTYPES)}")
        if not isinstance(self.scale, int | float) or not isinstance(self.shift, int | float) or self.scale == 0:
            raise ValueError(f"scale={self.scale!r} and shift={self.shift!r} must be numbers, scale other than 0")
        if self.conditioning_type not in CONDITIONING_TYPES:
            raise ValueError(f"conditioning_type={self.conditioning_type} must be null, mask or segmentation")
        if not 0 <= self.num_held_out < self.count:
            raise ValueError(f"num_held_out={self.num_held_out} must be in [0, {self.count - 1}]")
        if self.kind == "moments" and self.shape[0] % 2:
            raise ValueError(f"shape={tuple(self.shape)} must have an even number of channels for kind=moments")

    @property
    def in_channels(self) -> int:
        return self.shape[0] // 2 if self.kind == "moments" else self.shape[0]

    @property
    def input_size(self) -> int:
        return self.shape[1]

    def to_latents(self, stored: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """Turn stored entries (N, C', H, W) into what a network sees, (N, C, H, W) in fp32."""
        stored = stored.float()
        if self.kind == "moments":
            mean, logvar = stored.chunk(2, dim=1)
            eps = torch.randn(mean.shape, generator=generator, device=mean.device)
            stored = mean + (0.5 * logvar).exp() * eps
        return (stored - self.shift) * self.scale

    def to_encoder(self, latents: torch.Tensor) -> torch.Tensor:
        """Undo scale and shift: what the encoder's decoder takes."""
        return latents / self.scale + self.shift


class LatentDataset:
    """Latents, labels and masks, read by index, with a fixed part held out."""

    def __init__(
        self, stored: np.ndarray, labels: np.ndarray | None, manifest: LatentManifest, masks: np.ndarray | None = None
    ):
        self.stored, self.labels, self.masks, self.manifest = stored, labels, masks, manifest
        order = np.random.default_rng(HELD_OUT_SEED).permutation(manifest.count)
        self.held_out_ids = np.sort(order[: manifest.num_held_out])
        self.train_ids = np.sort(order[manifest.num_held_out :])

    def read(self, ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the stored entries (N, C', H, W) and labels (N,) int64 of entries `ids` of the folder."""
        labels = None if self.labels is None else torch.from_numpy(self.labels[ids])
        return torch.from_numpy(_read_in_order(self.stored, ids)), labels

    def read_masks(self, ids: np.ndarray) -> torch.Tensor:
        """Return the weight of each position of entries `ids`, (N, H, W) fp32 in [0, 1]."""
        masks = torch.from_numpy(_read_in_order(self.masks, ids))
        return (masks > 0).float() if self.manifest.conditioning_type == "segmentation" else masks.float() / 255

    def __getstate__(self) -> dict[str, Any]:
        # A memory map would be pickled as the whole array; a worker process opens the file instead.
        files = {key: Path(value.filename) for key, value in self.__dict__.items() if isinstance(value, np.memmap)}
        return {**self.__dict__, **files}

    def __setstate__(self, state: dict[str, Any]) -> None:
        files = {key: value for key, value in state.items() if isinstance(value, Path)}
        opened = {key: np.load(file, mmap_mode="r", allow_pickle=False) for key, file in files.items()}
        self.__dict__.update({**state, **opened})

    def describe(self) -> dict[str, Any]:
        """Return the manifest, and a fingerprint that runs on the same data share: of manifest, labels and some entries."""
        manifest = asdict(self.manifest)
        digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode())
        if self.labels is not None:
            digest.update(self.labels.tobytes())
        ids = np.unique(np.linspace(0, self.manifest.count - 1, NUM_FINGERPRINT_ENTRIES).astype(int))
        digest.update(self.stored[ids].tobytes())
        if self.masks is not None:
            digest.update(self.masks[ids].tobytes())
        return {"fingerprint": digest.hexdigest(), "manifest": manifest}


class LatentWriter:
    """Write a latent folder beside its place and move it there when it is whole.

    Use as a context manager and call `append` until `manifest.count` entries are written.

    Raises:
        FileExistsError: there is something at `path` already.
        ValueError: entries of another shape, labels outside the classes, masks that are missing or not wanted, or another
            count than the manifest's.
    """

    def __init__(self, path: str | Path, manifest: LatentManifest):
        self.path, self.manifest = Path(path), manifest
        if self.path.exists():
            raise FileExistsError(f"{self.path} exists: move it away to write it anew")
        self.partial = self.path.with_name(f".{self.path.name}.{os.getpid()}.partial")
        self.num_written = 0

    def __enter__(self) -> "LatentWriter":
        self.partial.mkdir(parents=True)
        shape = (self.manifest.count, *self.manifest.shape)
        self.stored = np.lib.format.open_memmap(
            self.partial / FILES["latents"], mode="w+", dtype=self.manifest.dtype, shape=shape
        )
        self.labels = np.empty(self.manifest.count, dtype=np.int64)
        if self.manifest.conditioning_type:
            self.masks = np.lib.format.open_memmap(
                self.partial / FILES["masks"], mode="w+", dtype=np.uint8, shape=(shape[0], *shape[2:])
            )
        return self

    def append(self, stored: np.ndarray, labels: np.ndarray | None, masks: np.ndarray | None = None) -> None:
        """Add entries (N, C', H, W), their labels (N,), and their masks (N, H, W) uint8 where the manifest has masks."""
        end = self.num_written + len(stored)
        if stored.shape[1:] != self.manifest.shape or end > self.manifest.count:
            raise ValueError(
                f"{self.path}: entries {self.num_written}..{end - 1} of shape {stored.shape[1:]} "
                f"must be of shape {self.manifest.shape} and at most {self.manifest.count} in all"
            )
        if self.manifest.num_classes:
            if labels is None or labels.shape != (len(stored),):
                raise ValueError(f"{self.path}: {len(stored)} entries must come with as many labels")
            _check_labels(labels, self.manifest.num_classes, self.path)
            self.labels[self.num_written : end] = labels
        expected = (len(stored), *stored.shape[2:]) if self.manifest.conditioning_type else None
        if (None if masks is None else masks.shape) != expected or (masks is not None and masks.dtype != np.uint8):
            given = "None" if masks is None else f"{masks.dtype} {masks.shape}"
            rule = f"uint8 {expected}" if expected else "None, or conditioning_type of the manifest be mask or segmentation"
            raise ValueError(f"{self.path}: masks={given} must be {rule}")
        if masks is not None:
            self.masks[self.num_written : end] = masks
        self.stored[self.num_written : end] = stored
        if not np.isfinite(self.stored[self.num_written : end]).all():
            raise ValueError(f"{self.path}: entries {self.num_written}..{end - 1} are not finite in {self.manifest.dtype}")
        self.num_written = end

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        try:
            if error_type is None:
                self._finish()
        finally:
            shutil.rmtree(self.partial, ignore_errors=True)

    def _finish(self) -> None:
        if self.num_written != self.manifest.count:
            raise ValueError(f"{self.path}: {self.num_written} entries written, the manifest promises {self.manifest.count}")
        self.stored.flush()
        if self.manifest.conditioning_type:
            self.masks.flush()
        if self.manifest.num_classes:
            np.save(self.partial / FILES["labels"], self.labels)
        (self.partial / FILES["manifest"]).write_text(json.dumps(asdict(self.manifest), indent=2) + "\n")
        for file in self.partial.iterdir():
            with file.open("rb") as f:
                os.fsync(f.fileno())
        self.partial.rename(self.path)


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
            "data/README.md states the format, data.LatentWriter writes it"
        )
    try:
        return manifest_from(json.loads(file.read_text()))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file} is not a latent manifest: {error}") from error


def manifest_from(fields: dict[str, Any]) -> LatentManifest:
    """Rebuild a manifest from what JSON keeps of it."""
    return LatentManifest(**{**fields, "shape": tuple(fields["shape"])})


def open_latents(path: str, input_size: int, in_channels: int, num_classes: int) -> LatentDataset:
    """Open a latent folder and check it against what the run expects.

    Raises:
        FileNotFoundError: the folder or one of its files is missing.
        ValueError: a file is truncated, contradicts the manifest, or holds another shape, count or class than expected.
    """
    manifest = read_manifest(path)
    for key, expected in (("input_size", input_size), ("in_channels", in_channels), ("num_classes", num_classes)):
        if getattr(manifest, key) != expected:
            raise ValueError(f"data.{key}={expected} must be {getattr(manifest, key)}, as in {path}/{FILES['manifest']}")
    folder = Path(path)
    stored = _open_array(folder / FILES["latents"], manifest.dtype, (manifest.count, *manifest.shape))
    labels = None
    if num_classes:
        labels = np.array(_open_array(folder / FILES["labels"], "int64", (manifest.count,)))
        _check_labels(labels, num_classes, folder / FILES["labels"])
    masks = None
    if manifest.conditioning_type:
        masks = _open_array(folder / FILES["masks"], "uint8", (manifest.count, *manifest.shape[1:]))
    return LatentDataset(stored, labels, manifest, masks)


def _read_in_order(array: np.ndarray, ids: np.ndarray) -> np.ndarray:
    order = np.argsort(ids)  # a memory map is read in the order of the file
    entries = np.empty((len(ids), *array.shape[1:]), dtype=array.dtype)
    entries[order] = array[ids[order]]
    return entries


def _open_array(file: Path, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: the latent folder is not whole")
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{file} is truncated or no .npy file: {error}") from error
    if array.dtype != np.dtype(dtype) or array.shape != shape:
        raise ValueError(f"{file} holds {array.dtype} {array.shape}, the manifest promises {dtype} {shape}")
    return array


def _check_labels(labels: np.ndarray, num_classes: int, file: Path) -> None:
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(wrong):
        raise ValueError(f"{file}: label {labels[wrong[0]]} at position {wrong[0]} must be in [0, {num_classes - 1}]")
