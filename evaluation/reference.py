"""References to score images against: feature statistics of a data set, and some of its images. [ADM]"""

import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from evaluation.detectors.inception import InceptionDetector
from evaluation.features import Images, Need, add_up, extract
from evaluation.files import fingerprint
from evaluation.statistics import FeatureStatistics
from runtime.arrays import ZIP_ERRORS, array_names, member_size, read_header, read_member
from runtime.errors import as_value_error
from runtime.files import atomic_write
from runtime.launch import Launch
from runtime.parts import PartCache

NUM_KEPT = 10_000  # images in a reference, for precision and recall, as in [ADM]
# Feature name -> the arrays of a reference that hold their mean and covariance.
STATISTICS = {"pool": ("mu", "sigma"), "spatial": ("mu_s", "sigma_s")}
SHAPES = {mu: (InceptionDetector.num_features[name],) for name, (mu, _) in STATISTICS.items()}
SHAPES |= {sigma: 2 * SHAPES[mu] for mu, sigma in STATISTICS.values()} | {"weights": ()}
MAX_HASH_BYTES = 4 * 128


class Gaussian(NamedTuple):
    """Mean (F,) and covariance (F, F) of features."""

    mean: np.ndarray
    covariance: np.ndarray


@dataclass
class Reference:
    """A reference to score images against: statistics, images, or both.

    Args:
        name: used in error messages.
        statistics: of the Inception features of the whole data set; empty: computed from the images.
        images: some or all images of the data set; None: only statistics.
        labels: of the images (N,); None: the images have no labels.
        held_out: images and labels outside the reference, to compare samples with.
        held_out_captions: captions of the held-out images (N,); None: they have none.
        weights_hash: hash of the network that computed the statistics; None: unknown.
        path: the file or folder that was read; None: the reference was built in memory.
        data: describes the data set; None: not the training images of a run.
    """

    name: str = "reference"
    statistics: dict[Need, Gaussian] = field(default_factory=dict)
    images: Images | None = None
    labels: np.ndarray | None = None
    held_out: tuple[np.ndarray, np.ndarray | None] | None = None
    held_out_captions: np.ndarray | None = None
    weights_hash: str | None = None
    path: Path | None = None
    data: dict[str, Any] | None = None

    @cached_property
    def sha256(self) -> str:
        """Hash of the file or folder; large ones take a while."""
        return fingerprint(self.path)

    def describe(self) -> dict[str, Any]:
        """Return a record of the files, the data and the kind of statistics."""
        record = {} if self.path is None else {"path": str(self.path), "sha256": self.sha256}
        record |= {"data": self.data} if self.data else {}
        record |= {"moments": "its statistics" if self.statistics else "all of its images"}
        return record | {"images": self.images and {"count": self.images.count, "shape": self.images.shape}}


def open_reference(path: Path, open_images: Callable[[Path], Images]) -> Reference:
    """Open a reference: an .npz of [ADM] or [EDM], or images in an .npz, a folder or a zip.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: it is damaged, of another network, a folder of latents, or neither statistics nor images.
    """
    if not path.exists():
        hint = '`python -m evaluation.fetch "files=[imagenet256]"` downloads ImageNet\'s'
        raise FileNotFoundError(f"reference={path} not found; {hint}")
    if (path / "latents.npy").is_file():
        remedy = "or score against the data set: suite=digits in fid.py, or reference=null in YAML"
        raise ValueError(f"reference={path} is a folder of latents: give images, {remedy}")
    if path.suffix != ".npz":
        return Reference(images=open_images(path), path=path)
    unreadable = as_value_error(f"reference={path} cannot be read as an .npz", *ZIP_ERRORS)
    with unreadable, zipfile.ZipFile(path) as archive:
        names = {name.removesuffix(".npy") for name in archive.namelist()}
        listed = array_names(archive)
        arrays = {name: _read(archive, name) for name in SHAPES if name in names}
    _check_statistics(arrays, path)
    if "mu" not in arrays and "arr_0" not in names:
        raise ValueError(f"reference={path} holds {listed}, must hold mu and sigma, or images (arr_0)")
    statistics = {
        (FeatureStatistics, name): Gaussian(arrays[mu], arrays[sigma])
        for name, (mu, sigma) in STATISTICS.items()
        if "mu" in arrays and mu in arrays
    }
    images = open_images(path) if "arr_0" in names else None
    weights_hash = str(arrays["weights"]) if "weights" in arrays else None
    return Reference(statistics=statistics, images=images, weights_hash=weights_hash, path=path)


