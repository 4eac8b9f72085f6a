"""What the jobs of a sweep share, in whichever processes a launcher runs them: the sweep's command line, and
a file of the jobs that failed.
"""

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Environment variables, which jobs in other processes inherit.
COMMAND, FAILURES = "TREAD_SWEEP_COMMAND", "TREAD_SWEEP_FAILURES"


def start_sweep(arguments: Sequence[str]) -> None:
    """Tell the jobs the command line, and where they write that they failed."""
    os.environ[COMMAND] = shlex.join(arguments)
    file = Path(f"runs/.sweep_{os.getpid()}.jsonl").absolute()
    file.unlink(missing_ok=True)  # of a sweep that was killed, whose number is given again
    os.environ[FAILURES] = str(file)


def sweep_arguments() -> list[str]:
    """Return the command line of the sweep."""
    return shlex.split(os.environ[COMMAND])


def record_failure(job: str, reason: str, again: bool) -> None:
    """Record that a job failed; `again`: it may succeed later."""
    path = Path(os.environ[FAILURES])
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({"job": job, "reason": reason, "again": again}) + "\n")


def take_failures() -> list[dict[str, Any]]:
    """Return what was recorded, and remove the record."""
    file = Path(os.environ[FAILURES])
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    file.unlink(missing_ok=True)
    return found
