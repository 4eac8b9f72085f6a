"""Features of many images, in parts: the ranks share the parts, and the first rank adds them up in order.

Scores therefore do not depend on the number of processes. Parts can be kept on disk: a job that was killed
resumes, and further metrics of the same features need no second pass.
"""

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from runtime.launch import Launch
from runtime.parts import Arrays, Part, PartCache

Detector = Callable[[np.ndarray], Mapping[str, np.ndarray | torch.Tensor]]
# A kind of statistic (FeatureStatistics, AllFeatures, or a metric's own), and the name of its features.
Need = tuple[type, str]
# Stored with the features of a part: the hash of its images (32 bytes), and the mean cost of an image.
DIGEST, COST = "images_sha256", "cost"
COST_KEYS = ("network_evaluations", "flops")


class Images(Protocol):
    """Images in memory, in files, or sampled from a network.

    Args:
        count: number of images.
        shape: (H, W, C) of an image.
        part_size: number of images in a part; None: use the detector's batch size.
    """

    @property
    def count(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def part_size(self) -> int | None: ...

    def batches(self, batch_size: int, parts: Iterable[int]) -> Iterator[Part]:
        """Yield parts; part i starts at image i * batch_size."""


class ArrayImages:
    """Images (N, H, W, C) uint8 in memory."""

    part_size = None

    def __init__(self, array: np.ndarray):
        self.array, self.count, self.shape = array, len(array), array.shape[1:]

    def batches(self, batch_size: int, parts: Iterable[int]) -> Iterator[Part]:
        for part in parts:
            yield Part(part, self.array[part * batch_size : (part + 1) * batch_size])


@dataclass
class FeatureSet:
    """Statistics of the features of a set of images: features[FeatureStatistics, "pool"].mean.

    Args:
        cost: mean cost of an image, see COST_KEYS; None: the images were not sampled from a network.
        images_sha256: hash of the parts' image hashes.
        labels: requested classes (N,); None: the images have no labels.
    """

    statistics: dict[Need, Any] = field(default_factory=dict)
    cost: np.ndarray | None = None
    images_sha256: str = ""
    labels: np.ndarray | None = None

    def __getitem__(self, need: Need) -> Any:
        return self.statistics[need]


def extract(
    detector: Detector | None,
    images: Images,
    cache: PartCache | None = None,
    *,
    batch_size: int | None = None,
    launch: Launch,
    description: str = "",
    after_part: Callable[[], None] = lambda: None,
) -> Iterator[Arrays]:
    """Extract the features of all images; on the first rank, return the arrays of each part, in order.

    Args:
        detector: None: return the images themselves, as `images`.
        cache: see `new_cache`; None: keep the parts in memory, without a progress bar.
        batch_size: maximum number of images that the detector takes at a time; None: it takes all images
            together, on the first rank, and the cache holds the images.
        description, after_part: see `PartCache.fill`.
    """
    part_detector, size = None if batch_size is None else detector, part_size(images, batch_size)

    def make(indices: Iterable[int]) -> Generator[tuple[int, Arrays], None, None]:
        for part in images.batches(size, indices):
            arrays = {"images": part.images}
            if part_detector is not None:
                arrays = run_detector(part_detector, part.images, batch_size)
            arrays[DIGEST] = hash_images(part.images)
            yield part.index, arrays if part.cost is None else arrays | {COST: part.cost}

    num_parts = -(-images.count // size)
    if cache is None:
        in_memory = dict(launch.gather_items([*make(range(launch.rank, num_parts, launch.world_size))]))
    else:
        cache.fill(make, launch, description, after_part)
    if not launch.is_main:
        return iter(())
    parts = map(in_memory.pop if cache is None else cache.read, range(num_parts))
    return parts if detector is part_detector else iter([_extract_at_once(detector, [*parts])])


def _extract_at_once(detector: Detector, parts: list[Arrays]) -> Arrays:
    images = np.concatenate([arrays["images"] for arrays in parts])
    joined = {**run_detector(detector, images, None), DIGEST: hash_images(images)}
    costs = [arrays[COST] for arrays in parts if COST in arrays]
    return joined | {COST: np.mean(costs, axis=0)} if costs else joined


def part_size(images: Images, batch_size: int | None) -> int:
    """Return the number of images in a part."""
    return images.part_size or batch_size or images.count


def new_cache(
    images: Images,
    path: Path,
    key: Mapping[str, Any],
    batch_size: int | None = None,
    hint: str = "remove it",
    replace: bool = False,
) -> PartCache:
    """Create a cache for the parts of images; see `PartCache` for the arguments."""
    size = part_size(images, batch_size)
    key = {**key, "part_size": size, "num_images": images.count}
    return PartCache(path, key, images.count, size, hint, replace)


def add_up(
    parts: Iterable[Arrays], needs: Iterable[Need], num_images: int, device: torch.device
) -> FeatureSet:
    """Add up statistics over parts, which must be in order, and hash the images.

    Memory grows with the number of images only if AllFeatures is needed.
    """
    total, num_seen, digest = FeatureSet(), 0, hashlib.sha256()
    needs, costs = set(needs), []
    for arrays in parts:
        digest.update(arrays.pop(DIGEST).tobytes())
        if COST in arrays:
            costs.append(arrays.pop(COST))
        for kind, name in needs:
            if name not in arrays:
                raise ValueError(f"the detector has no features {name}: it has {', '.join(arrays)}")
            if (kind, name) not in total.statistics:
                total.statistics[kind, name] = kind(arrays[name].shape[-1], device, num_images)
            total[kind, name].update(arrays[name], num_seen)
        num_seen += len(next(iter(arrays.values())))
    if num_seen != num_images:
        raise ValueError(f"the parts hold {num_seen} images, must hold {num_images}")
    total.cost, total.images_sha256 = np.mean(costs, axis=0) if costs else None, digest.hexdigest()
    return total


def run_detector(detector: Detector, batch: np.ndarray, batch_size: int | None) -> Arrays:
    """Return the features of a part that metrics use, computed `batch_size` images at a time."""
    step, pieces = batch_size or len(batch), []
    for start in range(0, len(batch), step):
        features = detector(batch[start : start + step])
        names = getattr(detector, "num_features", features)
        pieces.append({name: torch.as_tensor(features[name]).cpu().numpy() for name in names})
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def hash_images(batch: np.ndarray) -> np.ndarray:
    """Return the SHA-256 of images as 32 bytes."""
    return np.frombuffer(hashlib.sha256(batch.tobytes()).digest(), np.uint8)
