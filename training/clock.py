"""What counts as the time of training, and what is kept back of a limit of time."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

STEPS_IN_RESERVE = 5  # of the mean time: what may still be under way when a run must end in time
END_SEC = 3.0  # for the end of the process itself


class Clock:
    """The time of training, without that of saving and evaluating, and the longest that each of those took.

    Args:
        guessed_save_sec: what a save takes, until a first one tells.
    """

    def __init__(self, device: torch.device, guessed_save_sec: float):
        self.device = device
        self.train_time_sec = 0.0
        self.window_start_sec = 0.0
        self.longest_sec = {"save": guessed_save_sec, "evaluation": 0.0}

    def start(self) -> None:
        """Start with the first step of this process."""
        self.resume()
        self._start = self._resumed

    def pause(self) -> None:
        """Stop counting time as that of training."""
        if self.device.type == "cuda":
            # SYNC: steps that are still queued belong to training, not to what follows.
            torch.cuda.synchronize()
        self.train_time_sec += time.perf_counter() - self._resumed

    def resume(self) -> None:
        """Count time as that of training from here on."""
        self._resumed = time.perf_counter()

    @property
    def window_sec(self) -> float:
        """Time of training since the last log point."""
        return self.train_time_sec - self.window_start_sec

    def start_window(self) -> None:
        """Have the next window begin here."""
        self.window_start_sec = self.train_time_sec

    @contextmanager
    def timing(self, what: str) -> Iterator[None]:
        """Take the time of a `save` or an `evaluation`."""
        start = time.perf_counter()
        yield
        self.longest_sec[what] = max(self.longest_sec[what], time.perf_counter() - start)

    def reserve_sec(self, num_steps: int, evaluation: bool) -> float:
        """Return what some more steps, a save and the end of the process may take.

        Args:
            num_steps: how many steps this process has done.
            evaluation: True if an evaluation has to fit in as well.
        """
        mean_step_sec = (time.perf_counter() - self._start) / max(1, num_steps)
        reserve_sec = END_SEC + self.longest_sec["save"] + STEPS_IN_RESERVE * mean_step_sec
        return reserve_sec + (self.longest_sec["evaluation"] if evaluation else 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {
            "train_time_sec": self.train_time_sec,
            "window_start_sec": self.window_start_sec,
            "longest_save_sec": self.longest_sec["save"],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what a checkpoint kept."""
        self.train_time_sec, self.window_start_sec = state["train_time_sec"], state["window_start_sec"]
        self.longest_sec["save"] = state["longest_save_sec"]
