"""What images are scored against: statistics of the features of a data set, and some of its images. [ADM]"""

import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from evaluation.extraction import Images, Processes, evenly_spaced, extract, in_order, select
from evaluation.inception import NUM_POOL_FEATURES, NUM_SPATIAL_FEATURES, InceptionDetector

NUM_KEPT = 10_000  # images of the data set, for precision and recall
STATISTICS = {"mu": NUM_POOL_FEATURES, "mu_s": NUM_SPATIAL_FEATURES}  # beside each its covariance, sigma and sigma_s


def open_reference(path: Path, open_images: Callable[[Path], Images]) -> tuple[dict[str, np.ndarray], Images | None]:
    """Return the statistics of a reference (mu, sigma; mu_s, sigma_s; or none) and its images, if it has any.

    Args:
        path: an .npz of [ADM] (statistics and images) or of [EDM] (mu and sigma), or images: an .npz, a folder, a zip.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, its statistics are not those of this network, or it holds nothing to compare with.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"reference={path} not found; `python -m evaluation.fetch imagenet256` downloads that of ImageNet"
        )
    if path.suffix != ".npz":
        return {}, open_images(path)
    if not zipfile.is_zipfile(path):
        raise ValueError(f"reference={path} can not be read as an .npz: it is none, or truncated")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            has_images = "arr_0" in arrays
            names = [name for mu in STATISTICS for name in (mu, mu.replace("mu", "sigma"))]
            statistics = {name: arrays[name] for name in names if name in arrays}
            made_by = str(arrays["weights"]) if "weights" in arrays else None
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"reference={path} can not be read as an .npz: {error}") from error
    _check_statistics(statistics, path)
    if "mu" not in statistics and not has_images:
        raise ValueError(f"reference={path} must hold mu and sigma, or images (arr_0)")
    if "mu" not in statistics:
        statistics = {}
    elif made_by is not None:
        statistics["weights"] = made_by
    return statistics, open_images(path) if has_images else None


def _check_statistics(statistics: dict[str, np.ndarray], path: Path) -> None:
    for mu, length in STATISTICS.items():
        sigma = mu.replace("mu", "sigma")
        if (mu in statistics) != (sigma in statistics):
            raise ValueError(f"reference={path} must hold both of {mu} and {sigma}, or neither")
        for name, shape in ((mu, (length,)), (sigma, (length, length))):
            if name in statistics and statistics[name].shape != shape:
                raise ValueError(f"reference={path}: {name} is {statistics[name].shape}, must be {shape}: of another network")
            if name in statistics and not np.isfinite(statistics[name]).all():
                raise ValueError(f"reference={path}: {name} must be finite")


def make_reference(
    detector: InceptionDetector, images: Images, file: Path, batch_size: int, processes: Processes
) -> dict[str, Any]:
    """Write a reference in the layout of [ADM]: mu, sigma, mu_s, sigma_s of all images, and up to 10,000 of them as arr_0.

    Beside these, `weights` holds the hash of the network's tensors.

    Returns:
        What was written; nothing on all processes but the first.
    """
    keep = evenly_spaced(images.count, NUM_KEPT)
    kept = []

    def passing() -> Iterator[tuple[int, np.ndarray]]:
        for start, batch in images.batches(batch_size, processes.index, processes.count):
            kept.append((start, select(batch, start, keep)))
            yield start, batch

    options = {"batch_size": batch_size, "keep": None, "processes": processes, "description": "features of reference"}
    found = extract(detector, passing(), images.count, **options)
    parts = in_order(processes.gather(kept))
    if processes.index != 0:
        return {}
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f".{file.stem}.partial.npz")
    np.savez(
        unfinished,
        mu=found.pool.mean.cpu().numpy(),
        sigma=found.pool.covariance.cpu().numpy(),
        mu_s=found.spatial.mean.cpu().numpy(),
        sigma_s=found.spatial.covariance.cpu().numpy(),
        arr_0=np.concatenate(parts),
        weights=np.array(detector.record["tensors_sha256"]),
    )
    unfinished.replace(file)
    return {"num_images": images.count, "num_kept": len(keep), "shape": images.shape, "batch_size": batch_size}
