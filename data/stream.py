"""The endless stream of training entries. The position of a run in it depends only on the step."""

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from data.latents import LatentDataset

HELD_OUT_DRAWS = 1_000_000_000
HFLIP_DRAWS, CAPTION_DRAWS = 1_000_000_001, 1_000_000_002  # larger than any epoch
COVERAGE_ENTRIES = 1024
TokenMask = Callable[[torch.Tensor], torch.Tensor]  # masks (N, H, W) -> masked tokens (N, T) bool


class StoredBatch(NamedTuple):
    """Input of one forward: stored entries (N, C', H, W), labels (N,) or captions, and, if used, masks
    (N, H, W) and features (N, T, F).

    `num_forced` is the largest number of tokens that the mask of one sample keeps, over all samples of the
    step, or 0 if it is not counted.
    """

    stored: torch.Tensor
    labels: torch.Tensor | None
    masks: torch.Tensor | None
    num_forced: int
    features: torch.Tensor | None = None


class Draw(NamedTuple):
    """The entries of a micro-batch."""

    ids: np.ndarray
    flipped: np.ndarray | None  # 1: flipped, 0: not; None without hflip
    step_ids: np.ndarray  # all entries of the step
    captions: np.ndarray  # index of each entry's caption


@dataclass(frozen=True)
class StreamOrder:
    """The endless sequence of micro-batches of one rank, starting at `start_step`.

    Position p of the stream is entry p mod n of permutation p // n. Permutation e is drawn from (seed, e).
    Step s uses the batch_size positions that start at s * batch_size. Micro-batch m of a step belongs to rank
    m mod world_size. Flips and captions are drawn from (seed, step).
    """

    ids: np.ndarray
    seed: int
    batch_size: int
    micro_batch_size: int
    start_step: int = 0
    rank: int = 0
    world_size: int = 1
    hflip: bool = False
    num_captions: int = 1

    def __iter__(self) -> Iterator[Draw]:
        step = self.start_step
        while True:
            batch = self.batch(step)
            flipped = self._draw(step, HFLIP_DRAWS, 2) if self.hflip else None
            captions = self._draw(step, CAPTION_DRAWS, self.num_captions)
            for micro in range(self.rank, self.batch_size // self.micro_batch_size, self.world_size):
                part = slice(micro * self.micro_batch_size, (micro + 1) * self.micro_batch_size)
                yield Draw(batch[part], None if flipped is None else flipped[part], batch, captions[part])
            step += 1

    def _draw(self, step: int, stream: int, count: int) -> np.ndarray:
        return np.random.default_rng([self.seed, step, stream]).integers(count, size=self.batch_size)

    def batch(self, step: int) -> np.ndarray:
        """Return the entries (batch_size,) of a step, by micro-batch. A batch can span several epochs."""
        positions = step * self.batch_size + np.arange(self.batch_size)
        epochs, offsets = np.divmod(positions, len(self.ids))
        entries = np.empty_like(positions)
        for epoch in np.unique(epochs):
            mask = epochs == epoch
            entries[mask] = self.ids[_permutation(self.seed, int(epoch), len(self.ids))[offsets[mask]]]
        return entries


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count)


@dataclass(eq=False)
class _Reader(Dataset):
    dataset: LatentDataset
    with_masks: bool
    token_mask: TokenMask | None
    with_features: bool
    with_text: bool

    def __post_init__(self) -> None:
        self.counted, self.num_forced = np.empty(0), 0

    def __getitem__(self, draw: Draw) -> StoredBatch:
        masks = self.dataset.read_masks(draw.ids, draw.flipped) if self.with_masks else None
        # All ranks count over the whole step, so they agree without communication. Flips have equal counts.
        if self.token_mask and not np.array_equal(draw.step_ids, self.counted):
            kept = self.token_mask(self.dataset.read_masks(draw.step_ids))  # (batch_size, T)
            self.counted, self.num_forced = draw.step_ids, int(kept.sum(dim=1).max())
        features = self.dataset.read_features(draw.ids, draw.flipped) if self.with_features else None
        stored, labels = self.dataset.read(draw.ids, draw.flipped)
        labels = self.dataset.read_text(draw.ids, draw.captions) if self.with_text else labels
        return StoredBatch(stored, labels, masks, self.num_forced, features)


def stream(
    dataset: LatentDataset,
    start_step: int,
    *,
    seed: int,
    batch_size: int,
    micro_batch_size: int,
    rank: int,
    world_size: int,
    num_workers: int,
    pin_memory: bool,
    with_masks: bool = False,
    token_mask: TokenMask | None = None,
    with_features: bool = False,
    with_text: bool = False,
) -> DataLoader:
    """Return a loader of one rank's StoredBatches. `num_workers` processes read ahead.

    Args:
        token_mask: maps masks to the tokens that they keep, to count these. None: do not count.
        with_text: read captions instead of labels.
    """
    share = batch_size, micro_batch_size, start_step, rank, world_size
    num_captions = dataset.manifest.text["num_captions"] if with_text and dataset.manifest.text else 1
    order = StreamOrder(dataset.train_ids, seed, *share, dataset.manifest.hflip, num_captions)
    reader = _Reader(dataset, with_masks, token_mask, with_features, with_text)
    options = {"num_workers": num_workers, "pin_memory": pin_memory, "worker_init_fn": _ignore_signals}
    return DataLoader(reader, batch_size=None, sampler=order, **options)


def _ignore_signals(worker: int) -> None:
    # Schedulers and Ctrl-C signal all processes. Workers must run until the main process finishes its step.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def entries_by_step(dataset: LatentDataset, seed: int, batch_size: int) -> Callable[[int], list[int]]:
    """Return a function from a step to the entries of its batch, in order."""
    order = StreamOrder(dataset.train_ids, seed, batch_size, micro_batch_size=batch_size)
    return lambda step: order.batch(step).tolist()


def mask_coverage(dataset: LatentDataset, token_mask: TokenMask, batch_size: int) -> float:
    """Estimate the fraction of tokens under the largest mask of a batch, averaged over batches."""
    ids = dataset.train_ids[:: 1 + len(dataset.train_ids) // COVERAGE_ENTRIES]
    covered = token_mask(dataset.read_masks(ids)).float().mean(dim=1).numpy()
    return float(np.mean([part.max() for part in np.array_split(covered, -(-len(covered) // batch_size))]))


def held_out_batches(
    dataset: LatentDataset,
    batch_size: int,
    device: torch.device,
    rank: int,
    world_size: int,
    with_masks: bool = False,
    with_text: bool = False,
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None, torch.Tensor | None]]:
    """Yield index, latents, labels or captions, masks of this rank's held-out batches, equal in all runs."""
    starts = range(0, len(dataset.held_out_ids), batch_size)
    for index in range(rank, len(starts), world_size):
        ids = dataset.held_out_ids[starts[index] : starts[index] + batch_size]
        stored, labels = dataset.read(ids)
        labels = dataset.read_text(ids) if with_text else labels
        masks = dataset.read_masks(ids).to(device) if with_masks else None
        # The loss seeds its draws by the index: use another seed here.
        generator = torch.Generator(device).manual_seed(HELD_OUT_DRAWS + index)
        latents = dataset.manifest.to_latents(stored.to(device), generator)
        yield index, latents, None if labels is None else labels.to(device), masks
