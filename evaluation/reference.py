"""What images are scored against: statistics of the features of a data set, and some of its images. [ADM]"""

import lzma
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from evaluation.detectors.inception import NUM_POOL_FEATURES, NUM_SPATIAL_FEATURES, InceptionDetector
from evaluation.features import Images, Need, extract
from evaluation.files import fingerprint
from evaluation.statistics import FeatureStatistics, in_order
from runtime.arrays import read_header, read_member
from runtime.files import atomic_write
from runtime.launch import Launch

# images of the data set that a reference carries, for precision and recall: as many as those of [ADM]
NUM_KEPT = 10_000
# The arrays of a reference: mean and covariance of features, by their name.
STATISTICS = {"pool": ("mu", "sigma"), "spatial": ("mu_s", "sigma_s")}
SIZES = {"pool": NUM_POOL_FEATURES, "spatial": NUM_SPATIAL_FEATURES}
SHAPES = {mu: (SIZES[name],) for name, (mu, _) in STATISTICS.items()}
SHAPES |= {sigma: (SIZES[name], SIZES[name]) for name, (_, sigma) in STATISTICS.items()}
MAX_HASH_BYTES = 4 * 128
# What reading an .npz raises where it is damaged, encrypted or packed in a way that is not known.
READ_ERRORS = (ValueError, OSError, EOFError, RuntimeError, zlib.error, zipfile.BadZipFile)
READ_ERRORS += (LookupError, OverflowError, lzma.LZMAError, struct.error)


class Gaussian(NamedTuple):
    """Mean (F,) and covariance (F, F) of features."""

    mean: np.ndarray
    covariance: np.ndarray


@dataclass
class Reference:
    """What images are scored against: statistics, images, or both.

    Args:
        name: what errors call it.
        statistics: of all images of a data set, where they are known.
        images: some or all of them; None if not there.
        labels: of the images, where they have any.
        held_out: images and labels to compare samples with, which are not in the reference.
        made_by: hash of the network's tensors that gave the statistics, if it is told.
        path: the file or the folder that it was read from.
        data: what tells the data set, where the images are those of a training.
    """

    name: str = "reference"
    statistics: dict[Need, Gaussian] = field(default_factory=dict)
    images: Images | None = None
    labels: np.ndarray | None = None
    held_out: tuple[np.ndarray, np.ndarray] | None = None
    made_by: str | None = None
    path: Path | None = None
    data: dict[str, Any] | None = None

    def describe(self) -> dict[str, Any]:
        """Return what it is."""
        files = {} if self.path is None else {"path": str(self.path), "sha256": fingerprint(self.path)}
        return {
            **files,
            **({"data": self.data} if self.data else {}),
            "moments": "its statistics" if self.statistics else "all of its images",
            "images": self.images and {"count": self.images.count, "shape": self.images.shape},
        }

    def why_without(self, need: Need) -> str:
        """Return why a statistic is not known."""
        kind, name = need
        if kind is FeatureStatistics and name in STATISTICS:
            return f"the reference has no {' and '.join(STATISTICS[name])}"
        return "the reference has no images (arr_0)"


