"""Latents in the formats of other codebases: readers, assumptions about them, and checks of these.

These files do not say how they were scaled, whether the second half of eight channels is a log-variance or a
standard deviation, or whether flips are among them. So each format comes with assumptions, which are printed
and checked against the numbers of a sample.

Shapes: N entries, C channels of the encoder's latents, C' = 2C for moments.
"""

import math
import os
import sys
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from data.images import Files
from data.listing import LABELS_FILE, read_labels
from data.manifest import FAR_STD, MAX_CLASSES, MAX_NUMBERS
from data.tars import DAMAGED, samples
from runtime.arrays import ZIP_ERRORS, load_stored, parse_array, read_array

STORED_AS = ("samples", "mean_logvar", "mean_std")
LOGVAR_RANGE = (-30.0, 20.0)  # as diffusers clamps it
MAX_MEAN = 0.75  # of a channel, in promised standard deviations
MOSTLY = 0.95
TAR_LATENT, TAR_END = "latent.npy", 1024
HFLIP_MARGIN = 0.2  # of correlations: chance gives less
SHARD_KEYS, STATISTICS_FILE = ("latents", "latents_flip", "labels"), "latents_stats.pt"  # LightningDiT
SD_VAE, SD_VAE_MSE = "stabilityai/sd-vae-ft-ema", "stabilityai/sd-vae-ft-mse"


@dataclass(frozen=True)
class Source:
    """An opened set of foreign latents."""

    count: int
    labels: np.ndarray | None  # (count,) int64
    at: Callable[[int], np.ndarray] | None = None  # gives one entry (C', H, W); None: they are read in order
    in_order: Callable[[], Iterator[np.ndarray]] | None = None  # gives all entries, where `at` is None
    told: Mapping[str, Any] = field(default_factory=dict)  # in place of assumptions of its Format

    def entries(self) -> Iterator[np.ndarray]:
        return map(self.at, range(self.count)) if self.at else self.in_order()


@dataclass(frozen=True)
class Format:
    """How a foreign format is read, and the assumptions about it; from `encoder` on, keys of the manifest."""

    open: Callable[[Path], Source]
    stored_as: str  # samples of the posterior, its mean and log-variance, or its mean and standard deviation
    scaled: bool = False  # scale and shift were applied before storing
    hflip: bool = False  # entry count/2 + i is the flip of entry i
    encoder: str = SD_VAE
    scale: float | tuple[float, ...] = 0.18215
    shift: float | tuple[float, ...] = 0.0
    std: float = 1.0
    pixel_range: tuple[float, float] = (-1.0, 1.0)

    def to_stored(self, entries: np.ndarray) -> np.ndarray:
        """Turn entries (N, C', H, W) into what a latent folder stores, fp32: unscaled, log-variances."""
        entries = entries.astype(np.float32)
        if self.stored_as == "samples":
            return entries / _column(self.scale) + _column(self.shift) if self.scaled else entries
        mean, spread = np.split(entries, 2, axis=1)
        with np.errstate(divide="ignore"):
            logvar = spread if self.stored_as == "mean_logvar" else 2 * np.log(spread)
        if self.scaled:
            mean = mean / _column(self.scale) + _column(self.shift)
            logvar = logvar - 2 * np.log(np.abs(_column(self.scale)))
        return np.concatenate([mean, logvar.clip(*LOGVAR_RANGE)], axis=1)

    def means(self, entries: np.ndarray) -> np.ndarray:
        """The samples, or the means of the moments, of entries (N, C', H, W), unscaled."""
        stored = self.to_stored(entries)
        return stored if self.stored_as == "samples" else np.split(stored, 2, axis=1)[0]


def contradiction(chosen: Format, entries: np.ndarray) -> str | None:
    """Compare a sample of entries (N, C', H, W) with the assumptions; None: they agree."""
    if entries.dtype.kind not in "fiu":
        return f"they are {entries.dtype}, not numbers"
    if not np.isfinite(entries).all():
        return "there are values that are not finite"
    if wrong := _moments_contradiction(chosen.stored_as, entries):
        return wrong
    seen = (chosen.means(entries) - _column(chosen.shift)) * _column(chosen.scale)  # by the network
    std, means = float(seen.std()), seen.mean(axis=(0, 2, 3))
    if not chosen.std / FAR_STD < std < chosen.std * FAR_STD:
        other = f"scaled={str(not chosen.scaled).lower()}, or another scale?"
        return f"the network would see a standard deviation of {std:.3g}, not {chosen.std:g}: {other}"
    far = np.flatnonzero(np.abs(means) > MAX_MEAN * chosen.std)
    if len(far):
        where = f"a mean of {means[far[0]]:.3g} in channel {far[0]}, of standard deviation {std:.3g}"
        return f"the network would see {where}: another encoder, or another range of pixels?"
    return None


