"""WebDataset shards: a latent folder in pieces, on a disk or a server, as data.make_shards writes them.

Each rank reads shards of its own, a few at a time, and shuffles what it has read. Which, and in which order,
follows from (seed, epoch) and the world size, so that a run resumes at the shard and the sample where it
stopped. The format is in data/README.md.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from data.latents import check_labels
from data.manifest import FILES, LatentManifest, load_manifest
from data.remote import read_file
from data.stream import StoredBatch
from data.tars import samples
from runtime.arrays import MAX_HEADER_BYTES, parse_array
from runtime.files import MAX_JSON_BYTES, parse_json, read_bounded

SHARDS_FILE = "shards.json"
SHARDS_AT_ONCE = 4  # read and shuffled together, while the group before is used
ORDER_DRAWS, GROUP_DRAWS = 1_000_000_002, 1_000_000_003  # separate the random streams
NOTE = "streamed: a run resumes at the same shard and sample, exempt from the promise of bitwise equality"


class ShardDataset:
    """Shards at a path or URL; the held-out entries, without their flips, are in memory.

    Args:
        shards: number of entries of each shard, by name; only those called train-N.tar are trained on.
        encoder: path of the encoder, if not the manifest's.
    """

    def __init__(self, url: str, manifest: LatentManifest, shards: dict[str, int], encoder: str | None):
        self.url, self.manifest, self.encoder = url.rstrip("/"), manifest, encoder
        train = {name: count for name, count in shards.items() if name.startswith("train")}
        held_out = {name: count for name, count in shards.items() if name not in train}
        self.names, self.counts = list(train), np.array(list(train.values()))
        about = [{**asdict(manifest), "origin": None}, train, held_out]
        self._fingerprint = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        self._latents = self._labels = None
        parts = [self.read_shard(name, count) for name, count in held_out.items()]  # checks the counts
        self.held_out_ids = np.arange(sum(held_out.values()))
        if parts:
            latents, labels = zip(*parts, strict=True)
            self._latents = np.concatenate(latents)[:, 0] if manifest.hflip else np.concatenate(latents)
            self._labels = np.concatenate(labels) if manifest.num_classes else None

    def read(self, ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Read the stored latents (N, C', H, W) and labels (N,) of held-out entries."""
        labels = None if self._labels is None else torch.from_numpy(self._labels[ids])
        return torch.from_numpy(self._latents[ids]), labels

    def describe(self) -> dict[str, Any]:
        """The manifest, a fingerprint of it and of the list of shards, and a note for the user."""
        manifest = {**asdict(self.manifest), "checksums": None}
        return {"fingerprint": self._fingerprint, "manifest": manifest, "note": NOTE}

    def read_shard(self, name: str, count: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Read the latents (count, [2,] C, H, W) and labels (count,) of a shard."""
        return read_file(self.url, name, partial(self._parse_shard, name, count))

    def _parse_shard(self, name: str, count: int, stream: BinaryIO) -> tuple[np.ndarray, np.ndarray | None]:
        manifest = self.manifest
        dtype, shape = np.dtype(manifest.dtype), manifest.stored_shape[1:]
        latents, labels = [], []  # memory for entries that are there, not for those that are promised
        for _, sample in samples(stream, math.prod(shape) * dtype.itemsize + MAX_HEADER_BYTES):
            array = parse_array(sample["latents.npy"])
            if len(latents) == count or array.shape != shape or array.dtype != dtype:
                rule = f"must be {dtype} {shape}, {count} of them"
                raise ValueError(f"entry {len(latents)} is {array.dtype} {array.shape}, {rule}")
            latents.append(array)
            labels.append(int(sample["cls"]) if manifest.num_classes else 0)
        if len(latents) != count:
            raise ValueError(f"it holds {len(latents)} entries, must hold {count}")
        if not manifest.num_classes:
            return np.stack(latents), None
        check_labels(np.array(labels), manifest.num_classes, Path(name))
        return np.stack(latents), np.array(labels, dtype=np.int64)


def open_shards(
    path: str,
    input_size: int | None = None,
    in_channels: int | None = None,
    num_classes: int | None = None,
    encoder: str | None = None,
) -> ShardDataset:
    """Open shards at a path or URL and check them against the sizes that a run expects (None: any).

    Args:
        encoder: path of the encoder that decodes samples, if not the manifest's.

    Raises:
        OSError: the manifest, the list of shards or a held-out shard is not there or cannot be read.
        ValueError: the address is not allowed, a file is damaged, or the run expects other data.
    """
    manifest = read_shard_manifest(path)
    manifest.check_sizes(path, input_size=input_size, in_channels=in_channels, num_classes=num_classes)
    shards = _list_of_shards(path)
    if (listed := sum(shards.values())) != manifest.count:
        raise ValueError(f"{path}/{SHARDS_FILE} lists {listed} entries, the manifest {manifest.count}")
    return ShardDataset(path, manifest, shards, encoder)


def _list_of_shards(path: str) -> dict[str, int]:
    file = f"{path}/{SHARDS_FILE}"
    try:
        shards = parse_json(_fetch(path, SHARDS_FILE))
        # Names are put after the path: one with a colon or a slash could lead anywhere.
        is_name = re.compile(r"(train|held_out)-\d+\.tar").fullmatch
        wrong = [name for name, n in shards.items() if not is_name(name) or type(n) is not int or n < 1]
    except (ValueError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if wrong or not shards:
        rule = "must list shards train-N.tar and held_out-N.tar"
        raise ValueError(f"{file} {rule}: {(wrong or ['nothing'])[0]}")
    return shards


@lru_cache
def read_shard_manifest(path: str) -> LatentManifest:
    """Read the manifest of shards at a path or URL."""
    data = _fetch(path, FILES["manifest"])
    return load_manifest(BytesIO(data), f"{path}/{FILES['manifest']}")


def _fetch(path: str, name: str) -> bytes:
    try:
        return read_file(path, name, lambda stream: read_bounded(stream, MAX_JSON_BYTES))
    except OSError as error:
        raise type(error)(f"data.path={path} must hold shards, but {error}") from error


@dataclass(frozen=True)
class ShardStream:
    """Yield the micro-batches of one rank from `start_step` on, without end.

    In epoch e the shards are permuted by a draw from (seed, e), rank r takes every world_size-th of them from
    r on, and shuffles each group of SHARDS_AT_ONCE by a draw from (seed, e, shards). Epochs follow each other
    within a batch, so that all batches have one size.
    """

    dataset: ShardDataset
    start_step: int
    seed: int
    batch_size: int
    micro_batch_size: int
    rank: int = 0
    world_size: int = 1
    pin_memory: bool = False

    def __post_init__(self):
        if (num_shards := len(self.dataset.names)) < self.world_size:
            what = f"data.path={self.dataset.url} has {num_shards} shards"
            raise ValueError(f"{what}, fewer than {self.world_size} processes")

    def __iter__(self) -> Iterator[StoredBatch]:
        left: list[tuple[np.ndarray, ...]] = []  # the start of a micro-batch, from the groups before
        for group in self._read_groups():
            start = 0
            while start < len(group[0]):
                end = start + self.micro_batch_size - sum(len(arrays[0]) for arrays in left)
                left.append(tuple(array[start:end] for array in group))
                start = min(end, len(group[0]))
                if start == end:
                    tensors = [torch.from_numpy(np.concatenate(parts)) for parts in zip(*left, strict=True)]
                    if self.pin_memory:
                        tensors = [tensor.pin_memory() for tensor in tensors]
                    stored, labels = (*tensors, None)[:2]
                    yield StoredBatch(stored, labels, masks=None, num_forced=0)
                    left = []

    def groups(self) -> Iterator[tuple[int, list[int], int]]:
        """Yield (epoch, shards, entries to skip) from `start_step` on, without end."""
        skip = self.start_step * (self.batch_size // self.world_size)
        for epoch in count():
            shards = self._shards(epoch)
            for start in range(0, len(shards), SHARDS_AT_ONCE):
                group = shards[start : start + SHARDS_AT_ONCE]
                num_entries = int(self.dataset.counts[group].sum())
                if skip >= num_entries:
                    skip -= num_entries
                else:
                    yield epoch, group, skip
                    skip = 0

    def _shards(self, epoch: int) -> list[int]:
        order = np.random.default_rng([self.seed, epoch, ORDER_DRAWS]).permutation(len(self.dataset.names))
        return order[self.rank :: self.world_size].tolist()

    def _read_groups(self) -> Iterator[tuple[np.ndarray, ...]]:
        groups = self.groups()
        with ThreadPoolExecutor(1) as pool:
            ahead = pool.submit(self._read_group, *next(groups))
            while True:
                group, ahead = ahead.result(), pool.submit(self._read_group, *next(groups))
                yield group

    def _read_group(self, epoch: int, shards: list[int], skip: int) -> tuple[np.ndarray, ...]:
        """Read latents (N, C', H, W), each an image or its flip, and labels (N,), if any, shuffled."""
        rng, parts = np.random.default_rng([self.seed, epoch, GROUP_DRAWS, *shards]), []
        for shard in shards:
            size = int(self.dataset.counts[shard])
            latents, labels = self.dataset.read_shard(self.dataset.names[shard], size)
            if self.dataset.manifest.hflip:
                latents = latents[np.arange(size), rng.integers(2, size=size)]
            parts.append((latents,) if labels is None else (latents, labels))
        arrays = [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]
        order = rng.permutation(len(arrays[0]))[skip:]
        return tuple(array[order] for array in arrays)


def shards_by_step(
    dataset: ShardDataset, seed: int, batch_size: int, micro_batch_size: int, world_size: int
) -> Callable[[int], list[str]]:
    """Build the function from a step to the shards that each sample of its batch may come from."""

    def names(step: int) -> list[str]:
        share = dataset, step, seed, batch_size, micro_batch_size
        starts = [next(ShardStream(*share, rank, world_size).groups()) for rank in range(world_size)]
        shards = [" or ".join(dataset.names[i] for i in group) for _, group, _ in starts]
        return [shards[i // micro_batch_size % world_size] for i in range(batch_size)]

    return names
