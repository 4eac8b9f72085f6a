"""Start train.py in processes of its own, sound or with a fault, and wait for the end."""

import subprocess
from pathlib import Path

from tests.faults.killing import ENVIRONMENT
from tests.runs import ROOT, TINY

INJECT = Path(__file__).with_name("inject.py")


def program(launcher, *overrides, folder, limit=None, **variables):
    """Run train.py on the tiny network to its end.

    Args:
        limit: called in each new process before the program.
    """
    command = [*launcher, str(ROOT / "train.py"), *TINY, "run_name=r", *overrides]
    return subprocess.run(
        command,
        cwd=folder,
        env={**ENVIRONMENT, **variables},
        capture_output=True,
        text=True,
        preexec_fn=limit,
        timeout=300,
    )


def inject(launcher, fault, step, process, *overrides, folder):
    """Run train.py with a fault in one process."""
    command = [*launcher, str(INJECT), fault, str(step), str(process), *TINY, "run_name=r", *overrides]
    return subprocess.run(command, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
