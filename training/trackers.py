"""Where metrics go: `metrics.jsonl` beside the run, always, and one tracker of the user's choice."""

import hashlib
import json
import os
from pathlib import Path
from typing import Protocol


class Tracker(Protocol):
    """What the trainer asks of a tracker."""

    def log(self, values: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class MetricsFile:
    """Append one JSON object per log point to `metrics.jsonl`.

    Args:
        size: length in bytes to cut an existing file back to: what lies behind belongs to steps that will be run again.
    """

    def __init__(self, path: Path, size: int = 0):
        self._file = path.open("a")
        if self.size() > size:
            os.truncate(path, size)

    def log(self, values: dict[str, float], step: int) -> None:
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()

    def size(self) -> int:
        """Return the length of the file in bytes."""
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()


class WandbTracker:
    """Weights & Biases.

    Args:
        folder: where the files of an offline run are kept, and the identity of the run: a resumed run continues its curves.
        project: name of the project there.
        mode: `offline` writes files for a later `wandb sync`; `online` needs a login.
    """

    def __init__(self, run_name: str, folder: str, project: str, mode: str):
        import wandb

        # The same folder is the same run; runs of one name in two folders are two.
        identity = hashlib.sha256(str(Path(folder).resolve()).encode()).hexdigest()[:16]
        self._run = wandb.init(project=project, name=run_name, id=identity, resume="allow", dir=folder, mode=mode)

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


class TensorBoardTracker:
    """TensorBoard event files in `folder`."""

    def __init__(self, folder: str):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(folder)

    def log(self, values: dict[str, float], step: int) -> None:
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()
