"""Features of many images, in parts: the ranks share the parts, and the first one adds them up in order.

So no score depends on how many processes there are. Parts can be kept on disk: a score that was killed goes
on, and other metrics of the same features need no second pass.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from tqdm import tqdm

from runtime.launch import Launch
from runtime.parts import PartFolder

Detector = Callable[[np.ndarray], dict[str, np.ndarray | torch.Tensor]]
# A kind of statistic (FeatureStatistics, AllFeatures, or a metric's own), and the features that it is of.
Need = tuple[type, str]
Arrays = dict[str, np.ndarray]
# Beside the features of a part: the hash of its images as 32 bytes, and what an image cost.
DIGEST, COST = "images_sha256", "cost"
COST_KEYS = ("network_evaluations", "flops")


class Images(Protocol):
    """Images in memory, in files, or of a network that draws them.

    Args:
        count: their number.
        shape: (H, W, C) of an image.
        part_size: in parts of how many images they come; None: of as many as a detector likes.
    """

    count: int
    shape: tuple[int, ...]
    part_size: int | None

    def batches(self, batch_size: int, parts: Iterable[int]) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (part, images (n, H, W, C) uint8); part i begins at image i * batch_size."""
        ...

    def cost(self) -> np.ndarray | None:
        """Cost of an image, to be kept with each part; None: nothing."""
        ...


class ArrayImages:
    """Images (N, H, W, C) uint8 in memory."""

    part_size = None

    def __init__(self, array: np.ndarray):
        self.array, self.count, self.shape = array, len(array), array.shape[1:]

    def batches(self, batch_size: int, parts: Iterable[int]) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (part, images)."""
        for part in parts:
            yield part, self.array[part * batch_size : (part + 1) * batch_size]

    def cost(self) -> None:
        """None: they cost nothing."""


@dataclass
class FeatureSet:
    """Statistics of the features of a set of images: features[FeatureStatistics, "pool"].mean.

    Args:
        labels: (N,) classes that were requested, where the images have any.
        cost: of an image, on average over the parts, where the images cost something.
    """

    num_images: int = 0
    cost: np.ndarray | None = None
    statistics: dict[Need, Any] = field(default_factory=dict)
    labels: np.ndarray | None = None

    def __getitem__(self, need: Need) -> Any:
        return self.statistics[need]


def look(
    detector: Detector | None,
    images: Images,
    *,
    batch_size: int | None,
    launch: Launch,
    description: str,
    kept: PartFolder | None = None,
    replace: bool = False,
) -> Iterator[Arrays]:
    """Extract the features of all images, and return the arrays of each part, in order, on the first rank.

    Args:
        detector: gives the features; None: the images themselves are kept, as `images`.
        batch_size: images that the detector takes at a time, at most; None: all of a part.
        kept: where finished parts are, and go; None: in memory.
        replace: what is kept there of another job may be removed.
    """
    size = images.part_size or batch_size or images.count
    num_parts = -(-images.count // size)
    found: dict[int, Arrays] = {}
    with ExitStack() as held:
        if kept is not None and launch.is_main:
            held.enter_context(kept.lock())
        if kept is not None and launch.world_size == 1:
            held.enter_context(kept.left_if_filled())
        todo = launch.broadcast_from_main(lambda: kept.start(replace) if kept else range(num_parts))
        finished = images.count - sum(min(size, images.count - part * size) for part in todo)
        bar = {"total": images.count, "initial": finished, "desc": description, "unit": "image"}
        quick = detector is None and kept is None  # images in memory, or in a file
        with tqdm(**bar, disable=quick or not launch.is_main) as progress:
            for part, batch in images.batches(size, todo[launch.rank :: launch.world_size]):
                arrays = {DIGEST: digest_of_images(batch)}
                arrays |= {"images": batch} if detector is None else features_of(detector, batch, batch_size)
                if (cost := images.cost()) is not None:
                    arrays[COST] = cost
                if kept is None:
                    found[part] = arrays
                else:
                    kept.write(part, arrays)
                progress.update(min(len(batch) * launch.world_size, images.count - progress.n))
        if kept is None:
            found = dict(launch.gather_items([*found.items()]))
        launch.barrier()
    if not launch.is_main:
        return iter(())
    if kept is not None and (missing := len(set(range(num_parts)) - kept.done())):
        raise ValueError(f"{missing} of {num_parts} parts did not come: run the same command again")
    return (found[i] if kept is None else kept.read(i) for i in range(num_parts))


def add_up(
    parts: Iterable[Arrays], needs: Iterable[Need], num_images: int, device: torch.device
) -> tuple[FeatureSet, str]:
    """Add up statistics of the features in parts that come in order, and hash the images.

    Memory grows with the number of images only where AllFeatures are needed.
    """
    found, num_seen, digest = FeatureSet(num_images), 0, hashlib.sha256()
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
    found.cost = np.mean(costs, axis=0) if costs else None
    return found, digest.hexdigest()


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
