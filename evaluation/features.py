"""Features of many images, in parts: the ranks share the parts, and the first one adds them up in order.

So no score depends on how many processes there are. Parts can be kept on disk: a score that was killed goes
on, and other metrics of the same features need no second pass.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from runtime.launch import Launch
from runtime.parts import Arrays, Part, PartCache

Detector = Callable[[np.ndarray], dict[str, np.ndarray | torch.Tensor]]
# A kind of statistic (FeatureStatistics, AllFeatures, or a metric's own), and the features that it is of.
Need = tuple[type, str]
# Beside the features of a part: the hash of its images as 32 bytes, and what an image cost.
DIGEST, COST = "images_sha256", "cost"
COST_KEYS = ("network_evaluations", "flops")


class Images(Protocol):
    """Images in memory, in files, or of a network that draws them.

    Args:
        count: their number.
        shape: (H, W, C) of an image.
        part_size: number of images in a part; None: as many as a detector takes.
    """

    count: int
    shape: tuple[int, ...]
    part_size: int | None

    def batches(self, batch_size: int, parts: Iterable[int]) -> Iterator[Part]:
        """Yield parts; part i begins at image i * batch_size."""
        ...


class ArrayImages:
    """Images (N, H, W, C) uint8 in memory."""

    part_size = None

    def __init__(self, array: np.ndarray):
        self.array, self.count, self.shape = array, len(array), array.shape[1:]

    def batches(self, batch_size: int, parts: Iterable[int]) -> Iterator[Part]:
        """Yield parts."""
        for part in parts:
            yield Part(part, self.array[part * batch_size : (part + 1) * batch_size])


@dataclass
class FeatureSet:
    """Statistics of the features of a set of images: features[FeatureStatistics, "pool"].mean.

    Args:
        cost: of an image, on average over the parts, where the images cost something.
        images_sha256: the hash of the hashes of the images, part by part.
        labels: (N,) classes that were requested, where the images have any.
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
    """Extract the features of all images, and return the arrays of each part, in order, on the first rank.

    Args:
        detector: None: the images themselves are the features, as `images`.
        cache: see `new_cache`; None: in memory, without a progress bar.
        batch_size: images that the detector takes at a time, at most; None: all, as one part, on the first
            rank, and the images are cached.
        description, after_part: see `PartCache.fill`.
    """
    each_part, size = None if batch_size is None else detector, part_size(images, batch_size)

    def make(indices: Iterable[int]) -> Iterator[tuple[int, Arrays]]:
        for part in images.batches(size, indices):
            arrays = {"images": part.images}
            if each_part is not None:
                arrays = features_of(each_part, part.images, batch_size)
            arrays[DIGEST] = digest_of_images(part.images)
            yield part.index, arrays if part.cost is None else arrays | {COST: part.cost}

    num_parts = -(-images.count // size)
    if cache is None:
        made = dict(launch.gather_items([*make(range(launch.rank, num_parts, launch.world_size))]))
    else:
        cache.fill(make, launch, description, after_part)
    if not launch.is_main:
        return iter(())
    parts = map(made.pop if cache is None else cache.read, range(num_parts))
    return parts if detector is each_part else iter([_at_once(detector, [*parts])])


def _at_once(detector: Detector, parts: list[Arrays]) -> Arrays:
    images = np.concatenate([arrays["images"] for arrays in parts])
    joined = {**features_of(detector, images, None), DIGEST: digest_of_images(images)}
    costs = [arrays[COST] for arrays in parts if COST in arrays]
    return joined | {COST: np.mean(costs, axis=0)} if costs else joined


def part_size(images: Images, batch_size: int | None) -> int:
    """Number of images in a part."""
    return images.part_size or batch_size or images.count


def new_cache(
    images: Images,
    path: Path,
    key: Mapping[str, Any],
    batch_size: int | None = None,
    hint: str = "remove it",
    replace: bool = False,
) -> PartCache:
    """A cache of the parts of images; arguments as in `PartCache`."""
    size = part_size(images, batch_size)
    key = {**key, "part_size": size, "num_images": images.count}
    return PartCache(path, key, images.count, size, hint, replace)


def add_up(
    parts: Iterable[Arrays], needs: Iterable[Need], num_images: int, device: torch.device
) -> FeatureSet:
    """Add up statistics of the features in parts that come in order, and hash the images.

    Memory grows with the number of images only where AllFeatures are needed.
    """
    found, num_seen, digest = FeatureSet(), 0, hashlib.sha256()
    needs, costs = set(needs), []
    for arrays in parts:
        digest.update(arrays.pop(DIGEST).tobytes())
        if COST in arrays:
            costs.append(arrays.pop(COST))
        for kind, name in needs:
            if (kind, name) not in found.statistics:
                found.statistics[kind, name] = kind(arrays[name].shape[-1], device, num_images)
            found[kind, name].update(arrays[name], num_seen)
        num_seen += len(next(iter(arrays.values())))
    if num_seen != num_images:
        raise ValueError(f"{num_seen} images came instead of {num_images}")
    found.cost, found.images_sha256 = np.mean(costs, axis=0) if costs else None, digest.hexdigest()
    return found


def features_of(detector: Detector, batch: np.ndarray, batch_size: int | None) -> Arrays:
    """The features of all images of a part that scores need."""
    step, pieces = batch_size or len(batch), []
    for start in range(0, len(batch), step):
        found = detector(batch[start : start + step])
        names = getattr(detector, "num_features", found)
        pieces.append({name: torch.as_tensor(found[name]).cpu().numpy() for name in names})
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def digest_of_images(batch: np.ndarray) -> np.ndarray:
    """The hash of images as 32 bytes."""
    return np.frombuffer(hashlib.sha256(batch.tobytes()).digest(), np.uint8)
