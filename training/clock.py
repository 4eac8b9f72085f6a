"""Measure training time, and the time to reserve before a time limit."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

STEPS_IN_RESERVE = 5  # steps of mean duration
END_SEC = 5.0  # for the process to exit, which takes 2 to 3 s on a busy machine
STATE = ("train_time_sec", "evaluation_time_sec", "longest_sec")


class Clock:
    """Training time without saves and evaluations, evaluation time, and the longest save and evaluation."""

    def __init__(self, device: torch.device, guessed_save_sec: float):
        self.device = device
        self.train_time_sec = self.evaluation_time_sec = 0.0
        self.longest_sec = {"save": guessed_save_sec, "evaluation": 0.0}

    def start(self) -> None:
        """Start counting, at the first step of this process."""
        self.resume()
        self._start = self._resumed

    def pause(self) -> None:
        """Stop counting training time."""
        if self.device.type == "cuda":
            # SYNC: steps that are still queued count as training time.
            torch.cuda.synchronize()
        self.train_time_sec += time.perf_counter() - self._resumed

    def resume(self) -> None:
        self._resumed = time.perf_counter()

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Time a block; `name` is "save" or "evaluation"."""
        start = time.perf_counter()
        yield
        sec = time.perf_counter() - start
        self.longest_sec[name] = max(self.longest_sec[name], sec)
        if name == "evaluation":
            self.evaluation_time_sec += sec

    def reserve_sec(self, num_steps: int, evaluation: bool) -> float:
        """Return the time to reserve for a few more steps, a save, an optional evaluation and the exit.

        Args:
            num_steps: steps done by this process.
        """
        mean_step_sec = (time.perf_counter() - self._start) / max(1, num_steps)
        reserve_sec = END_SEC + self.longest_sec["save"] + STEPS_IN_RESERVE * mean_step_sec
        return reserve_sec + (self.longest_sec["evaluation"] if evaluation else 0.0)

    def state_dict(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for key in STATE:
            setattr(self, key, state[key])
        self.longest_sec["evaluation"] = 0.0  # the machine or the scores may differ now
