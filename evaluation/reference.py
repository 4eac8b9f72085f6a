"""What images are scored against: statistics of the features of a data set, and some of its images. [ADM]"""

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
from runtime.files import atomic_write
from runtime.launch import Launch
from runtime.parts import PartCache

NUM_KEPT = 10_000  # images that a reference carries, for precision and recall, as those of [ADM]
# The arrays of a reference: mean and covariance of features, by their name.
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
    """What images are scored against: statistics, images, or both.

    Args:
        name: for error messages.
        statistics: of the Inception features of all images of a data set, where they are known.
        images: some or all of them; None if not there.
        labels: of the images, where they have any.
        held_out: images and labels to compare samples with, which are not in the reference.
        made_by: hash of the tensors of the network that gave the statistics, where it is known.
        path: the file or the folder that it was read from.
        data: describes the data set, where the images are those of a training.
    """

    name: str = "reference"
    statistics: dict[Need, Gaussian] = field(default_factory=dict)
    images: Images | None = None
    labels: np.ndarray | None = None
    held_out: tuple[np.ndarray, np.ndarray] | None = None
    made_by: str | None = None
    path: Path | None = None
    data: dict[str, Any] | None = None

    @cached_property
    def sha256(self) -> str:
        """The hash of its file or folder, which may take a while."""
        return fingerprint(self.path)

    def describe(self) -> dict[str, Any]:
        """The files, the data, and the kind of statistics, for records."""
        record = {} if self.path is None else {"path": str(self.path), "sha256": self.sha256}
        record |= {"data": self.data} if self.data else {}
        record |= {"moments": "its statistics" if self.statistics else "all of its images"}
        return record | {"images": self.images and {"count": self.images.count, "shape": self.images.shape}}


def open_reference(path: Path, open_images: Callable[[Path], Images]) -> Reference:
    """Open an .npz of [ADM] (statistics and images) or of [EDM] (mu and sigma), or images: an .npz, a folder,
    a zip.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, its statistics are of another network, or it holds nothing to compare with.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"reference={path} not found; `python -m evaluation.fetch files=[imagenet256]` downloads that of "
            "ImageNet"
        )
    if path.suffix != ".npz":
        return Reference(images=open_images(path), path=path)
    if not zipfile.is_zipfile(path):
        raise ValueError(f"reference={path} cannot be read as an .npz: it is none, or truncated")
    try:
        with zipfile.ZipFile(path) as archive:
            names = {name.removesuffix(".npy") for name in archive.namelist()}
            listed = array_names(archive)
            arrays = {name: _read(archive, name) for name in SHAPES if name in names}
    except ZIP_ERRORS as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"reference={path} cannot be read as an .npz: {reason}") from error
    _check_statistics(arrays, path)
    if "mu" not in arrays and "arr_0" not in names:
        raise ValueError(f"reference={path} holds {listed}, must hold mu and sigma, or images (arr_0)")
    statistics = {
        (FeatureStatistics, name): Gaussian(arrays[mu], arrays[sigma])
        for name, (mu, sigma) in STATISTICS.items()
        if "mu" in arrays and mu in arrays
    }
    images = open_images(path) if "arr_0" in names else None
    made_by = str(arrays["weights"]) if "weights" in arrays else None
    return Reference(statistics=statistics, images=images, made_by=made_by, path=path)


def _read(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Read an array of known shape and kind; its header is checked before memory is taken."""
    member_size(archive, f"{name}.npy")  # first: it refuses other compression than numpy uses
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
            raise ValueError(f"reference={path} must hold both of {mu} and {sigma}, or neither")
        for name in (mu, sigma):
            if name in arrays and not np.isfinite(arrays[name]).all():
                raise ValueError(f"reference={path}: {name} must be finite")
        if sigma in arrays and not _is_covariance(arrays[sigma].astype(np.float64)):
            raise ValueError(f"reference={path}: {sigma} must be symmetric, without negative eigenvalues")


def _is_covariance(sigma: np.ndarray) -> bool:
    """True if a matrix is symmetric and positive semi-definite, to the accuracy of fp32 statistics."""
    scale = np.abs(sigma).max()
    try:
        np.linalg.cholesky(sigma + (1e-4 * scale + np.finfo(float).tiny) * np.eye(len(sigma)))
    except np.linalg.LinAlgError:
        return False
    return np.allclose(sigma, sigma.T, rtol=0, atol=1e-5 * scale)


def evenly_spaced(num_images: int, num_kept: int) -> np.ndarray:
    """Indices of at most `num_kept` images, evenly spaced over classes stored one by one."""
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
    """Write a reference in the layout of [ADM], and return a record of it on the first rank.

    It holds mu, sigma, mu_s, sigma_s of all images, up to 10,000 of them as arr_0, and as `weights` the hash
    of the network's tensors.
    """
    keep = evenly_spaced(images.count, NUM_KEPT)
    options = {"batch_size": batch_size, "launch": launch, "description": "features of reference"}
    parts = extract(detector, images, cache, **options)
    if not launch.is_main:
        return {}
    needs = [(FeatureStatistics, name) for name in STATISTICS]
    found = add_up(parts, needs, images.count, launch.device)
    chosen = {part.index: part.images for part in images.batches(1, keep.tolist())}
    arrays = {"arr_0": np.concatenate([chosen[i] for i in keep.tolist()])}
    arrays |= {"weights": np.array(detector.record["tensors_sha256"])}
    for name, (mu, sigma) in STATISTICS.items():
        statistics = found[FeatureStatistics, name]
        arrays |= {mu: statistics.mean.cpu().numpy(), sigma: statistics.covariance.cpu().numpy()}
    with atomic_write(file) as partial:
        np.savez(partial, **arrays)
    record = {"num_images": images.count, "num_kept": len(keep)}
    return {**record, "shape": images.shape, "batch_size": batch_size}
