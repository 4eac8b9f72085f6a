"""What single steps gave, kept on the device until the next log point: which had to be skipped, which were
spikes, and why.

Shapes: P ranks, R steps since the last log point, S samples of a rank and step.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from runtime.launch import Launch

MAX_NAMED = 4  # samples of a rank and step that are named, those of the largest loss
MAX_ENTRIES_TOLD = 16
NOBODY = -1.0
FIELDS = 2 + 2 * MAX_NAMED  # loss, skipped, the largest losses of samples, their places in the batch
# A spike is so many standard deviations above the mean of the steps before it, both with weights that fall by
# this factor.
SPIKE_DEVIATIONS, MEMORY, MIN_STEPS = 8.0, 0.99, 100
REMEMBERED = ("num_in_row", "mean", "variance", "num_applied")


class NotFinite(Exception):
    """Too many steps in a row gave no finite loss or gradient."""

    def __init__(self, message: str, details: dict[str, Any]):
        super().__init__(message)
        self.details = details


class LossHistory:
    """The steps since the last log point, and what is remembered of those before.

    Args:
        places: (S,) where the samples of this rank lie in the global batch.
        entries: gives the entries of the data that the batch after so many steps is made of, in the order of
            the batch.
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
        """Keep a step: its loss (0-d), 0 or 1 (0-d), and the losses of its samples, (S,) in parts."""
        # A loss that is not a number counts as the largest.
        sample_losses = torch.cat(list(losses)).nan_to_num(math.inf, math.inf, -math.inf)  # (S,)
        largest, indices = sample_losses.topk(min(MAX_NAMED, len(sample_losses)))
        row = self.rows[self.num_rows].fill_(NOBODY)
        row[0], row[1] = loss, skipped
        row[2 : 2 + len(largest)] = largest
        row[2 + MAX_NAMED : 2 + MAX_NAMED + len(largest)] = self.places[indices]
        self.num_rows += 1

    def report(self, step: int) -> dict[str, list[dict[str, Any]]]:
        """Return what is worth a word of the steps since the last log point, up to `step`, and start again.

        A step carries the number of the state that it led to, as everywhere: the first is 1.

        Raises:
            NotFinite: too many of them in a row were skipped.
        """
        rows = self._gathered_rows()
        found = {"skipped_steps": [], "loss_spikes": []}
        self.num_rows, worst = 0, None
        for at, of_ranks in enumerate(zip(*rows, strict=True), start=step - len(rows[0]) + 1):
            loss = sum(row[0] for row in of_ranks) / len(of_ranks)
            if of_ranks[0][1]:
                self.num_in_row += 1
                found["skipped_steps"].append({"step": at, "entries": self._largest(at, of_ranks)})
                if self.num_in_row >= self.max_skipped_steps:
                    worst = at - self.num_in_row + 1
                continue
            self.num_in_row = 0
            if self._is_spike(loss):
                spike = {"step": at, "loss": loss, "entries": self._largest(at, of_ranks)}
                found["loss_spikes"].append(spike)
        if worst is not None:
            entries = list(self.entries(worst - 1))
            more = " and more" if len(entries) > MAX_ENTRIES_TOLD else ""
            raise NotFinite(
                f"no finite loss or gradient in {self.max_skipped_steps} or more steps in a row, from step "
                f"{worst} on (train.max_skipped_steps); its batch was {entries[:MAX_ENTRIES_TOLD]}{more}",
                {"step": worst, "entries": entries, "skipped_steps": found["skipped_steps"]},
            )
        return {key: steps for key, steps in found.items() if steps}

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps, with the rows of all ranks."""
        return {"rows": self._gathered_rows(), **{key: getattr(self, key) for key in REMEMBERED}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what a checkpoint kept; on another number of ranks, each takes all rows together."""
        for key in REMEMBERED:
            setattr(self, key, state[key])
        # JSON has null for the losses of a step that was skipped, of which no more is asked than which are
        # the largest.
        kept = [
            [[math.inf if value is None else value for value in row] for row in rows]
            for rows in state["rows"]
        ]
        if len(kept) == self.launch.world_size:
            rows = kept[self.launch.rank]
        else:
            rows = [_together(of_ranks) for of_ranks in zip(*kept, strict=True)]
        self.num_rows = len(rows)
        restored = torch.tensor(rows, device=self.rows.device).reshape(len(rows), FIELDS)
        self.rows = torch.cat([restored, torch.zeros_like(self.rows)])  # room for a whole window behind it

    def _gathered_rows(self) -> list[list[list[float]]]:
        """Return the rows of the window so far, (P, R, FIELDS)."""
        # SYNC: what single steps gave comes to the host, from all ranks.
        # All rows, since not every backend gathers none of them.
        return self.launch.gather(self.rows)[:, : self.num_rows].tolist()

    def _is_spike(self, loss: float) -> bool:
        limit = self.mean + SPIKE_DEVIATIONS * math.sqrt(self.variance)
        is_spike = self.num_applied >= MIN_STEPS and loss > limit
        # A spike counts as no more than the limit: it must not hide the next one, and a new level is learnt.
        delta = (limit if is_spike else loss) - self.mean
        self.num_applied += 1
        weight = max(1 - MEMORY, 1 / self.num_applied)
        # The weighted mean and variance, one value after another.
        self.mean += weight * delta
        self.variance = (1 - weight) * (self.variance + weight * delta**2)
        return is_spike

    def _largest(self, step: int, of_ranks: Sequence[Sequence[float]]) -> list[Any]:
        """Return the entries whose samples had the largest losses of a step, the largest first."""
        row = _together(of_ranks)
        names = self.entries(step - 1)
        return [names[int(place)] for place in row[2 + MAX_NAMED :] if place != NOBODY]


def _together(of_ranks: Sequence[Sequence[float]]) -> list[float]:
    """Make one row of those of several ranks: the mean loss, and the largest losses of samples of all."""
    loss = sum(row[0] for row in of_ranks) / len(of_ranks)
    pairs = [zip(row[2 + MAX_NAMED :], row[2 : 2 + MAX_NAMED], strict=True) for row in of_ranks]
    losses = {place: value for pair in pairs for place, value in pair if place != NOBODY}
    places = sorted(losses, key=lambda place: (-losses[place], place))[:MAX_NAMED]
    places += [NOBODY] * (MAX_NAMED - len(places))
    return [loss, of_ranks[0][1], *(losses.get(place, NOBODY) for place in places), *places]
