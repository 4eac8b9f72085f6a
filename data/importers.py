"""Read latents in the formats of other codebases, and check the assumptions about them.

Shapes: N entries, C channels of the encoder's latents, C' = 2C for moments.
"""

import math
import sys
from bisect import bisect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from data.encoders import PUBLISHED
from data.images import Files
from data.listing import LABELS_FILE, read_labels
from data.manifest import FAR_STD, MAX_CLASSES
from data.tars import index_tars, read_at
from runtime.arrays import ZIP_ERRORS, load_stored, read_array
from runtime.errors import as_value_error

STORED_AS = ("samples", "mean_logvar", "mean_std")
LOGVAR_RANGE = (-30.0, 20.0)  # as diffusers clamps it
MAX_MEAN = 0.75  # of a channel, in expected standard deviations
MOSTLY_NEGATIVE = 0.95  # fraction of the log-variances
TAR_LATENT, TAR_LABEL = ".latent.npy", ".cls"
HFLIP_MARGIN = 0.2  # between correlations: chance differences are smaller
SHARD_KEYS, STATISTICS_FILE = ("latents", "latents_flip", "labels"), "latents_stats.pt"  # LightningDiT


@dataclass(frozen=True)
class Source:
    """An opened set of foreign latents."""

    count: int
    labels: np.ndarray | None  # (count,) int64
    read: Callable[[int], np.ndarray]  # reads one entry (C', H, W)
    stored: Mapping[str, Any] = field(default_factory=dict)  # values in the files that replace assumptions


@dataclass(frozen=True)
class Format:
    """A foreign format: its reader, and the assumptions about it. From `encoder` on, keys of the manifest."""

    open: Callable[[Path], Source]
    stored_as: str  # posterior samples, mean and log-variance, or mean and standard deviation
    scaled: bool = False  # scale and shift were applied before storing
    hflip: bool = False  # entry count/2 + i is the flip of entry i
    encoder: str = PUBLISHED["sd-vae-ft-ema"]
    scale: float | tuple[float, ...] = 0.18215
    shift: float | tuple[float, ...] = 0.0
    std: float = 1.0
    pixel_range: tuple[float, float] = (-1.0, 1.0)

    def to_stored(self, entries: np.ndarray) -> np.ndarray:
        """Convert entries (N, C', H, W) to a latent folder's: fp32, unscaled, log-variances."""
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
        """Return the samples, or the means of the moments, (N, C, H, W), unscaled."""
        stored = self.to_stored(entries)
        return stored if self.stored_as == "samples" else np.split(stored, 2, axis=1)[0]


def find_contradiction(foreign: Format, entries: np.ndarray) -> str | None:
    """Describe how a sample of entries (N, C', H, W) contradicts the assumptions. None: it does not."""
    if entries.dtype.kind not in "fiu":
        return f"the type is {entries.dtype}, must be numbers"
    if not np.isfinite(entries).all():
        return "some values are not finite"
    if contradiction := _find_moments_contradiction(foreign.stored_as, entries):
        return contradiction
    inputs = (foreign.means(entries) - _column(foreign.shift)) * _column(foreign.scale)  # of the network
    std, means = float(inputs.std()), inputs.mean(axis=(0, 2, 3))
    if not foreign.std / FAR_STD < std < foreign.std * FAR_STD:
        hint = f"try scaled={str(not foreign.scaled).lower()}, or another scale"
        return f"the network's input would have std {std:.3g}, not {foreign.std:g}: {hint}"
    far = np.flatnonzero(np.abs(means) > MAX_MEAN * foreign.std)
    if len(far):
        mean = f"mean {means[far[0]]:.3g} in channel {far[0]} and std {std:.3g}"
        return f"the network's input would have {mean}: another encoder, or another range of pixels?"
    return None


