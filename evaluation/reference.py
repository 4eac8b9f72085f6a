"""What images are scored against: statistics of the features of a data set, and some of its images. [ADM]"""

import lzma
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.detectors.inception import NUM_POOL_FEATURES, NUM_SPATIAL_FEATURES, InceptionDetector
from evaluation.extraction import Images, evenly_spaced, extract, in_order, select
from runtime.arrays import read_header, read_member
from runtime.files import atomic_write
from runtime.launch import Launch

# images of the data set that a reference carries, for precision and recall: as many as those of [ADM]
NUM_KEPT = 10_000
STATISTICS = {
    "mu": NUM_POOL_FEATURES,
    "mu_s": NUM_SPATIAL_FEATURES,
}  # beside each its covariance, sigma and sigma_s
SHAPES = {mu: (n,) for mu, n in STATISTICS.items()} | {
    mu.replace("mu", "sigma"): (n, n) for mu, n in STATISTICS.items()
}
MAX_HASH_BYTES = 4 * 128
# What reading an .npz raises where it is damaged, encrypted or packed in a way that is not known.
READ_ERRORS = (ValueError, OSError, EOFError, RuntimeError, zlib.error, zipfile.BadZipFile)
READ_ERRORS += (LookupError, OverflowError, lzma.LZMAError, struct.error)


def open_reference(
    path: Path, open_images: Callable[[Path], Images]
) -> tuple[dict[str, np.ndarray], Images | None]:
    """Return the statistics of a reference (mu, sigma; mu_s, sigma_s; or none) and its images, if it has any.

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
        return {}, open_images(path)
    if not zipfile.is_zipfile(path):
        raise ValueError(f"reference={path} cannot be read as an .npz: it is none, or truncated")
    try:
        with zipfile.ZipFile(path) as archive:
            names = {name.removesuffix(".npy") for name in archive.namelist()}
            statistics = {
                name: _read_numbers(archive, name, shape) for name, shape in SHAPES.items() if name in names
            }
            made_by = _read_hash(archive) if "weights" in names else None
    except READ_ERRORS as error:
        raise ValueError(
            f"reference={path} cannot be read as an .npz: {' '.join(str(error).split())}"
        ) from error
    has_images = "arr_0" in names
    _check_statistics(statistics, path)
    if "mu" not in statistics and not has_images:
        raise ValueError(f"reference={path} must hold mu and sigma, or images (arr_0)")
    if "mu" not in statistics:
        statistics = {}
    elif made_by is not None:
        statistics["weights"] = made_by
    return statistics, open_images(path) if has_images else None


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


def _check_statistics(statistics: dict[str, np.ndarray], path: Path) -> None:
    for mu in STATISTICS:
        sigma = mu.replace("mu", "sigma")
        if (mu in statistics) != (sigma in statistics):
            raise ValueError(f"reference={path} must hold both of {mu} and {sigma}, or neither")
        for name in (mu, sigma):
            if name in statistics and not np.isfinite(statistics[name]).all():
                raise ValueError(f"reference={path}: {name} must be finite")


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
            kept.append((start, select(batch, start, keep)))
            yield start, batch

    options = {
        "batch_size": batch_size,
        "keep": None,
        "launch": launch,
        "description": "features of reference",
    }
    found = extract(detector, passing(), images.count, **options)
    parts = in_order(launch.gather_items(kept))
    if not launch.is_main:
        return {}
    with atomic_write(file) as partial:
        np.savez(
            partial,
            mu=found.pool.mean.cpu().numpy(),
            sigma=found.pool.covariance.cpu().numpy(),
            mu_s=found.spatial.mean.cpu().numpy(),
            sigma_s=found.spatial.covariance.cpu().numpy(),
            arr_0=np.concatenate(parts),
            weights=np.array(detector.record["tensors_sha256"]),
        )
    return {
        "num_images": images.count,
        "num_kept": len(keep),
        "shape": images.shape,
        "batch_size": batch_size,
    }
