"""The steps since the last log point: their means, those that were skipped, and spikes of the loss, with the
samples at fault.

Each step is a row on the device; the host sees rows at log points only.

Shapes: P ranks, R steps since the last log point, S samples of a rank and step, F numbers of a row.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from runtime.launch import Launch
from runtime.memory import peak_gib, reset_peak
from training.batches import Batches
from training.clock import Clock

COLUMNS = ("loss", "grad_norm", "skipped", "selection_ratio", "num_forced_bypassed", "tflop")
SKIPPED, RATIO, BYPASSED, TFLOP = range(2, len(COLUMNS))
MAX_NAMED = 4  # samples of a step that are reported, those of the largest loss
LARGEST, PLACES = len(COLUMNS), len(COLUMNS) + MAX_NAMED  # where their losses, and places in the batch, begin
NUM_FIELDS = PLACES + MAX_NAMED
EMPTY = -1.0  # fewer samples than MAX_NAMED
MAX_ENTRIES = 16  # in a message
# A spike is so many standard deviations above the exponential moving average of the steps before it.
SPIKE_DEVIATIONS, DECAY, MIN_STEPS = 8.0, 0.99, 100
STATE = ("start_sec", "num_in_row", "mean", "variance", "num_applied")


class NotFinite(Exception):
    """Too many steps in a row gave no finite loss or gradient."""

    def __init__(self, message: str, details: dict[str, Any]):
        super().__init__(message)
        self.details = details


@dataclass(frozen=True)
class Work:
    """What an image costs, and what a device is made for.

    Args:
        flops: of a training step for an image, at the ratios of the routes.
        peak_flops_per_sec: of a device, as specified; None where it is not known.
    """

    flops: Callable[[tuple[float, ...]], float]
    peak_flops_per_sec: float | None


@dataclass(eq=False, repr=False)
class Window:
    """The steps since the last log point, and statistics of the losses of those before.

    Args:
        routed: ratios of routes are logged.
        work: None where it is not known; it is not logged then.
        max_skipped_steps: so many skipped steps in a row end the run.
    """

    launch: Launch
    clock: Clock
    batches: Batches
    routed: bool
    work: Work | None
    log_every: int
    max_skipped_steps: int

    def __post_init__(self) -> None:
        self.places = self.batches.places.to(self.launch.device).float()  # (S,)
        # (R, F), and room for more.
        self.rows = torch.zeros(self.log_every, NUM_FIELDS, device=self.launch.device)
        self.num_rows, self.start_sec = 0, 0.0
        self.num_in_row = 0  # skipped steps in a row, up to the last log point
        self.mean, self.variance, self.num_applied = 0.0, 0.0, 0  # of the losses of steps that applied

    def add_bypassed(self, num_tokens: torch.Tensor) -> None:
        """Add the tokens of a micro-batch that bypass although a mask forces them to stay."""
        self.rows[self.num_rows, BYPASSED] += num_tokens

    def add_step(
        self,
        loss: torch.Tensor,
        grad_norm: torch.Tensor,
        skipped: torch.Tensor,
        ratios: tuple[float, ...],
        losses: Sequence[torch.Tensor],
    ) -> None:
        """Add a step.

        Args:
            loss, grad_norm: 0-d.
            skipped: 1 if the step was skipped, else 0 (0-d).
            ratios: of the routes.
            losses: of its samples, (S,) in parts.
        """
        # A loss that is not a number counts as the largest.
        sample_losses = torch.cat(list(losses)).nan_to_num(math.inf, math.inf, -math.inf)  # (S,)
        largest, indices = sample_losses.topk(min(MAX_NAMED, len(sample_losses)))
        row = self.rows[self.num_rows]
        row[0], row[1], row[SKIPPED] = loss, grad_norm, skipped
        row[RATIO] = sum(ratios) / max(1, len(ratios))
        row[TFLOP] = self.work.flops(ratios) * self.batches.batch_size / 1e12 if self.work else 0.0
        row[LARGEST:] = EMPTY
        row[LARGEST : LARGEST + len(largest)] = largest
        row[PLACES : PLACES + len(largest)] = self.places[indices]
        self.num_rows += 1

    def values(self) -> dict[str, Any]:
        """Means over the steps that applied, on all ranks."""
        rows = self._gathered_rows()[..., : len(COLUMNS)]  # (P, R, len(COLUMNS))
        rows[..., :2] = (rows[..., :2] * (1 - rows[..., SKIPPED, None])).nan_to_num(0.0, 0.0, 0.0)
        means = reduce(torch.add, rows.unbind(1)).sum(0).div(self.launch.world_size)
        sums, num_steps = dict(zip(COLUMNS, means.tolist(), strict=True)), rows.shape[1]
        applied = num_steps - sums["skipped"]
        window_sec = self.clock.train_time_sec - self.start_sec
        values = {
            "loss": sums["loss"] / applied if applied else None,
            "grad_norm": sums["grad_norm"] / applied if applied else None,
            "num_skipped_steps": int(sums["skipped"]),
            "images_per_sec": num_steps * self.batches.batch_size / window_sec,
            "train_time_sec": self.clock.train_time_sec,
        }
        if self.work:
            values["tflops_per_sec"] = sums["tflop"] / window_sec
        if self.work and self.work.peak_flops_per_sec:
            peak_tflops = self.work.peak_flops_per_sec * self.launch.world_size / 1e12
            values["utilisation"] = values["tflops_per_sec"] / peak_tflops
        with suppress(OSError):  # where there is no /proc
            values["peak_memory_gib"] = peak_gib(self.launch.device)
        if self.routed:
            values["selection_ratio"] = sums["selection_ratio"] / num_steps
            values["num_forced_bypassed"] = round(sums["num_forced_bypassed"] * self.launch.world_size)
        return values

    def report(self, step: int) -> dict[str, list[dict[str, Any]]]:
        """Report skipped steps and spikes up to `step` (from 1).

        Raises:
            NotFinite: too many of them in a row were skipped.
        """
        rows = [*map(_merge_ranks, zip(*self._gathered_rows().tolist(), strict=True))]
        found, first_skipped = {"skipped_steps": [], "loss_spikes": []}, None
        for at, row in enumerate(rows, start=step - len(rows) + 1):
            self.num_in_row = self.num_in_row + 1 if row[SKIPPED] else 0
            if row[SKIPPED]:
                found["skipped_steps"].append({"step": at, "entries": self._largest(at, row)})
            elif self._is_spike(loss := row[0]):
                spike = {"step": at, "loss": loss, "entries": self._largest(at, row)}
                found["loss_spikes"].append(spike)
            if self.num_in_row >= self.max_skipped_steps:
                first_skipped = at - self.num_in_row + 1
        if first_skipped is not None:
            entries = self.batches.entries(first_skipped - 1)
            more = " and more" if len(entries) > MAX_ENTRIES else ""
            raise NotFinite(
                f"no finite loss or gradient in {self.max_skipped_steps} or more steps in a row, from step "
                f"{first_skipped} on (max_skipped_steps); its batch was {entries[:MAX_ENTRIES]}{more}",
                {"step": first_skipped, "entries": entries, "skipped_steps": found["skipped_steps"]},
            )
        return {key: steps for key, steps in found.items() if steps}

    def start(self) -> None:
        """Start the next window."""
        self.rows.zero_()
        self.num_rows, self.start_sec = 0, self.clock.train_time_sec
        with suppress(OSError):
            reset_peak(self.launch.device)

    def state_dict(self) -> dict[str, Any]:
        """The rows of all ranks, and the statistics."""
        return {"rows": self._gathered_rows().tolist(), **{key: getattr(self, key) for key in STATE}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint; on another number of ranks, each takes the rows of all, and its share
        of the counts.
        """
        for key in STATE:
            setattr(self, key, state[key])
        # JSON has null for a loss that was not finite.
        saved = [[[math.inf if x is None else x for x in row] for row in rows] for rows in state["rows"]]
        same = len(saved) == self.launch.world_size
        rows = saved[self.launch.rank] if same else [*map(_merge_ranks, zip(*saved, strict=True))]
        self.num_rows = len(rows)
        restored = torch.tensor(rows, device=self.rows.device).reshape(len(rows), NUM_FIELDS)
        restored[:, BYPASSED] *= len(saved) / self.launch.world_size
        self.rows = torch.cat([restored, torch.zeros_like(self.rows)])  # room for another window

    def _gathered_rows(self) -> torch.Tensor:
        """(P, R, F) on the CPU."""
        # SYNC: the rows come to the host. All are gathered: some backends cannot gather an empty tensor.
        return self.launch.gather(self.rows)[:, : self.num_rows].cpu().clone()

    def _is_spike(self, loss: float) -> bool:
        limit = self.mean + SPIKE_DEVIATIONS * math.sqrt(self.variance)
        is_spike = self.num_applied >= MIN_STEPS and loss > limit
        # A spike counts as the limit: it does not hide the next one, and a lasting rise becomes the mean.
        delta = (limit if is_spike else loss) - self.mean
        self.num_applied += 1
        weight = max(1 - DECAY, 1 / self.num_applied)
        self.mean += weight * delta
        self.variance = (1 - weight) * (self.variance + weight * delta**2)
        return is_spike

    def _largest(self, step: int, row: Sequence[float]) -> list[int]:
        entries = self.batches.entries(step - 1)
        return [entries[int(place)] for place in row[PLACES:] if place != EMPTY]


def _merge_ranks(of_ranks: Sequence[Sequence[float]]) -> list[float]:
    """Merge the rows of all ranks: means, and the largest losses of samples."""
    means = [sum(values) / len(of_ranks) for values in [*zip(*of_ranks, strict=True)][:LARGEST]]
    losses = {row[PLACES + i]: row[LARGEST + i] for row in of_ranks for i in range(MAX_NAMED)}
    losses.pop(EMPTY, None)
    places = sorted(losses, key=lambda place: (-losses[place], place))[:MAX_NAMED]
    places += [EMPTY] * (MAX_NAMED - len(places))
    return [*means, *(losses.get(place, EMPTY) for place in places), *places]
