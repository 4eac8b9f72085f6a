"""Features of many images: each process looks at its own batches, and the statistics add up.

Batches are (position of the first, images (n, H, W, 3) uint8).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from tqdm import tqdm

from evaluation.detectors.inception import (
    NUM_CLASSES,
    NUM_POOL_FEATURES,
    NUM_SPATIAL_FEATURES,
    InceptionDetector,
)
from evaluation.statistics import FeatureStatistics, SplitScores
from runtime.launch import ALONE, Launch

SPLIT_SIZE = 5000  # images over which one inception score is taken

Batches = Iterable[tuple[int, np.ndarray]]


class Images(Protocol):
    """What the suite asks of images that are kept somewhere."""

    count: int
    shape: tuple[int, ...]

    def batches(self, batch_size: int, launch: Launch = ALONE) -> Batches: ...


@dataclass
class ImageSetStatistics:
    """What the suite needs to know of a set of images; `features` (K, 2048) of those to be kept, on the first
    process.
    """

    pool: FeatureStatistics
    spatial: FeatureStatistics
    split_scores: SplitScores
    features: np.ndarray | None


def evenly_spaced(num_images: int, num_kept: int) -> np.ndarray:
    """Return the positions of at most `num_kept` images, evenly spaced, so that classes kept in a row all
    take part.
    """
    num_kept = min(num_images, num_kept)
    return np.arange(num_kept) * num_images // max(1, num_kept)


def extract(
    detector: InceptionDetector,
    batches: Batches,
    num_images: int,
    *,
    batch_size: int,
    keep: np.ndarray | None,
    launch: Launch,
    description: str,
) -> ImageSetStatistics:
    """Run the images of all processes through the detector.

    Memory grows with the number of images by 8 KiB for each whose features are kept, and not at all for the
    others.

    Args:
        batch_size: the most images that the detector takes at a time.
        keep: positions, ascending, of the images whose features are kept; None keeps none.
    """
    found = ImageSetStatistics(
        FeatureStatistics(NUM_POOL_FEATURES, detector.device),
        FeatureStatistics(NUM_SPATIAL_FEATURES, detector.device),
        SplitScores(num_images, NUM_CLASSES, SPLIT_SIZE, detector.device),
        features=None,
    )
    kept = []
    bar = {"total": num_images, "desc": description, "unit": "image", "disable": not launch.is_main}
    with tqdm(**bar) as progress:
        for start, images in split(batches, batch_size):
            features = detector(images)
            found.pool.update(features.pool)
            found.spatial.update(features.spatial)
            found.split_scores.update(start, features.logits.softmax(dim=1))
            if keep is not None:
                kept.append((start, select(features.pool.cpu().numpy(), start, keep)))
            progress.update(min(len(images) * launch.world_size, num_images - progress.n))
    for part in (found.pool, found.spatial, found.split_scores):
        part.merge(launch.sum)
    if found.pool.count != num_images:
        raise ValueError(f"{found.pool.count} images came instead of {num_images}")
    if keep is not None:
        parts = in_order(launch.gather_items(kept))
        found.features = np.concatenate(parts) if parts else None
    return found


def split(batches: Batches, batch_size: int) -> Batches:
    """Yield batches of at most `batch_size`, whatever the size they come in."""
    for start, images in batches:
        for offset in range(0, len(images), batch_size):
            yield start + offset, images[offset : offset + batch_size]


def select(items: np.ndarray, start: int, keep: np.ndarray) -> np.ndarray:
    """Return those of the items, which begin at position `start`, whose positions are to be kept."""
    return items[keep[(keep >= start) & (keep < start + len(items))] - start]


def in_order(parts: list[tuple[int, np.ndarray]]) -> list[np.ndarray]:
    """Return (position, array) as arrays, by position."""
    return [part for _, part in sorted(parts, key=lambda part: part[0])]