def find_hflip_contradiction(first: np.ndarray, second: np.ndarray) -> str | None:
    """Describe why `second` (N, C, H, W) are not the flips of `first`. None: they are."""
    flipped, plain = _correlation(first[..., ::-1], second), _correlation(first, second)
    unrelated = _correlation(np.roll(first, 1, axis=0)[..., ::-1], second)
    if flipped > max(plain, unrelated) + HFLIP_MARGIN:
        return None
    pair = f"correlation {flipped:.2f} with the flips of the first half, {plain:.2f} without flipping"
    return f"the second half holds no flips ({pair}, {unrelated:.2f} with other entries): set hflip=false"


def _find_moments_contradiction(stored_as: str, entries: np.ndarray) -> str | None:
    if entries.shape[1] % 2:
        odd = f"{entries.shape[1]} channels cannot be halved: set stored_as=samples"
        return None if stored_as == "samples" else odd
    negative = (np.split(entries, 2, axis=1)[1] < 0).mean()
    # Standard deviations are never negative. Log-variances of good autoencoders nearly always are.
    is_logvar = negative >= MOSTLY_NEGATIVE if stored_as == "samples" else negative > 0
    likely = "mean_logvar" if is_logvar else stored_as if negative else "mean_std"
    if likely == stored_as:
        return None
    return f"{negative:.1%} of the second half of the channels is negative: set stored_as={likely}"


def open_tars(path: Path) -> Source:
    """Open a tar or a folder of tars with KEY.latent.npy, a latent, and KEY.cls, its label in decimal."""
    files = index_tars(sorted(path.glob("*.tar")) if path.is_dir() else [path])
    parts = (TAR_LATENT, TAR_LABEL)
    keys = sorted({name.removesuffix(part) for name in files for part in parts if name.endswith(part)})
    if missing := [key + part for key in keys for part in parts if key + part not in files]:
        raise ValueError(f"{path} must have both parts of each entry: {missing[0]} is missing")

    def read(i: int) -> np.ndarray:
        name = keys[i] + TAR_LATENT
        with as_value_error(f"{files[name][0]}: {name} cannot be read"):
            return read_array(read_at(*files[name]), files[name][2])

    bar = tqdm([key + TAR_LABEL for key in keys], desc="read labels", unit="label")
    labels = [_parse_number(read_at(*files[name]).read(), f"{path}: {name}") for name in bar]
    return Source(len(labels), np.array(labels, dtype=np.int64), read)


