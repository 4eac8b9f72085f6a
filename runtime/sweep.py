"""State that the jobs of a sweep share across processes: the command line, and a file of ended jobs."""

import json
import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

# Environment variables: jobs in other processes inherit them.
COMMAND, ENDED = "TREAD_SWEEP_COMMAND", "TREAD_SWEEP_ENDED"


def is_main() -> bool:
    """True in the first process of a launch, also before the process group exists."""
    return int(os.environ.get("RANK", "0")) == 0


def start_sweep(arguments: Sequence[str]) -> None:
    """Set the command line and the file of ended jobs in the environment."""
    os.environ[COMMAND] = shlex.join(arguments)
    file = Path(f"runs/.sweep_{os.getpid()}.jsonl").absolute()
    file.unlink(missing_ok=True)  # left by a killed sweep with the same process number
    os.environ[ENDED] = str(file)


def sweep_arguments() -> list[str]:
    return shlex.split(os.environ[COMMAND])


def key_of(override: str) -> str:
    """Return the key or group that an override sets."""
    return override.partition("=")[0].lstrip("+~")


def swept_keys(arguments: Iterable[str]) -> set[str]:
    """Return the keys that a command line sweeps."""
    texts = [argument for argument in arguments if "=" in argument and not argument.startswith("-")]
    parsed = OverridesParser.create().parse_overrides(texts)
    return {override.key_or_group for override in parsed if override.is_sweep_override()}


def job_name(overrides: Iterable[str]) -> str:
    """Name a job by its overrides, without the ones that all jobs share."""
    arguments = sweep_arguments()
    shared = {key_of(text) for text in arguments} - swept_keys(arguments)
    return " ".join(text for text in overrides if key_of(text) not in shared)


def record_end(job: str, folder: str | None = None, reason: str | None = None, again: bool = False) -> None:
    """Record a job's run folder, its error (None: it has finished), and if it may succeed later."""
    path = Path(os.environ[ENDED])
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({"job": job, "folder": folder, "reason": reason, "again": again}) + "\n")


def pop_records() -> list[dict[str, Any]]:
    """Read the records of ended jobs, and remove the file."""
    file = Path(os.environ[ENDED])
    ended = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    file.unlink(missing_ok=True)
    return ended


def summary(finished: Sequence[dict[str, Any]], num_jobs: int) -> str:
    """List the finished jobs out of `num_jobs`, and the command that compares their runs."""
    lines = [f"sweep: {len(finished)} of {num_jobs} jobs finished"]
    lines += [f"  {job['job']}: {job['folder']}" for job in finished if job["folder"]]
    folders = dict.fromkeys(job["folder"] for job in finished if job["folder"])
    if len(folders) > 1:
        command = ["python", "-m", "reports", f"runs={json.dumps([*folders])}"]
        lines.append(f"Compare them: {shlex.join(command)}")
    return "\n".join(lines)