def open_reference(path: Path, open_images: Callable[[Path], Images]) -> Reference:
    """Open what images are scored against.

    Args:
        path: an .npz of [ADM] (statistics and images) or of [EDM] (mu and sigma), or images: an .npz, a
            folder, a zip.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, its statistics are not those of this network, or it holds nothing to
            compare with.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"reference={path} not found; `python -m evaluation.fetch imagenet256` downloads that of ImageNet"
        )
    if path.suffix != ".npz":
        return Reference(images=open_images(path), path=path)
    if not zipfile.is_zipfile(path):
        raise ValueError(f"reference={path} cannot be read as an .npz: it is none, or truncated")
    try:
        with zipfile.ZipFile(path) as archive:
            names = {name.removesuffix(".npy") for name in archive.namelist()}
            arrays = {
                name: _read_numbers(archive, name, shape) for name, shape in SHAPES.items() if name in names
            }
            made_by = _read_hash(archive) if "weights" in names else None
    except READ_ERRORS as error:
        raise ValueError(
            f"reference={path} cannot be read as an .npz: {' '.join(str(error).split())}"
        ) from error
    _check_statistics(arrays, path)
    if "mu" not in arrays and "arr_0" not in names:
        raise ValueError(f"reference={path} must hold mu and sigma, or images (arr_0)")
    known = {name: pair for name, pair in STATISTICS.items() if pair[0] in arrays and "mu" in arrays}
    return Reference(
        statistics={
            (FeatureStatistics, name): Gaussian(arrays[mu], arrays[sigma])
            for name, (mu, sigma) in known.items()
        },
        images=open_images(path) if "arr_0" in names else None,
        made_by=made_by if known else None,
        path=path,
    )


def _read_numbers(archive: zipfile.ZipFile, name: str, expected: tuple[int, ...]) -> np.ndarray:
    """Read an array of floats of a known shape; its header is checked before memory is taken."""
    with archive.open(f"{name}.npy") as file:
        shape, _, dtype = read_header(file)
    if shape != expected:
        raise ValueError(f"{name} is {shape}, must be {expected}: of another network")
    if dtype.kind != "f":
        raise ValueError(f"{name} is {dtype}, must be floats")
    return read_member(archive, name)


def _read_hash(archive: zipfile.ZipFile) -> str:
    with archive.open("weights.npy") as file:
        shape, _, dtype = read_header(file)
    if shape != () or dtype.kind != "U" or dtype.itemsize > MAX_HASH_BYTES:
        raise ValueError(f"weights is {dtype} {shape}, must be a hash")
    return str(read_member(archive, "weights"))


def _check_statistics(arrays: dict[str, np.ndarray], path: Path) -> None:
    for mu, sigma in STATISTICS.values():
        if (mu in arrays) != (sigma in arrays):
            raise ValueError(f"reference={path} must hold both of {mu} and {sigma}, or neither")
        for name in (mu, sigma):
            if name in arrays and not np.isfinite(arrays[name]).all():
                raise ValueError(f"reference={path}: {name} must be finite")


def evenly_spaced(num_images: int, num_kept: int) -> np.ndarray:
    """Return the positions of at most `num_kept` images, evenly spaced, so that classes kept in a row all
    take part.
    """
    num_kept = min(num_images, num_kept)
    return np.arange(num_kept) * num_images // max(1, num_kept)


def make_reference(
    detector: InceptionDetector, images: Images, file: Path, batch_size: int, launch: Launch
) -> dict[str, Any]:
    """Write a reference in the layout of [ADM]: mu, sigma, mu_s, sigma_s of all images, and up to 10,000 of
    them as arr_0.

    Beside these, `weights` holds the hash of the network's tensors.

    Returns:
        What was written; nothing on all processes but the first.
    """
    keep = evenly_spaced(images.count, NUM_KEPT)
    kept = []

    def passing() -> Iterator[tuple[int, np.ndarray]]:
        for start, batch in images.batches(batch_size, launch):
            here = keep[(keep >= start) & (keep < start + len(batch))]
            kept.append((start, batch[here - start]))
            yield start, batch

    found = extract(
        detector,
        passing(),
        images.count,
        [(FeatureStatistics, name) for name in STATISTICS],
        batch_size=batch_size,
        launch=launch,
        description="features of reference",
    )
    parts = in_order(launch.gather_items(kept))
    if not launch.is_main:
        return {}
    arrays = {"arr_0": np.concatenate(parts), "weights": np.array(detector.record["tensors_sha256"])}
    for name, (mu, sigma) in STATISTICS.items():
        statistics = found[FeatureStatistics, name]
        arrays |= {mu: statistics.mean.cpu().numpy(), sigma: statistics.covariance.cpu().numpy()}
    with atomic_write(file) as partial:
        np.savez(partial, **arrays)
    return {
        "num_images": images.count,
        "num_kept": len(keep),
        "shape": images.shape,
        "batch_size": batch_size,
    }
