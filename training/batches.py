"""The micro-batches of this rank, ready for the network.

Every random draw is a function of (seed, step, index of the micro-batch within the global batch), so that a
resumed run, or one on another number of ranks, draws the same.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch

from runtime.launch import Launch

Stored = tuple[Any, ...]


class MicroBatch(NamedTuple):
    """Inputs of one forward pass, on the device."""

    x: torch.Tensor  # (N, C, H, W) clean latents
    class_labels: torch.Tensor | None  # (N,)
    masks: torch.Tensor | None  # (N, H, W) weights of the loss
    force_keep: torch.Tensor | None  # (N, T) tokens that must not bypass
    num_forced: int  # largest number of forced tokens in a sample of the global batch
    generator: torch.Generator  # for all random draws
    features: torch.Tensor | None = None  # (N, T, F) of the images, for alignment


@dataclass(eq=False, repr=False)
class Batches:
    """The endless stream of this rank's micro-batches.

    Args:
        read: read(step) yields this rank's micro-batches from `step` on: entries, labels, masks, num_forced,
            and features, which a reader without them leaves out.
        entries: entries(step) returns the entries of the global batch of a step (from 0), in order.
        to_latents: to_latents(entries, generator) converts stored entries to the network's input.
        token_mask: converts masks (N, H, W) to the tokens (N, T) that must not bypass; None: no masks.
        check_std: called with the standard deviation of the first micro-batch of a run.
    """

    launch: Launch
    read: Callable[[int], Iterable[Stored]]
    entries: Callable[[int], list[int]]
    to_latents: Callable[[torch.Tensor, torch.Generator], torch.Tensor]
    token_mask: Callable[[torch.Tensor], torch.Tensor] | None
    check_std: Callable[[torch.Tensor], None]
    seed: int
    batch_size: int
    micro_batch_size: int

    def __post_init__(self) -> None:
        # Indices of this rank's micro-batches and samples within the global batch.
        num_micro_batches = self.batch_size // self.micro_batch_size
        self.indices = range(self.launch.rank, num_micro_batches, self.launch.world_size)
        samples = torch.arange(self.batch_size).view(-1, self.micro_batch_size)
        self.sample_indices = samples[self.indices].flatten()  # (S,)

    def from_step(self, step: int) -> Iterator[Iterator[MicroBatch]]:
        """Yield the micro-batches of each step, from `step` on, without end."""
        stored = iter(self.read(step))
        for now in count(step):
            yield self._micro_batches(now, stored)

    def generator(self, step: int, index: int) -> torch.Generator:
        """Return a seeded generator for micro-batch `index` of the global batch of a step."""
        state = np.random.SeedSequence([self.seed, step, index]).generate_state(1, np.uint64)
        return torch.Generator(self.launch.device).manual_seed(int(state[0]))

    def _micro_batches(self, step: int, stored: Iterator[Stored]) -> Iterator[MicroBatch]:
        for index in self.indices:
            entries, labels, masks, num_forced, *rest = next(stored)
            labels, masks, *rest = (
                t if t is None else t.to(self.launch.device, non_blocking=True)
                for t in (labels, masks, *rest)
            )
            generator = self.generator(step, index)
            x = self.to_latents(entries.to(self.launch.device, non_blocking=True), generator)
            if step == index == 0:
                self.check_std(x.std())  # SYNC: once per run
            force_keep = None if masks is None or self.token_mask is None else self.token_mask(masks)
            yield MicroBatch(x, labels, masks, force_keep, num_forced, generator, *rest)