def open_lmdb(path: Path) -> Source:
    """Open MaskDiT's LMDB: `z-I` (8 channels of float32), `y-I` (the label in decimal), and `length`."""
    import lmdb

    with as_value_error(f"source={path} must be an LMDB, a folder with data.mdb", lmdb.Error):
        environment = lmdb.open(str(path), readonly=True, lock=False, readahead=False, subdir=path.is_dir())
        transaction = environment.begin()
    size = (path / "data.mdb" if path.is_dir() else path).stat().st_size
    needed = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    if size < needed:  # reading pages beyond the end would kill the process
        raise ValueError(f"source={path} is truncated: it has {size} of {needed} bytes")

    def value(key: str) -> bytes:
        with as_value_error(f"source={path} is damaged: entry {key} cannot be read", lmdb.Error):
            return transaction.get(key.encode(), default=b"")

    count = _parse_number(value("length"), f"source={path}: length", sys.maxsize)
    labels = [_parse_number(value(f"y-{i}"), f"source={path}: y-{i}") for i in range(count)]

    def read(i: int) -> np.ndarray:
        numbers = np.frombuffer(value(f"z-{i}"), dtype=np.float32)
        side = math.isqrt(len(numbers) // 8)
        if not side or len(numbers) != 8 * side * side:
            raise ValueError(f"source={path}: z-{i} has {len(numbers)} numbers, must have 8 square channels")
        return numbers.reshape(8, side, side)

    return Source(count, np.array(labels, dtype=np.int64), read)


def open_npy_zip(path: Path) -> Source:
    """Open a zip or a folder of .npy files with dataset.json, as the tools of EDM2 and REPA write it."""
    files = Files(path, "source=")
    names = [name for name in files.names if name.endswith(".npy")]
    if LABELS_FILE not in files.names:
        raise ValueError(f"source={path} has no {LABELS_FILE} with the labels")

    def read(i: int) -> np.ndarray:
        what = f"source={path}: {names[i]} cannot be read"
        with as_value_error(what, *ZIP_ERRORS), files.open(names[i]) as file:
            return read_array(file, files.size(names[i]))

    return Source(len(names), read_labels(files, names), read)


def open_safetensors(path: Path) -> Source:
    """Open a folder of LightningDiT: .safetensors files with SHARD_KEYS, and statistics of the channels."""
    opened, labels = [], []
    for file in sorted(path.glob("*.safetensors")):
        try:
            tensors = safe_open(file, "pt")
            counts = [tensors.get_slice(key).get_shape()[0] for key in SHARD_KEYS]
            labels.append(tensors.get_tensor("labels").numpy())
        except (SafetensorError, IndexError) as error:
            rule = f"is damaged, or does not have all of {', '.join(SHARD_KEYS)}"
            raise ValueError(f"{file} {rule}: {error}") from error
        if len(set(counts)) > 1:
            raise ValueError(f"{file} has {counts} entries of {', '.join(SHARD_KEYS)}, must be equal")
        opened.append(tensors)
    if not opened:
        raise ValueError(f"source={path} has no .safetensors files")
    starts = list(accumulate(map(len, labels), initial=0))
    half = starts[-1]

    def read(i: int) -> np.ndarray:
        is_flip, i = divmod(i, half)
        j = bisect(starts, i) - 1
        entries = opened[j].get_slice(SHARD_KEYS[is_flip])
        return entries[i - starts[j] : i - starts[j] + 1][0].float().numpy()

    file = path / STATISTICS_FILE
    statistics = load_stored(file)
    try:
        means, stds = (tuple(statistics[key].double().flatten().tolist()) for key in ("mean", "std"))
        stored = {"shift": means, "scale": tuple(1 / std for std in stds)}  # the manifest checks the numbers
    except Exception as error:  # the file can hold anything
        raise ValueError(f"{file} is damaged, or has no tensors mean and std") from error
    return Source(2 * half, np.concatenate([*labels, *labels]).astype(np.int64), read, stored=stored)


def _parse_number(data: bytes, name: str, bound: int = MAX_CLASSES) -> int:
    if not data.strip().isdigit() or int(data) >= bound:
        raise ValueError(f"{name} is {data[:20]!r}, must be an integer in [0, {bound - 1}]")
    return int(data)


def _correlation(first: np.ndarray, second: np.ndarray) -> float:
    pairs = zip(first, second, strict=True)
    return float(np.mean([np.corrcoef(a.ravel(), b.ravel())[0, 1] for a, b in pairs]))


def _column(value: float | tuple[float, ...]) -> np.ndarray:
    return np.asarray(value, dtype=np.float32).reshape(-1, 1, 1)


FORMATS = {
    "tread_wds": Format(open_tars, "samples", scaled=True),
    "maskdit_lmdb": Format(open_lmdb, "mean_logvar", hflip=True),
    "repa": Format(open_npy_zip, "mean_std", encoder=PUBLISHED["sd-vae-ft-mse"]),
    "lightningdit": Format(
        open_safetensors, "samples", hflip=True, encoder="hustvl/vavae-imagenet256-f16d32-dinov2"
    ),
    "edm2": Format(
        open_npy_zip,
        "mean_std",
        encoder=PUBLISHED["sd-vae-ft-mse"],
        # [EDM2]: each channel is normalized to mean 0 and standard deviation 0.5.
        scale=tuple(0.5 / std for std in (4.17, 4.62, 3.71, 3.28)),
        shift=(5.81, 3.25, 0.12, -2.15),
        std=0.5,
        pixel_range=(0.0, 1.0),
    ),
}
