"""TensorBoard and Weights & Biases. A tracker runs in a background thread and cannot stop a run."""

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Protocol

import numpy as np

from runtime.errors import check_choice

CLOSE_WITHIN_SEC = 60.0
Values = dict[str, float | np.ndarray]  # numbers, and pictures (height, width, C) uint8


class Tracker(Protocol):
    """A tracker. It is built before training and used in a background thread; an error there disables it."""

    def open(self, config: dict[str, Any]) -> None: ...

    def log(self, values: Values, step: int) -> None: ...

    def close(self) -> None: ...


class BackgroundTracker:
    """Run a tracker in a background thread, so that a slow or failing one does not affect training."""

    def __init__(self, tracker: Tracker, show: Callable[[str], None], config: dict[str, Any]):
        self._tracker, self.show, self._config = tracker, show, config
        self._lines: SimpleQueue[tuple[Values, int] | None] = SimpleQueue()
        self._failed = False
        self._thread = Thread(target=self._run, name="tracker", daemon=True)
        self._thread.start()

    def log(self, values: Values, step: int) -> None:
        """Queue a line."""
        if not self._failed:
            self._lines.put((values, step))

    def close(self, within_sec: float = CLOSE_WITHIN_SEC) -> None:
        """Wait at most `within_sec` seconds for the queued lines."""
        self._lines.put(None)
        self._thread.join(within_sec)
        if self._thread.is_alive():
            self._switch_off(f"it did not finish within {within_sec:g} s")

    def _run(self) -> None:
        try:
            self._tracker.open(self._config)
            while line := self._lines.get():
                self._tracker.log(*line)
            self._tracker.close()
        except Exception as error:  # training continues, whatever fails
            self._switch_off(f"{type(error).__name__}: {error}")

    def _switch_off(self, reason: str) -> None:
        if self._failed:
            return
        self._failed = True
        reason = " ".join(reason.split())
        self.show(f"warning: the tracker is switched off ({reason}); metrics.jsonl has every line")


class WandbTracker:
    """Weights & Biases.

    Args:
        folder: the run's folder. It identifies the run, so that a resumed run continues its curves.
        mode: `offline` writes files for a later `wandb sync`; `online` needs a login; or `disabled`.
    """

    def __init__(self, run_name: str, folder: str, project: str, mode: str):
        import wandb

        check_choice("tracker.mode", mode, ("offline", "online", "disabled"))
        self._folder, self._picture = Path(folder), wandb.Image
        options = {"project": project, "name": run_name, "dir": folder, "mode": mode, "resume": "allow"}
        identity = hashlib.sha256(str(Path(folder).resolve()).encode()).hexdigest()[:16]
        self._init = partial(wandb.init, **options, id=identity)

    def open(self, config: dict[str, Any]) -> None:
        self._run = self._init()
        self._run.config.update(config, allow_val_change=True)  # intervals may change on resume

    def log(self, values: Values, step: int) -> None:
        if not self._folder.is_dir():
            raise FileNotFoundError(f"{self._folder} no longer exists")  # wandb would create it again
        pictures = {key: self._picture(v) for key, v in values.items() if isinstance(v, np.ndarray)}
        self._run.log({**values, **pictures}, step=step)

    def close(self) -> None:
        self._run.finish()


class TensorBoardTracker:
    """TensorBoard event files in `folder`."""

    def __init__(self, folder: str):
        from torch.utils.tensorboard import SummaryWriter

        self._folder, self._writer_from, self._writer = Path(folder), partial(SummaryWriter, folder), None

    def open(self, config: dict[str, Any]) -> None:
        self._config = config  # the writer needs the first step: `log` opens it

    def log(self, values: Values, step: int) -> None:
        self._folder.mkdir(exist_ok=True)  # without parents, unlike the writer: the run's folder may be gone
        # Purge points that an earlier start logged after the checkpoint.
        if self._writer is None:
            self._writer = self._writer_from(purge_step=step)
            rows = [f"| `{key}` | {value} |" for key, value in self._config.items()]
            table = "\n".join(["| key | value |", "|---|---|", *rows])
            self._writer.add_text("configuration", table, step)
        for key, value in values.items():
            if isinstance(value, np.ndarray):
                self._writer.add_image(key, value, step, dataformats="HWC")
            else:
                self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        if self._writer:
            self._writer.close()
