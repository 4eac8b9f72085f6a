"""What counts as training time, and what is reserved of a time limit."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

STEPS_IN_RESERVE = 5  # of the mean time
END_SEC = 5.0  # for the end of the process itself, which takes 2 to 3 on a busy machine
STATE = ("train_time_sec", "evaluation_time_sec", "longest_sec")


class Clock:
    """Training time without saving and evaluating, the time of all evaluations, and the longest save and
    evaluation so far.
    """

    def __init__(self, device: torch.device, guessed_save_sec: float):
        self.device = device
        self.train_time_sec = self.evaluation_time_sec = 0.0
        self.longest_sec = {"save": guessed_save_sec, "evaluation": 0.0}

    def start(self) -> None:
        """Start at the first step of this process."""
        self.resume()
        self._start = self._resumed

    def pause(self) -> None:
        """Stop counting training time."""
        if self.device.type == "cuda":
            # SYNC: steps that are still queued belong to training, not to what follows.
            torch.cuda.synchronize()
        self.train_time_sec += time.perf_counter() - self._resumed

    def resume(self) -> None:
        """Count training time from here on."""
        self._resumed = time.perf_counter()

    @contextmanager
    def timing(self, what: str) -> Iterator[None]:
        """Time a `save` or an `evaluation`."""
        start = time.perf_counter()
        yield
        took_sec = time.perf_counter() - start
        self.longest_sec[what] = max(self.longest_sec[what], took_sec)
        if what == "evaluation":
            self.evaluation_time_sec += took_sec

    def reserve_sec(self, num_steps: int, evaluation: bool) -> float:
        """Time that a few more steps, a save, perhaps an evaluation, and the end of the process may take.

        Args:
            num_steps: done by this process.
        """
        mean_step_sec = (time.perf_counter() - self._start) / max(1, num_steps)
        reserve_sec = END_SEC + self.longest_sec["save"] + STEPS_IN_RESERVE * mean_step_sec
        return reserve_sec + (self.longest_sec["evaluation"] if evaluation else 0.0)

    def state_dict(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key in STATE:
            setattr(self, key, state[key])
        self.longest_sec["evaluation"] = 0.0  # another machine, or other scores