def _read(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Read an array of known shape and type; check its header before allocating memory."""
    member_size(archive, f"{name}.npy")  # first: it refuses compression that numpy does not use
    with archive.open(f"{name}.npy") as file:
        shape, _, dtype = read_header(file)
    if shape != SHAPES[name]:
        raise ValueError(f"{name} is {shape}, must be {SHAPES[name]}: of another network")
    kind, expected = ("U", "a hash") if name == "weights" else ("f", "floats")
    if dtype.kind != kind or (kind == "U" and dtype.itemsize > MAX_HASH_BYTES):
        raise ValueError(f"{name} is {dtype}, must be {expected}")
    return read_member(archive, name)


def _check_statistics(arrays: dict[str, np.ndarray], path: Path) -> None:
    for mu, sigma in STATISTICS.values():
        if (mu in arrays) != (sigma in arrays):
            raise ValueError(f"reference={path} must hold both {mu} and {sigma}, or neither")
        for name in (mu, sigma):
            if name in arrays and not np.isfinite(arrays[name]).all():
                raise ValueError(f"reference={path}: {name} must be finite")
        if sigma in arrays and not _is_covariance(arrays[sigma].astype(np.float64)):
            raise ValueError(f"reference={path}: {sigma} must be symmetric, without negative eigenvalues")


def _is_covariance(sigma: np.ndarray) -> bool:
    """True if a matrix is symmetric and positive semi-definite, to fp32 accuracy."""
    scale = np.abs(sigma).max()
    try:
        np.linalg.cholesky(sigma + (1e-4 * scale + np.finfo(float).tiny) * np.eye(len(sigma)))
    except np.linalg.LinAlgError:
        return False
    return np.allclose(sigma, sigma.T, rtol=0, atol=1e-5 * scale)


def evenly_spaced(num_images: int, num_kept: int) -> np.ndarray:
    """Return the indices of at most `num_kept` evenly spaced images, for images that are sorted by class."""
    num_kept = min(num_images, num_kept)
    return np.arange(num_kept) * num_images // max(1, num_kept)


def make_reference(
    detector: InceptionDetector,
    images: Images,
    file: Path,
    batch_size: int,
    launch: Launch,
    cache: PartCache | None = None,
) -> dict[str, Any]:
    """Write a reference in the layout of [ADM]; on the first rank, return a record of it.

    The file holds mu, sigma, mu_s and sigma_s of all images, up to 10,000 of the images as arr_0, and the
    hash of the network's tensors as `weights`.
    """
    keep = evenly_spaced(images.count, NUM_KEPT)
    options = {"batch_size": batch_size, "launch": launch, "description": "features of reference"}
    parts = extract(detector, images, cache, **options)
    if not launch.is_main:
        return {}
    needs = [(FeatureStatistics, name) for name in STATISTICS]
    features = add_up(parts, needs, images.count, launch.device)
    kept = {part.index: part.images for part in images.batches(1, keep.tolist())}
    arrays = {"arr_0": np.concatenate([kept[i] for i in keep.tolist()])}
    arrays |= {"weights": np.array(detector.record["tensors_sha256"])}
    for name, (mu, sigma) in STATISTICS.items():
        statistics = features[FeatureStatistics, name]
        arrays |= {mu: statistics.mean.cpu().numpy(), sigma: statistics.covariance.cpu().numpy()}
    with atomic_write(file) as partial:
        np.savez(partial, **arrays)
    record = {"num_images": images.count, "num_kept": len(keep)}
    return {**record, "shape": images.shape, "batch_size": batch_size}
