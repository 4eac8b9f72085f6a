"""Where metrics go: `metrics.jsonl` beside the run, always, and one tracker of the user's choice.

Neither can stop a training: lines that cannot be written wait for room, and a tracker runs in a thread of
its own.
"""

import hashlib
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

import numpy as np

from runtime.files import finite

CLOSE_WITHIN_SEC = 60.0


Values = dict[str, float | np.ndarray]  # numbers, and pictures (height, width, C) uint8


class Tracker(Protocol):
    """What is asked of a tracker. It is made before the training, the rest happens beside it: any error ends
    its use alone.
    """

    def open(self) -> None: ...

    def log(self, values: Values, step: int) -> None: ...

    def close(self) -> None: ...


class MetricsFile:
    """Append one JSON object per log point to `metrics.jsonl`.

    Lines that a full disk does not take are kept, in memory and in checkpoints, and written as soon as there
    is room.

    Args:
        size: length in bytes to cut an existing file back to: what lies behind belongs to steps that will be
            run again.
        waiting: lines that had no room when `size` was measured.
        show: prints a warning.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, size: int = 0, waiting: str = "", show: Callable[[str], None] = print):
        self.path, self.show = path, show
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        found = os.fstat(self._descriptor).st_size
        self._size, self._waiting, self._warned = min(found, size), waiting.encode(), False
        if found < size:
            show(
                f"warning: {path} has {found} bytes, the checkpoint knows of {size}: lines from before it "
                "are missing"
            )
            self._mend_last_line()
        if found > self._size:
            os.ftruncate(self._descriptor, self._size)
        self._write()

    def log(self, values: dict[str, Any], step: int) -> None:
        """Write a line, or keep it until there is room."""
        for key, value in values.items():
            if value is not None and finite(value) is None:
                self.show(f"warning: {key}={value} of step {step} is not finite: null in {self.path}")
        self._waiting += (json.dumps(finite({"step": step, **values})) + "\n").encode()
        self._write()

    def flush(self) -> None:
        """Write the lines that wait.

        Raises:
            OSError: there is still no room.
        """
        num_written = 0
        try:
            while num_written < len(self._waiting):
                # At a place, not at the end: what an attempt without room left there is written over.
                num_written += os.pwrite(
                    self._descriptor, self._waiting[num_written:], self._size + num_written
                )
        except OSError as error:
            raise OSError(
                f"{self.path}: {error}; its lines wait, in checkpoints too, until there is room"
            ) from error
        finally:  # a line that is there in part waits whole
            whole = self._waiting.rfind(b"\n", 0, num_written) + 1
            self._size, self._waiting = self._size + whole, self._waiting[whole:]
        self._warned = False

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the file, after what is in the file has reached the disk."""
        if not self._waiting:
            os.fsync(self._descriptor)
        return {"metrics_size": self._size, "metrics_waiting": self._waiting.decode()}

    def close(self) -> None:
        os.close(self._descriptor)

    def _write(self) -> None:
        try:
            self.flush()
        except OSError as error:
            if not self._warned:
                self.show(f"warning: {error}")
            self._warned = True

    def _mend_last_line(self) -> None:
        """Give a last line the end that it lacks, or leave it out where it lacks more."""
        content = os.pread(self._descriptor, self._size, 0)
        last = content[content.rfind(b"\n") + 1 :]
        self._size -= len(last)
        try:
            json.loads(last)
        except (ValueError, RecursionError):  # empty, too
            return
        self._waiting = last + b"\n" + self._waiting


class BackgroundTracker:
    """Run a tracker in a thread of its own, so that a slow or failing one costs the training nothing.

    Args:
        tracker: what to open, in the thread.
        show: prints a warning.
    """

    def __init__(self, tracker: Tracker, show: Callable[[str], None]):
        self._tracker, self.show = tracker, show
        self._lines: SimpleQueue[tuple[Values, int] | None] = SimpleQueue()
        self._failed = False
        self._thread = Thread(target=self._run, name="tracker", daemon=True)
        self._thread.start()

    def log(self, values: Values, step: int) -> None:
        """Hand a line over."""
        if not self._failed:
            self._lines.put((values, step))

    def close(self, within_sec: float = CLOSE_WITHIN_SEC) -> None:
        """Wait for what was handed over, but not for ever."""
        self._lines.put(None)
        self._thread.join(within_sec)
        if self._thread.is_alive():
            self._switch_off(f"it did not end within {within_sec:g} s")

    def _run(self) -> None:
        try:
            self._tracker.open()
            while line := self._lines.get():
                self._tracker.log(*line)
            self._tracker.close()
        except (
            Exception
        ) as error:  # whatever a service and its library may come to: the training is worth more
            self._switch_off(f"{type(error).__name__}: {error}")

    def _switch_off(self, reason: str) -> None:
        if self._failed:  # and was left behind with what it has to say since
            return
        self._failed = True
        self.show(
            f"warning: the tracker is switched off ({' '.join(reason.split())}); metrics.jsonl has every line"
        )


class WandbTracker:
    """Weights & Biases.

    Args:
        folder: where the files of an offline run are kept, and the identity of the run: a resumed run
            continues its curves.
        project: name of the project there.
        mode: `offline` writes files for a later `wandb sync`; `online` needs a login.
    """

    def __init__(self, run_name: str, folder: str, project: str, mode: str):
        import wandb

        # The same folder is the same run; runs of one name in two folders are two.
        identity = hashlib.sha256(str(Path(folder).resolve()).encode()).hexdigest()[:16]
        self._folder, self._picture = Path(folder), wandb.Image
        self._init = partial(
            wandb.init, project=project, name=run_name, id=identity, resume="allow", dir=folder, mode=mode
        )

    def open(self) -> None:
        self._run = self._init()

    def log(self, values: Values, step: int) -> None:
        if not self._folder.is_dir():
            raise FileNotFoundError(f"{self._folder} is gone")  # pictures would make it again
        pictures = {
            key: self._picture(value) for key, value in values.items() if isinstance(value, np.ndarray)
        }
        self._run.log({**values, **pictures}, step=step)

    def close(self) -> None:
        self._run.finish()


class TensorBoardTracker:
    """TensorBoard event files in `folder`."""

    def __init__(self, folder: str):
        from torch.utils.tensorboard import SummaryWriter

        self._folder, self._writer_from, self._writer = Path(folder), partial(SummaryWriter, folder), None

    def open(self) -> None:
        pass  # with the first line, whose step it needs

    def log(self, values: Values, step: int) -> None:
        self._folder.mkdir(exist_ok=True)  # not its parents, as the writer would: a run folder may be gone
        # Points that an earlier start of the run drew behind the checkpoint that this one resumed from are
        # taken back.
        self._writer = self._writer or self._writer_from(purge_step=step)
        for key, value in values.items():
            if isinstance(value, np.ndarray):
                self._writer.add_image(key, value, step, dataformats="HWC")
            else:
                self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        if self._writer:
            self._writer.close()
