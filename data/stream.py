"""The endless stream of training entries: where a run stands in it follows from its step alone."""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from data.latents import LatentDataset

HELD_OUT_DRAWS = 1_000_000_000


class StreamOrder:
    """Yield the entries of each micro-batch of one process, from `start_step` on, for ever.

    Position p of the stream is entry p mod n of permutation p // n, where permutation e is drawn from (seed, e). Step s
    takes positions s * batch_size and following; micro-batch m of a step belongs to process m mod num_processes.
    """

    def __init__(
        self,
        ids: np.ndarray,
        *,
        seed: int,
        batch_size: int,
        micro_batch_size: int,
        start_step: int,
        process_index: int,
        num_processes: int,
    ):
        self.ids, self.seed = ids, seed
        self.batch_size, self.micro_batch_size = batch_size, micro_batch_size
        self.start_step, self.process_index, self.num_processes = start_step, process_index, num_processes
        self._permutation = lru_cache(maxsize=2)(self._draw_permutation)

    def __iter__(self) -> Iterator[np.ndarray]:
        step = self.start_step
        while True:
            first = step * self.batch_size
            for micro in range(self.process_index, self.batch_size // self.micro_batch_size, self.num_processes):
                yield self.entries(first + micro * self.micro_batch_size + np.arange(self.micro_batch_size))
            step += 1

    def entries(self, positions: np.ndarray) -> np.ndarray:
        """Return the entries at positions of the stream; a batch may straddle permutations."""
        epochs, offsets = np.divmod(positions, len(self.ids))
        entries = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            entries[here] = self.ids[self._permutation(int(epoch))[offsets[here]]]
        return entries

    def _draw_permutation(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.ids))


class _Reader(Dataset):
    def __init__(self, dataset: LatentDataset):
        self.dataset = dataset

    def __getitem__(self, ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.dataset.read(ids)


def stream(
    dataset: LatentDataset,
    start_step: int,
    *,
    seed: int,
    batch_size: int,
    micro_batch_size: int,
    process_index: int,
    num_processes: int,
    num_workers: int,
    pin_memory: bool,
) -> DataLoader:
    """Return the micro-batches (stored entries, labels) of one process, read ahead by `num_workers` processes."""
    order = StreamOrder(
        dataset.train_ids,
        seed=seed,
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        start_step=start_step,
        process_index=process_index,
        num_processes=num_processes,
    )
    return DataLoader(_Reader(dataset), batch_size=None, sampler=order, num_workers=num_workers, pin_memory=pin_memory)


def held_out_batches(
    dataset: LatentDataset, batch_size: int, device: torch.device, process_index: int, num_processes: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
    """Yield (batch index, latents, labels) of this process's share of the held-out entries, the same in every run."""
    starts = range(0, len(dataset.held_out_ids), batch_size)
    for index in range(process_index, len(starts), num_processes):
        stored, labels = dataset.read(dataset.held_out_ids[starts[index] : starts[index] + batch_size])
        # Not the stream of the loss, which is seeded by the index as well.
        generator = torch.Generator(device).manual_seed(HELD_OUT_DRAWS + index)
        latents = dataset.manifest.to_latents(stored.to(device), generator)
        yield index, latents, None if labels is None else labels.to(device)
