"""Features of many images: each rank looks at its own batches, and the statistics add up.

Batches are (position of the first, images (n, H, W, C) uint8).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from tqdm import tqdm

from runtime.launch import ALONE, Launch

Batches = Iterable[tuple[int, np.ndarray]]
Detector = Callable[[np.ndarray], dict[str, np.ndarray | torch.Tensor]]
# A kind of statistic (FeatureStatistics, AllFeatures, or a metric's own), and the features that it is of.
Need = tuple[type, str]


class Images(Protocol):
    """Images in memory or in files."""

    count: int
    shape: tuple[int, ...]

    def batches(self, batch_size: int, launch: Launch = ALONE) -> Batches: ...


class ArrayImages:
    """Images (N, H, W, C) uint8 in memory."""

    def __init__(self, array: np.ndarray):
        self.array, self.count, self.shape = array, len(array), array.shape[1:]

    def batches(self, batch_size: int, launch: Launch = ALONE) -> Batches:
        """Yield this rank's batches: every world_size-th one."""
        for start in range(launch.rank * batch_size, self.count, launch.world_size * batch_size):
            yield start, self.array[start : start + batch_size]


@dataclass
class FeatureSet:
    """Statistics of the features of a set of images: features[FeatureStatistics, "pool"].mean.

    Args:
        labels: (N,) classes that were requested, where the images have any.
    """

    num_images: int = 0
    statistics: dict[Need, Any] = field(default_factory=dict)
    labels: np.ndarray | None = None

    def __getitem__(self, need: Need) -> Any:
        return self.statistics[need]


def extract(
    detector: Detector,
    batches: Batches,
    num_images: int,
    needs: Iterable[Need],
    *,
    batch_size: int | None,
    launch: Launch,
    description: str,
) -> FeatureSet:
    """Run the images of all ranks through the detector.

    Memory grows with the number of images only where AllFeatures are needed.

    Args:
        batch_size: images that the detector takes at a time, at most; None: batches stay as they are.
    """
    found, num_seen = FeatureSet(num_images), 0
    needs = sorted(set(needs), key=str)  # in the same order on all ranks, since merging is collective
    bar = {"total": num_images, "desc": description, "unit": "image", "disable": not launch.is_main}
    with tqdm(**bar) as progress:
        for start, images in split(batches, batch_size) if batch_size else batches:
            features = detector(images)
            for kind, name in needs:
                if (kind, name) not in found.statistics:
                    found.statistics[kind, name] = kind(features[name].shape[-1], launch.device, num_images)
                found[kind, name].update(features[name], start)
            num_seen += len(images)
            progress.update(min(len(images) * launch.world_size, num_images - progress.n))
    for kind, name in needs:
        if (kind, name) not in found.statistics:  # this rank had no images
            found.statistics[kind, name] = kind(detector.num_features[name], launch.device, num_images)
        found[kind, name].merge(launch)
    num_seen = int(launch.sum(torch.tensor(num_seen, device=launch.device)))
    if num_seen != num_images:
        raise ValueError(f"{num_seen} images came instead of {num_images}")
    return found


def split(batches: Batches, batch_size: int) -> Batches:
    """Yield batches of at most `batch_size`, whatever the size they come in."""
    for start, images in batches:
        for offset in range(0, len(images), batch_size):
            yield start + offset, images[offset : offset + batch_size]