def hflip_contradiction(first: np.ndarray, second: np.ndarray) -> str | None:
    """Check that `second` (N, C, H, W) are the flips of `first`; None: they are."""
    flipped, plain = _correlation(first[..., ::-1], second), _correlation(first, second)
    unrelated = _correlation(np.roll(first, 1, axis=0)[..., ::-1], second)
    if flipped > max(plain, unrelated) + HFLIP_MARGIN:
        return None
    found = f"correlation {flipped:.2f} with flipped latents of the first half, {plain:.2f} unflipped"
    return f"the second half is not flips ({found}, {unrelated:.2f} with others): hflip=false"


def _moments_contradiction(stored_as: str, entries: np.ndarray) -> str | None:
    if entries.shape[1] % 2:
        odd = f"{entries.shape[1]} channels are not two halves: stored_as=samples"
        return None if stored_as == "samples" else odd
    negative = (np.split(entries, 2, axis=1)[1] < 0).mean()
    # Standard deviations are never negative, log-variances of good autoencoders nearly always.
    is_logvar = negative >= MOSTLY if stored_as == "samples" else negative > 0
    likely = "mean_logvar" if is_logvar else stored_as if negative else "mean_std"
    if likely == stored_as:
        return None
    return f"{negative:.1%} of the second half of the channels is negative: stored_as={likely}"


def open_tars(path: Path) -> Source:
    """Open tars, or one, of KEY.latent.npy, a latent, and KEY.cls, its class in decimal."""
    tars = sorted(path.glob("*.tar")) if path.is_dir() else [path]
    bar = tqdm(tars, desc="read classes", unit="tar")
    classes = [_number(sample["cls"], f"{name}.cls") for tar in bar for name, sample in _samples(tar)]

    def entries() -> Iterator[np.ndarray]:
        for tar in tars:
            for name, sample in _samples(tar):
                try:
                    yield parse_array(sample[TAR_LATENT])
                except ValueError as error:
                    raise ValueError(f"{name}: its .{TAR_LATENT} cannot be read: {error}") from error

    return Source(len(classes), np.array(classes, dtype=np.int64), in_order=entries)


def _samples(tar: Path) -> Iterator[tuple[str, dict[str, bytes]]]:
    try:
        with tar.open("rb") as file:
            for key, sample in samples(file, 4 * MAX_NUMBERS):
                if sample.keys().isdisjoint({TAR_LATENT, "cls"}):
                    continue
                if not sample.keys() >= {TAR_LATENT, "cls"}:
                    raise ValueError(f"{key} must hold both .{TAR_LATENT} and .cls, side by side")
                yield f"{tar}: {key}", sample
            file.seek(-TAR_END, os.SEEK_END)
            if any(file.read()):
                raise ValueError(f"it is cut off, an archive ends with {TAR_END} zeros")
    except (OSError, MemoryError, *DAMAGED) as error:
        raise ValueError(f"{tar} is damaged: {error}") from error


