"""Requests from outside to save and end: signals of a scheduler, a limit of time, a launcher that is gone."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import psutil
import torch
import torch.distributed as dist

# The order is the rank: where processes have several reasons, the last one is named.
TIME_LIMIT = "the time limit train.max_time_sec"
REASONS = ("", TIME_LIMIT, "the launcher is gone", "SIGUSR1", "SIGTERM")
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
LAUNCHED = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")  # variables that torchrun and accelerate set


class StopRequest:
    """Whether the run is asked to save and end, agreed on by all processes.

    Args:
        max_time_sec: since the start of this process; None: no limit.
    """

    def __init__(self, max_time_sec: float | None):
        started = psutil.Process().create_time()
        self._ends = None if max_time_sec is None else started + max_time_sec
        self._launcher = os.getppid() if any(os.environ.get(name) for name in LAUNCHED) else None
        self._signal: str | None = None
        # Beside the groups of a GPU: numbers of the host are exchanged without waiting for the device.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take signals as requests, not as the end."""
        before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def agreed(self, reserve_sec: float) -> str:
        """Return why all processes stop here; empty where they do not. All must ask together.

        Args:
            reserve_sec: what the step that would follow, and saving, may take of the time that is left.
        """
        reason = torch.tensor(REASONS.index(self._own(reserve_sec)))
        if self._group is not None:
            dist.all_reduce(reason, dist.ReduceOp.MAX, group=self._group)
        return REASONS[int(reason)]

    def _own(self, reserve_sec: float) -> str:
        if self._signal:
            return self._signal
        if self._launcher is not None and os.getppid() != self._launcher:
            return "the launcher is gone"
        if self._ends is not None and time.time() + reserve_sec >= self._ends:
            return TIME_LIMIT
        return ""

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number).name
