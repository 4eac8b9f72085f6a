"""Make averages of other widths from a training with ema=post_hoc; see post_hoc.py.

python -m training.ema run=runs/NAME "std=[0.03,0.08]"
"""

from dataclasses import dataclass
from pathlib import Path

from runtime.config import command, run_main
from training.ema.post_hoc import reconstruct


@dataclass
class EMAConfig:
    """The keys of `training.ema`."""

    run: str  # a run folder
    std: list[float]  # widths, in units of the training time
    step: int | None = None  # of a checkpoint; None: the newest


@command("ema", EMAConfig, __doc__)
def main(request: EMAConfig) -> None:
    """Write an average of each width."""
    for std in request.std:
        folder = reconstruct(Path(request.run), std, request.step)
        print(f"{folder}: python sample.py run={request.run} checkpoint={folder.name}")


if __name__ == "__main__":
    run_main(main)