def open_lmdb(path: Path) -> Source:
    """Open the LMDB of MaskDiT: `z-I` (8 channels of float32), `y-I` (the class in decimal), and `length`."""
    import lmdb

    try:
        environment = lmdb.open(str(path), readonly=True, lock=False, readahead=False, subdir=path.is_dir())
        transaction = environment.begin()
    except lmdb.Error as error:
        raise ValueError(f"source={path} is not an LMDB, the folder with data.mdb: {error}") from error
    size = (path / "data.mdb" if path.is_dir() else path).stat().st_size
    needed = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    if size < needed:  # to read pages beyond its end would kill the process
        raise ValueError(f"source={path} is cut off: it has {size} of {needed} bytes")

    def value(key: str) -> bytes:
        try:
            return transaction.get(key.encode(), default=b"")
        except lmdb.Error as error:
            raise ValueError(f"source={path} is damaged: entry {key} cannot be read: {error}") from error

    count = _number(value("length"), f"source={path}: length", sys.maxsize)
    classes = [_number(value(f"y-{i}"), f"source={path}: y-{i}") for i in range(count)]

    def at(i: int) -> np.ndarray:
        numbers = np.frombuffer(value(f"z-{i}"), dtype=np.float32)
        side = math.isqrt(len(numbers) // 8)
        if not side or len(numbers) != 8 * side * side:
            rule = "must be 8 channels of a square"
            raise ValueError(f"source={path}: z-{i} has {len(numbers)} numbers, {rule}")
        return numbers.reshape(8, side, side)

    return Source(count, np.array(classes, dtype=np.int64), at)


def open_npy_zip(path: Path) -> Source:
    """Open a zip, or a folder, of .npy files and dataset.json, as the tools of EDM2 and REPA write them."""
    files = Files(path, "source=")
    names = [name for name in files.names if name.endswith(".npy")]
    if LABELS_FILE not in files.names:
        raise ValueError(f"source={path} has no {LABELS_FILE}, which gives the labels")

    def at(i: int) -> np.ndarray:
        try:
            with files.open(names[i]) as file:
                return read_array(file, files.size(names[i]))
        except ZIP_ERRORS as error:
            raise ValueError(f"source={path}: {names[i]} cannot be read: {error}") from error

    return Source(len(names), read_labels(files, names), at)


def open_safetensors(path: Path) -> Source:
    """Open a folder of LightningDiT: .safetensors files with `latents`, `latents_flip` and `labels`, and the
    mean and standard deviation of each channel in latents_stats.pt.
    """
    opened, labels = [], []
    for file in sorted(path.glob("*.safetensors")):
        try:
            tensors = safe_open(file, "pt")
            counts = [tensors.get_slice(key).get_shape()[0] for key in SHARD_KEYS]
            labels.append(tensors.get_tensor("labels").numpy())
        except (SafetensorError, IndexError) as error:
            rule = f"is damaged, or lacks one of {', '.join(SHARD_KEYS)}"
            raise ValueError(f"{file} {rule}: {error}") from error
        if len(set(counts)) > 1:
            raise ValueError(f"{file} has {counts} entries of {', '.join(SHARD_KEYS)}: must be equal")
        opened.append(tensors)
    if not opened:
        raise ValueError(f"source={path} holds no .safetensors files")
    starts = list(accumulate(map(len, labels), initial=0))
    half = starts[-1]

    def at(i: int) -> np.ndarray:
        is_flip, i = divmod(i, half)
        j = bisect(starts, i) - 1
        entries = opened[j].get_slice(SHARD_KEYS[is_flip])
        return entries[i - starts[j] : i - starts[j] + 1][0].float().numpy()

    statistics = path / STATISTICS_FILE
    found = load_stored(statistics)
    try:
        mean, std = (tuple(found[key].double().flatten().tolist()) for key in ("mean", "std"))
        told = {"shift": mean, "scale": tuple(1 / each for each in std)}  # the manifest checks the numbers
    except Exception as error:  # whatever it holds instead
        raise ValueError(f"{statistics} is damaged, or does not hold the tensors mean and std") from error
    return Source(2 * half, np.concatenate([*labels, *labels]).astype(np.int64), at, told=told)


def _number(data: bytes, name: str, bound: int = MAX_CLASSES) -> int:
    if not data.strip().isdigit() or int(data) >= bound:
        raise ValueError(f"{name} is {data[:20]!r}, must be a number 0, 1, ..., less than {bound}")
    return int(data)


def _correlation(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.mean([np.corrcoef(a.ravel(), b.ravel())[0, 1] for a, b in zip(one, other, strict=True)]))


def _column(value: float | tuple[float, ...]) -> np.ndarray:
    return np.asarray(value, dtype=np.float32).reshape(-1, 1, 1)


FORMATS = {
    "tread_wds": Format(open_tars, "samples", scaled=True),
    "maskdit_lmdb": Format(open_lmdb, "mean_logvar", hflip=True),
    "repa": Format(open_npy_zip, "mean_std", encoder=SD_VAE_MSE),
    "lightningdit": Format(
        open_safetensors, "samples", hflip=True, encoder="hustvl/vavae-imagenet256-f16d32-dinov2"
    ),
    "edm2": Format(
        open_npy_zip,
        "mean_std",
        encoder=SD_VAE_MSE,
        # [EDM2]: each channel is brought to mean 0 and standard deviation 0.5.
        scale=tuple(0.5 / std for std in (4.17, 4.62, 3.71, 3.28)),
        shift=(5.81, 3.25, 0.12, -2.15),
        std=0.5,
        pixel_range=(0.0, 1.0),
    ),
}
