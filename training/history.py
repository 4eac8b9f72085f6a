"""Skipped steps and spikes of the loss, with the samples at fault, found at log points without a host sync in
between.

Shapes: P ranks, R steps since the last log point, S samples of a rank and step.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from runtime.launch import Launch

MAX_NAMED = 4  # samples of a step that are reported, those of the largest loss
MAX_ENTRIES = 16  # in a message
EMPTY = -1.0
FIELDS = 2 + 2 * MAX_NAMED  # loss, skipped, the largest losses of samples, their places in the batch
# A spike is so many standard deviations above the exponential moving average of the steps before it.
SPIKE_DEVIATIONS, DECAY, MIN_STEPS = 8.0, 0.99, 100
STATE = ("num_in_row", "mean", "variance", "num_applied")


class NotFinite(Exception):
    """Too many steps in a row gave no finite loss or gradient."""

    def __init__(self, message: str, details: dict[str, Any]):
        super().__init__(message)
        self.details = details


class LossHistory:
    """The steps since the last log point, and statistics of those before.

    Args:
        places: (S,) of this rank's samples in the global batch.
        entries: entries(step) are those of the global batch after so many steps, in its order.
        max_skipped_steps: so many skipped steps in a row end the run.
    """

    def __init__(
        self,
        launch: Launch,
        places: torch.Tensor,
        entries: Callable[[int], Sequence[Any]],
        log_every: int,
        max_skipped_steps: int,
    ):
        self.launch, self.entries, self.max_skipped_steps = launch, entries, max_skipped_steps
        self.places = places.to(launch.device).float()
        self.rows = torch.zeros(log_every, FIELDS, device=launch.device)
        self.num_rows = 0
        self.num_in_row = 0  # skipped steps in a row, up to the last log point
        self.mean, self.variance, self.num_applied = 0.0, 0.0, 0  # of the losses of steps that applied

    def add(self, loss: torch.Tensor, skipped: torch.Tensor, losses: Sequence[torch.Tensor]) -> None:
        """Add a step: its loss (0-d), 1 if skipped (0-d), and the losses of its samples, (S,) in parts."""
        # A loss that is not a number counts as the largest.
        sample_losses = torch.cat(list(losses)).nan_to_num(math.inf, math.inf, -math.inf)  # (S,)
        largest, indices = sample_losses.topk(min(MAX_NAMED, len(sample_losses)))
        row = self.rows[self.num_rows].fill_(EMPTY)
        row[0], row[1] = loss, skipped
        row[2 : 2 + len(largest)] = largest
        row[2 + MAX_NAMED : 2 + MAX_NAMED + len(largest)] = self.places[indices]
        self.num_rows += 1

    def report(self, step: int) -> dict[str, list[dict[str, Any]]]:
        """Report skipped steps and spikes since the last log point, up to `step` (from 1), and start again.

        Raises:
            NotFinite: too many of them in a row were skipped.
        """
        rows = [*map(_merge_ranks, zip(*self._gathered_rows(), strict=True))]
        found = {"skipped_steps": [], "loss_spikes": []}
        self.num_rows, first_skipped = 0, None
        for at, row in enumerate(rows, start=step - len(rows) + 1):
            loss, skipped = row[:2]
            self.num_in_row = self.num_in_row + 1 if skipped else 0
            if skipped:
                found["skipped_steps"].append({"step": at, "entries": self._largest(at, row)})
            elif self._is_spike(loss):
                spike = {"step": at, "loss": loss, "entries": self._largest(at, row)}
                found["loss_spikes"].append(spike)
            if self.num_in_row >= self.max_skipped_steps:
                first_skipped = at - self.num_in_row + 1
        if first_skipped is not None:
            entries = list(self.entries(first_skipped - 1))
            more = " and more" if len(entries) > MAX_ENTRIES else ""
            raise NotFinite(
                f"no finite loss or gradient in {self.max_skipped_steps} or more steps in a row, from step "
                f"{first_skipped} on (max_skipped_steps); its batch was {entries[:MAX_ENTRIES]}{more}",
                {"step": first_skipped, "entries": entries, "skipped_steps": found["skipped_steps"]},
            )
        return {key: steps for key, steps in found.items() if steps}

    def state_dict(self) -> dict[str, Any]:
        """The rows of all ranks, and the statistics."""
        return {"rows": self._gathered_rows(), **{key: getattr(self, key) for key in STATE}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint; on another number of ranks, each takes the rows of all."""
        for key in STATE:
            setattr(self, key, state[key])
        # JSON has null for a loss that was not finite.
        saved = [[[math.inf if x is None else x for x in row] for row in rows] for rows in state["rows"]]
        same = len(saved) == self.launch.world_size
        rows = saved[self.launch.rank] if same else [*map(_merge_ranks, zip(*saved, strict=True))]
        self.num_rows = len(rows)
        restored = torch.tensor(rows, device=self.rows.device).reshape(len(rows), FIELDS)
        self.rows = torch.cat([restored, torch.zeros_like(self.rows)])  # room for another window

    def _gathered_rows(self) -> list[list[list[float]]]:
        # SYNC: the rows come to the host. All are gathered: some backends cannot gather an empty tensor.
        return self.launch.gather(self.rows)[:, : self.num_rows].tolist()

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

    def _largest(self, step: int, row: Sequence[float]) -> list[Any]:
        names = self.entries(step - 1)
        return [names[int(place)] for place in row[2 + MAX_NAMED :] if place != EMPTY]


def _merge_ranks(of_ranks: Sequence[Sequence[float]]) -> list[float]:
    """Merge the rows of all ranks: the mean loss, and the largest losses of samples."""
    loss = sum(row[0] for row in of_ranks) / len(of_ranks)
    pairs = [zip(row[2 + MAX_NAMED :], row[2 : 2 + MAX_NAMED], strict=True) for row in of_ranks]
    losses = {place: value for pair in pairs for place, value in pair if place != EMPTY}
    places = sorted(losses, key=lambda place: (-losses[place], place))[:MAX_NAMED]
    places += [EMPTY] * (MAX_NAMED - len(places))
    return [loss, of_ranks[0][1], *(losses.get(place, EMPTY) for place in places), *places]
