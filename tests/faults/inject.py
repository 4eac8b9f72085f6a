"""Run train.py with a fault in one of its processes: python inject.py FAULT STEP PROCESS [KEY=VALUE ...]

Each process leaves a hash of its weights in `weights_PROCESS`, so that they can be compared, and in
`member_PROCESS` whether it ended as a member of the group of processes.
"""

import atexit
import hashlib
import os
import runpy
import signal
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from runtime import provenance  # noqa: E402
from training.trainer import Trainer  # noqa: E402

fault, step, process = sys.argv[1], int(sys.argv[2]), sys.argv[3]
here = os.environ.get("RANK", "0")
train_step, fit = Trainer.train_step, Trainer.fit


def step_with_fault(self, micro_batches):
    if self.step != step or process != here:
        return train_step(self, micro_batches)
    if fault == "raise":
        raise RuntimeError("the cosmic ray")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGTERM)
    if fault == "gradient":
        hook = self.parameters[0].register_hook(lambda grad: grad * torch.nan)
        results = train_step(self, micro_batches)
        hook.remove()  # one that stays, and knows the trainer, keeps it and its group of processes to the end
        return results
    return train_step(self, micro_batches)


def fit_and_leave_a_hash(self):
    reason = fit(self)
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in self.net.parameters())
    weights += b"".join(parameter.numpy().tobytes() for parameter in self.ema.net.parameters())
    Path(f"weights_{here}").write_text(hashlib.sha256(weights).hexdigest())
    return reason


@atexit.register
def leave_whether_a_member():
    Path(f"member_{here}").write_text(str(torch.distributed.is_initialized()))


arguments = sys.argv[4:]
if process == here and fault == "configuration":
    arguments.append("optimizer.lr=0.5")
if process == here and fault == "folder":  # a data.path that is not absolute means other data here
    arguments.append(f"output_dir={Path('runs/r').resolve()}")
    os.chdir("elsewhere")
if process == here and fault == "code":
    provenance.PROJECT = Path("elsewhere")
Trainer.train_step, Trainer.fit = step_with_fault, fit_and_leave_a_hash
sys.argv = [str(ROOT / "train.py"), *arguments]
runpy.run_path(sys.argv[0], run_name="__main__")
