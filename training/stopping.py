"""Requests to save and end: Ctrl-C, signals of a scheduler, a time limit, a launcher that is gone."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import psutil
import torch
import torch.distributed as dist

# In order of precedence: where processes have several reasons, the last of them is reported.
TIME_LIMIT = "the time limit train.max_time_sec"
INTERRUPT = "Ctrl-C"
REASONS = ("", TIME_LIMIT, "the launcher is gone", "SIGUSR1", "SIGUSR2", "SIGTERM", INTERRUPT)
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
TICK_SEC, MAX_TICK_STEPS = 1.0, 20  # between two agreements of several ranks
AFTER_THIS_STEP = b"\nCtrl-C: the run saves and stops after this step; another Ctrl-C ends it at once\n"
# Variables that torchrun, accelerate and hydra/launcher=parallel set.
LAUNCHED = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION", "TREAD_PARALLEL_JOBS")


class StopRequest:
    """Whether the run is asked to save and end, agreed on by all ranks.

    Args:
        max_time_sec: since the start of this process; None: no limit.
    """

    def __init__(self, max_time_sec: float | None):
        started = psutil.Process().create_time()
        self._ends = None if max_time_sec is None else started + max_time_sec
        self._launcher = os.getppid() if any(os.environ.get(name) for name in LAUNCHED) else None
        self._signal: str | None = None
        self.has_trained = False  # set after the first step: before it, Ctrl-C has nothing to save
        # A group of its own on the CPU: nothing waits for the device.
        self._group: Any = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._tick_steps, self._num_calls, self._ticked = 1, 0, float("-inf")

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take signals as requests, not as the end; ignored ones (by `&` in a script) stay ignored."""
        heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        after = {number: signal.signal(number, self._on_signal) for number in heard}
        try:
            yield
        except BaseException:
            if self._group is not None:  # a launcher ends all ranks when one fails: let each say why, first
                after = dict.fromkeys(heard, signal.SIG_IGN)
            raise
        finally:
            for number, handler in after.items():
                signal.signal(number, handler)

    def agreed(self, reserve_sec: float, now: bool = False) -> str:
        """Return why all ranks stop here, or an empty string; called once a step, by all ranks.

        Several ranks agree at ticks, a second of steps apart, and wait for nobody in between: after a signal
        to one of them all stop within a second, or after the step where steps take longer.

        Args:
            reserve_sec: what the next step and a save may take of the time that is left.
            now: agree here, between two ticks: something long begins.
        """
        if self._group is None:
            return self._own(reserve_sec)
        self._num_calls += not now
        if self._num_calls < self._tick_steps and not now:
            return ""
        step_sec = (time.perf_counter() - self._ticked) / max(1, self._num_calls)
        reason = REASONS.index(self._own(reserve_sec + TICK_SEC))
        largest = torch.tensor([reason, step_sec], dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        if not now:
            # From numbers that all ranks share, so that all choose the same next tick.
            steps = min(2 * self._tick_steps, MAX_TICK_STEPS, int(TICK_SEC / max(largest[1], 1e-6)))
            self._tick_steps, self._num_calls, self._ticked = max(1, steps), 0, time.perf_counter()
        return REASONS[int(largest[0])]

    def _own(self, reserve_sec: float) -> str:
        if self._signal:
            return self._signal
        if self._launcher is not None and os.getppid() != self._launcher:
            return "the launcher is gone"
        if self._ends is not None and time.time() + reserve_sec >= self._ends:
            return TIME_LIMIT
        return ""

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT:
            self._signal = signal.Signals(number).name
            return
        signal.signal(number, signal.default_int_handler)  # the next one is not a request
        if not self.has_trained:
            raise KeyboardInterrupt
        self._signal = INTERRUPT
        if self._group is None or dist.get_rank() == 0:
            os.write(2, AFTER_THIS_STEP)  # print() cannot be used in a handler that interrupts one


def pass_on(reason: str) -> None:
    """Have submitit, if it started this process, start it again: what its signal asks for, once all is saved.

    On SIGTERM it is for the scheduler to say whether the job runs again.
    """
    if reason in (TIME_LIMIT, "SIGUSR2") and callable(signal.getsignal(signal.SIGUSR2)):
        signal.raise_signal(signal.SIGUSR2)
