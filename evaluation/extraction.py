"""Features of many images: each process looks at its own batches, and the statistics add up.

Batches are (position of the first, images (n, H, W, 3) uint8).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from tqdm import tqdm

from evaluation.inception import NUM_CLASSES, NUM_POOL_FEATURES, NUM_SPATIAL_FEATURES, InceptionDetector
from evaluation.statistics import FeatureStatistics, SplitScores, Total

SPLIT_SIZE = 5000  # images over which one inception score is taken

Batches = Iterable[tuple[int, np.ndarray]]


class Images(Protocol):
    """What the suite asks of images that are kept somewhere."""

    count: int
    shape: tuple[int, ...]

    def batches(self, batch_size: int, process_index: int = 0, num_processes: int = 1) -> Batches: ...


@dataclass(frozen=True)
class Processes:
    """The processes that share the work.

    Args:
        total: sums a tensor over all processes.
        gather: puts lists from all processes together.
    """

    index: int = 0
    count: int = 1
    total: Total = lambda tensor: tensor
    gather: Callable[[list], list] = lambda items: items


@dataclass
class ImageSetStatistics:
    """What the suite needs to know of a set of images: `features` (N, 2048) on the first process, where they were asked for."""

    pool: FeatureStatistics
    spatial: FeatureStatistics
    split_scores: SplitScores
    features: np.ndarray | None


def extract(
    detector: InceptionDetector,
    batches: Batches,
    num_images: int,
    keep_features: bool,
    processes: Processes,
    description: str = "features",
) -> ImageSetStatistics:
    """Run the images of all processes through the detector.

    Memory grows with the number of images by 8 KiB each where features are kept, else not at all.
    """
    found = ImageSetStatistics(
        FeatureStatistics(NUM_POOL_FEATURES, detector.device),
        FeatureStatistics(NUM_SPATIAL_FEATURES, detector.device),
        SplitScores(num_images, NUM_CLASSES, SPLIT_SIZE, detector.device),
        features=None,
    )
    kept = []
    bar = {"total": num_images, "desc": description, "unit": "image", "disable": processes.index != 0}
    with tqdm(**bar) as progress:
        for start, images in batches:
            features = detector(images)
            found.pool.update(features.pool)
            found.spatial.update(features.spatial)
            found.split_scores.update(start, features.logits.softmax(dim=1))
            if keep_features:
                kept.append((start, features.pool.cpu().numpy()))
            progress.update(min(len(images) * processes.count, num_images - progress.n))
    for part in (found.pool, found.spatial, found.split_scores):
        part.merge(processes.total)
    if found.pool.count != num_images:
        raise ValueError(f"{found.pool.count} images came instead of {num_images}")
    if keep_features:
        parts = sorted(processes.gather(kept), key=lambda part: part[0])
        found.features = np.concatenate([part for _, part in parts])
    return found
