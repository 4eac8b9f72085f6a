"""Statistics of the steps since the last log point: means, skipped steps, and spikes of the loss with the
samples that caused them.

Each step is a row on the device. The host reads the rows only at log points.

Shapes: P ranks, R steps since the last log point, S samples per rank and step, F numbers per row.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from runtime.launch import Launch
from runtime.machine import peak_gib, reset_peak
from training.batches import Batches
from training.clock import Clock

COLUMNS = ("loss", "grad_norm", "alignment_loss", "skipped", "selection_ratio", "num_forced_bypassed")
COLUMNS += ("tflop",)
ALIGNMENT, SKIPPED, RATIO, BYPASSED, TFLOP = range(2, len(COLUMNS))
MAX_NAMED = 4  # samples with the largest losses that are reported per step
LARGEST, INDICES = len(COLUMNS), len(COLUMNS) + MAX_NAMED  # first columns of their losses and batch indices
NUM_FIELDS = INDICES + MAX_NAMED
EMPTY = -1.0  # fills the columns if a step has fewer than MAX_NAMED samples
MAX_ENTRIES = 16  # entries in an error message
# A spike is SPIKE_DEVIATIONS standard deviations above the exponential moving average of earlier steps.
SPIKE_DEVIATIONS, DECAY, MIN_STEPS = 8.0, 0.99, 100
STATE = ("start_sec", "num_in_row", "mean", "variance", "num_applied")


class NotFinite(Exception):
    """Too many consecutive steps had a loss or gradient that is not finite."""

    def __init__(self, message: str, details: dict[str, Any]):
        super().__init__(message)
        self.details = details


@dataclass(frozen=True)
class Work:
    """The cost of an image and the peak speed of a device.

    Args:
        flops: flops(ratios) returns the training FLOPs of an image at these ratios of the routes.
        peak_flops_per_sec: specified peak of one device; None: unknown.
    """

    flops: Callable[[tuple[float, ...]], float]
    peak_flops_per_sec: float | None


@dataclass(eq=False, repr=False)
class Window:
    """The steps since the last log point, and statistics of the losses of earlier steps.

    Args:
        routed: True to log the ratios of the routes.
        aligned: True to log the loss of the alignment.
        work: None: FLOPs are unknown and not logged.
        max_skipped_steps: number of consecutive skipped steps that end the run.
    """

    launch: Launch
    clock: Clock
    batches: Batches
    routed: bool
    aligned: bool
    work: Work | None
    log_every: int
    max_skipped_steps: int

    def __post_init__(self) -> None:
        self.sample_indices = self.batches.sample_indices.to(self.launch.device).float()  # (S,)
        # The first num_rows rows are used: (R, F).
        self.rows = torch.zeros(self.log_every, NUM_FIELDS, device=self.launch.device)
        self.num_rows, self.start_sec = 0, 0.0
        self.num_in_row = 0  # consecutive skipped steps, up to the last log point
        self.mean, self.variance, self.num_applied = 0.0, 0.0, 0  # of the losses of applied steps

    def add_bypassed(self, num_tokens: torch.Tensor) -> None:
        """Add the number of tokens of a micro-batch that bypass although a mask forces them to stay."""
        self.rows[self.num_rows, BYPASSED] += num_tokens

    def add_alignment(self, loss: torch.Tensor) -> None:
        """Add a micro-batch's part (0-d) of the alignment loss of a step, without its weight."""
        self.rows[self.num_rows, ALIGNMENT] += loss

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
            ratios: selection ratios of the routes.
            losses: losses of the samples, one tensor per micro-batch, (S,) in all.
        """
        # NaN counts as the largest loss.
        sample_losses = torch.cat(list(losses)).nan_to_num(math.inf, math.inf, -math.inf)  # (S,)
        largest, order = sample_losses.topk(min(MAX_NAMED, len(sample_losses)))
        row = self.rows[self.num_rows]
        row[0], row[1], row[SKIPPED] = loss, grad_norm, skipped
        row[RATIO] = sum(ratios) / max(1, len(ratios))
        row[TFLOP] = self.work.flops(ratios) * self.batches.batch_size / 1e12 if self.work else 0.0
        row[LARGEST:] = EMPTY
        row[LARGEST : LARGEST + len(largest)] = largest
        row[INDICES : INDICES + len(largest)] = self.sample_indices[order]
        self.num_rows += 1

    def values(self) -> dict[str, Any]:
        """Return means over the applied steps of all ranks."""
        rows = self._gathered_rows()[..., : len(COLUMNS)]  # (P, R, len(COLUMNS))
        rows[..., :SKIPPED] = (rows[..., :SKIPPED] * (1 - rows[..., SKIPPED, None])).nan_to_num(0.0, 0.0, 0.0)
        means = reduce(torch.add, rows.unbind(1)).sum(0).div(self.launch.world_size)
        sums, num_steps = dict(zip(COLUMNS, means.tolist(), strict=True)), rows.shape[1]
        applied = num_steps - sums["skipped"]
        window_sec = self.clock.train_time_sec - self.start_sec
        values = {
            "loss": sums["loss"] / applied if applied else None,
            "grad_norm": sums["grad_norm"] / applied if applied else None,
            **({"alignment_loss": sums["alignment_loss"] / max(1, applied)} if self.aligned else {}),
            "num_skipped_steps": int(sums["skipped"]),
            "images_per_sec": num_steps * self.batches.batch_size / window_sec,
            "train_time_sec": self.clock.train_time_sec,
        }
        if self.work:
            values["tflops_per_sec"] = sums["tflop"] / window_sec
        if self.work and self.work.peak_flops_per_sec:
            peak_tflops = self.work.peak_flops_per_sec * self.launch.world_size / 1e12
            values["utilisation"] = values["tflops_per_sec"] / peak_tflops
        with suppress(OSError):  # without /proc
            values["peak_memory_gib"] = peak_gib(self.launch.device)
        if self.routed:
            values["selection_ratio"] = sums["selection_ratio"] / num_steps
            values["num_forced_bypassed"] = round(sums["num_forced_bypassed"] * self.launch.world_size)
        return values

    def report(self, step: int) -> dict[str, list[dict[str, Any]]]:
        """Return the skipped steps and spikes up to `step` (counted from 1).

        Raises:
            NotFinite: too many consecutive steps were skipped.
        """
        rows = [*map(_merge_ranks, zip(*self._gathered_rows().tolist(), strict=True))]
        events, first_skipped = {"skipped_steps": [], "loss_spikes": []}, None
        for number, row in enumerate(rows, start=step - len(rows) + 1):
            self.num_in_row = self.num_in_row + 1 if row[SKIPPED] else 0
            if row[SKIPPED]:
                events["skipped_steps"].append({"step": number, "entries": self._worst_entries(number, row)})
            elif self._is_spike(loss := row[0]):
                spike = {"step": number, "loss": loss, "entries": self._worst_entries(number, row)}
                events["loss_spikes"].append(spike)
            if self.num_in_row >= self.max_skipped_steps:
                first_skipped = number - self.num_in_row + 1
        if first_skipped is not None:
            entries = self.batches.entries(first_skipped - 1)
            more = " and more" if len(entries) > MAX_ENTRIES else ""
            raise NotFinite(
                f"no finite loss or gradient in {self.max_skipped_steps} or more consecutive steps, from "
                f"step {first_skipped} on (max_skipped_steps); its batch was {entries[:MAX_ENTRIES]}{more}",
                {"step": first_skipped, "entries": entries, "skipped_steps": events["skipped_steps"]},
            )
        return {key: steps for key, steps in events.items() if steps}

    def start(self) -> None:
        self.rows.zero_()
        self.num_rows, self.start_sec = 0, self.clock.train_time_sec
        with suppress(OSError):
            reset_peak(self.launch.device)

    def state_dict(self) -> dict[str, Any]:
        """Return the rows of all ranks and the statistics."""
        return {"rows": self._gathered_rows().tolist(), **{key: getattr(self, key) for key in STATE}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state; on another number of ranks, each has the merged rows and a share of the counts."""
        for key in STATE:
            setattr(self, key, state[key])
        # JSON stores a loss that is not finite as null.
        saved = [[[math.inf if x is None else x for x in row] for row in rows] for rows in state["rows"]]
        same = len(saved) == self.launch.world_size
        rows = saved[self.launch.rank] if same else [*map(_merge_ranks, zip(*saved, strict=True))]
        self.num_rows = len(rows)
        restored = torch.tensor(rows, device=self.rows.device).reshape(len(rows), NUM_FIELDS)
        restored[:, BYPASSED] *= len(saved) / self.launch.world_size
        self.rows = torch.cat([restored, torch.zeros_like(self.rows)])  # room for another window

    def _gathered_rows(self) -> torch.Tensor:
        """Return the rows of all ranks, (P, R, F), on the CPU."""
        # SYNC: copied to the host. All rows are gathered: some backends cannot gather an empty tensor.
        return self.launch.gather(self.rows)[:, : self.num_rows].cpu().clone()

    def _is_spike(self, loss: float) -> bool:
        limit = self.mean + SPIKE_DEVIATIONS * math.sqrt(self.variance)
        is_spike = self.num_applied >= MIN_STEPS and loss > limit
        # A spike counts as the limit, so that it does not hide the next one; the mean follows a lasting rise.
        delta = (limit if is_spike else loss) - self.mean
        self.num_applied += 1
        weight = max(1 - DECAY, 1 / self.num_applied)
        self.mean += weight * delta
        self.variance = (1 - weight) * (self.variance + weight * delta**2)
        return is_spike

    def _worst_entries(self, step: int, row: Sequence[float]) -> list[int]:
        entries = self.batches.entries(step - 1)
        return [entries[int(index)] for index in row[INDICES:] if index != EMPTY]


def _merge_ranks(rows: Sequence[Sequence[float]]) -> list[float]:
    """Merge the rows of all ranks for one step: means, and the samples with the largest losses."""
    means = [sum(values) / len(rows) for values in [*zip(*rows, strict=True)][:LARGEST]]
    losses = {row[INDICES + i]: row[LARGEST + i] for row in rows for i in range(MAX_NAMED)}
    losses.pop(EMPTY, None)
    indices = sorted(losses, key=lambda index: (-losses[index], index))[:MAX_NAMED]
    indices += [EMPTY] * (MAX_NAMED - len(indices))
    return [*means, *(losses.get(index, EMPTY) for index in indices), *indices]
