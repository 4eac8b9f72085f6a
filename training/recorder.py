"""Report progress to `metrics.jsonl`, a tracker and the terminal. Errors there do not stop training."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from runtime.files import finite
from runtime.launch import Launch
from training.run_folder import RunFolder
from training.trackers import CLOSE_WITHIN_SEC, BackgroundTracker, Tracker

LEVEL = "/t="  # marks the noise level in the key of a held-out loss
STOPPING_SEC = 5.0  # for the tracker to close, in a run that stops early


class MetricsFile:
    """Append one JSON object per log point to `metrics.jsonl`.

    If the disk is full, lines wait in memory and in checkpoints until there is room.

    Args:
        size: number of bytes to keep of an existing file; later lines belong to steps that will be repeated.
        waiting: lines that were not written yet when `size` was measured.
    """

    def __init__(self, path: Path, size: int = 0, waiting: str = "", show: Callable[[str], None] = print):
        self.path, self.show = path, show
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        current_size = os.fstat(self._descriptor).st_size
        self._size, self._waiting, self._warned = size, waiting.encode(), False
        if current_size < size:
            show(f"warning: {path} has {current_size} bytes, {size} at the checkpoint: lines are missing")
            self._size = os.pread(self._descriptor, current_size, 0).rfind(b"\n") + 1  # complete lines only
        if current_size > self._size:
            os.ftruncate(self._descriptor, self._size)
        self._write()

    def log(self, values: dict[str, Any], step: int) -> None:
        """Write a line, or keep it until the disk has room."""
        for key, value in values.items():
            if value is not None and finite(value) is None:
                self.show(f"warning: {key}={value} at step {step} is not finite; {self.path} has null")
        self._waiting += (json.dumps(finite({"step": step, **values})) + "\n").encode()
        self._write()

    def flush(self) -> None:
        """Write the waiting lines."""
        num_written = 0
        try:
            while num_written < len(self._waiting):
                # Write at an offset to overwrite what a failed attempt left.
                rest, offset = self._waiting[num_written:], self._size + num_written
                num_written += os.pwrite(self._descriptor, rest, offset)
        except OSError as error:
            kept = "unwritten lines are kept in memory and in checkpoints until there is room"
            raise OSError(f"{self.path}: {error}; {kept}") from error
        finally:  # a partly written line is written again
            complete = self._waiting.rfind(b"\n", 0, num_written) + 1
            self._size, self._waiting = self._size + complete, self._waiting[complete:]
        self._warned = False

    def state(self) -> dict[str, Any]:
        """Sync the file, and return the arguments that reopen it in this state."""
        if not self._waiting:
            os.fsync(self._descriptor)
        return {"size": self._size, "waiting": self._waiting.decode()}

    def close(self) -> None:
        os.close(self._descriptor)

    def _write(self) -> None:
        try:
            self.flush()
        except OSError as error:
            if not self._warned:
                self.show(f"warning: {error}")
            self._warned = True


class Recorder:
    """Log a run's values and show its progress. Only the first rank writes and prints."""

    def __init__(self, launch: Launch, folder: RunFolder):
        self.launch, self.folder = launch, folder
        self.metrics_file: MetricsFile | None = None
        self.tracker: BackgroundTracker | None = None
        self.bar = tqdm(disable=True)
        self._file_state = {"size": 0, "waiting": ""}

    def open(self, tracker: Tracker | None, config: dict[str, Any]) -> None:
        """Open the metrics file, cut back to the loaded checkpoint, and start the tracker."""
        self.metrics_file = MetricsFile(self.folder.metrics_file, **self._file_state, show=self.show)
        self.tracker = None if tracker is None else BackgroundTracker(tracker, self.show, config)

    def log(self, step: int, num_images: int, values: Mapping[str, Any]) -> None:
        """Write a line of values; the tracker gets numbers and pictures."""
        self.check_not_moved()  # a tracker would create a moved folder again
        if self.metrics_file and (line := without_pictures(values)):
            self.metrics_file.log({"num_images": num_images, **line}, step)
        if self.tracker:
            shown = {key: v for key, v in values.items() if isinstance(v, int | float | np.ndarray)}
            self.tracker.log({"num_images": num_images, **shown}, step)

    def show(self, text: str) -> None:
        """Print a line above the progress bar."""
        if self.launch.is_main:
            tqdm.write(text)

    @contextmanager
    def progress(self, step: int, total_steps: int) -> Iterator[None]:
        options = {"desc": "train", "unit": "step", "mininterval": 1.0, "disable": not self.launch.is_main}
        with tqdm(initial=step, total=total_steps, **options) as self.bar:
            yield

    def check_not_moved(self) -> None:
        """Raise Moved on all ranks if the folder was moved or removed."""
        self.launch.broadcast_from_main(self.folder.check_not_moved)

    @property
    def closing_sec(self) -> float:
        """Longest duration of `close` in a run that stops early."""
        return STOPPING_SEC if self.tracker else 0.0

    def close(self, stopping: bool) -> None:
        """Close the file and the tracker; wait for the tracker only a few seconds if the run stops early."""
        if self.metrics_file:
            self.metrics_file.close()
        if self.tracker:
            self.tracker.close(STOPPING_SEC if stopping else CLOSE_WITHIN_SEC)

    def state_dict(self) -> dict[str, Any]:
        """Return the size of the file and its waiting lines."""
        file = self.metrics_file
        return self.launch.broadcast_from_main(file.state if file is not None else lambda: self._file_state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the size to which `open` cuts the file back."""
        self._file_state = state


def without_pictures(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that JSON can hold."""
    return {key: value for key, value in values.items() if not isinstance(value, np.ndarray)}
