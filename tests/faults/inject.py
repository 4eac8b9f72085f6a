"""Run train.py with a fault in one of its processes: python inject.py FAULT STEP PROCESS [KEY=VALUE ...]."""

import os
import runpy
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from runtime import provenance  # noqa: E402
from training.trainer import Trainer  # noqa: E402

fault, step, process, *arguments = sys.argv[1:]
train_step = Trainer.train_step
is_here = os.environ.get("RANK", "0") == process


def step_with_fault(self, micro_batches):
    if self.step == int(step) and is_here and fault == "raise":
        raise RuntimeError("the cosmic ray")
    if self.step == int(step) and is_here and fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return train_step(self, micro_batches)


if is_here and fault == "configuration":
    arguments.append("optimizer.lr=0.5")
if is_here and fault == "folder":  # a relative data.path is other data here
    arguments.append(f"output_dir={Path('runs/r').resolve()}")
    os.chdir("elsewhere")
if is_here and fault == "code":
    provenance.PROJECT = Path("elsewhere")
Trainer.train_step = step_with_fault
sys.argv = [str(ROOT / "train.py"), *arguments]
runpy.run_path(sys.argv[0], run_name="__main__")
