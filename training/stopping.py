"""Requests to save and stop: Ctrl-C, signals of a scheduler, a time limit, a launcher that has exited."""

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

# In order of precedence: if ranks have different reasons, the last in this list is reported.
TIME_LIMIT = "the time limit train.max_time_sec"
INTERRUPT = "Ctrl-C"
REASONS = ("", TIME_LIMIT, "the launcher is gone", "SIGUSR1", "SIGUSR2", "SIGTERM", INTERRUPT)
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
TICK_SEC, MAX_TICK_STEPS = 1.0, 20  # interval at which several ranks agree
AFTER_THIS_STEP = b"\nCtrl-C: the run saves and stops after this step; press Ctrl-C again to end it at once\n"
# Variables that torchrun, accelerate and hydra/launcher=parallel set.
LAUNCHED = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION", "TREAD_PARALLEL_JOBS")


class StopRequest:
    """A request to save and stop, on which all ranks agree.

    Args:
        max_time_sec: limit, counted from the start of this process; None: no limit.
    """

    def __init__(self, max_time_sec: float | None):
        start_time = psutil.Process().create_time()
        self._deadline = None if max_time_sec is None else start_time + max_time_sec
        self._launcher = os.getppid() if any(os.environ.get(name) for name in LAUNCHED) else None
        self._signal: str | None = None
        self.has_trained = False  # set after the first step; before it, Ctrl-C has nothing to save
        # A separate group on the CPU: agreeing does not wait for the device.
        self._group: Any = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._tick_steps, self._num_calls, self._ticked = 1, 0, float("-inf")

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Treat signals as requests. Ignored signals (a script's `&` ignores Ctrl-C) stay ignored."""
        handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        restored = {number: signal.signal(number, self._on_signal) for number in handled}
        try:
            yield
        except BaseException:
            if self._group is not None:  # a launcher ends all ranks when one fails: first print the error
                restored = dict.fromkeys(handled, signal.SIG_IGN)
            raise
        finally:
            for number, handler in restored.items():
                signal.signal(number, handler)

    def global_reason(self, reserve_sec: float, now: bool = False) -> str:
        """Return the reason to stop now, or an empty string. All ranks call this once per step.

        Several ranks communicate at ticks, about a second apart, and not in between. After a signal to one
        rank, all stop within a second, or after the current step if steps take longer.

        Args:
            reserve_sec: time that the next step and a save may take.
            now: True to agree now, between ticks, because something long follows.
        """
        if self._group is None:
            return self._local_reason(reserve_sec)
        self._num_calls += not now
        if self._num_calls < self._tick_steps and not now:
            return ""
        step_sec = (time.perf_counter() - self._ticked) / max(1, self._num_calls)
        reason = REASONS.index(self._local_reason(reserve_sec + TICK_SEC))
        largest = torch.tensor([reason, step_sec], dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group)
        if not now:
            # Computed from reduced values, so that all ranks choose the same next tick.
            steps = min(2 * self._tick_steps, MAX_TICK_STEPS, int(TICK_SEC / max(largest[1], 1e-6)))
            self._tick_steps, self._num_calls, self._ticked = max(1, steps), 0, time.perf_counter()
        return REASONS[int(largest[0])]

    def _local_reason(self, reserve_sec: float) -> str:
        if self._signal:
            return self._signal
        if self._launcher is not None and os.getppid() != self._launcher:
            return "the launcher is gone"
        if self._deadline is not None and time.time() + reserve_sec >= self._deadline:
            return TIME_LIMIT
        return ""

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT:
            self._signal = signal.Signals(number).name
            return
        signal.signal(number, signal.default_int_handler)  # the next Ctrl-C ends the run
        if not self.has_trained:
            raise KeyboardInterrupt
        self._signal = INTERRUPT
        if self._group is None or dist.get_rank() == 0:
            os.write(2, AFTER_THIS_STEP)  # print() is not reentrant


def notify_submitit(reason: str) -> None:
    """Let submitit, if it started this process, queue it again: raise its signal, now that all is saved.

    After SIGTERM, the scheduler decides whether the job runs again.
    """
    if reason in (TIME_LIMIT, "SIGUSR2") and callable(signal.getsignal(signal.SIGUSR2)):
        signal.raise_signal(signal.SIGUSR2)
