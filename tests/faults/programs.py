"""Start train.py in processes of its own, sound or with a fault, and wait for the end."""

import subprocess
from pathlib import Path

from tests.faults.killing import ENVIRONMENT
from tests.runs import ROOT, TINY

INJECT = Path(__file__).with_name("inject.py")


def program(launcher, *overrides, folder, fault=()):
    """Run train.py on the tiny network to its end; fault: what to inject, at which step, in which process."""
    script = [str(part) for part in (INJECT, *fault)] if fault else [str(ROOT / "train.py")]
    command = [*launcher, *script, *TINY, "run_name=r", *overrides]
    options = {"cwd": folder, "env": ENVIRONMENT, "capture_output": True, "text": True, "timeout": 300}
    return subprocess.run(command, **options)
