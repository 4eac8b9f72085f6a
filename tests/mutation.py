"""Mutation testing: run the tests on one wrong program after another, and see whether they fail.

    python -m tests.mutation                     all of them, ten minutes on two cores
    python -m tests.mutation diffusion/ ema.py   those of some files

Each entry of `tests/mutations/*.yaml` names a text in a file of the core, its wrong replacement, and the
tests that must fail. Copies are changed, never this tree.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from threading import RLock

import yaml
from tqdm import tqdm

from tests.programs import MAX_SEC, PRELOADED, ROOT

LISTS = Path(__file__).with_name("mutations")
GREEN, RED, HANGS = "GREEN", "red", "hangs"
OUTPUT = "output.txt"


@dataclass(frozen=True)
class Mutation:
    """`wrong` in place of `text` in `file`, on which `tests` (arguments of pytest) must fail."""

    file: str
    text: str
    wrong: str
    tests: str

    def __str__(self) -> str:
        return f"{self.file}: {_one_line(self.text)}  ->  {_one_line(self.wrong)}"

    def problem(self) -> str:
        """The fault of the entry itself; empty if it has none."""
        file = ROOT / self.file
        count = file.read_text().count(self.text) if file.is_file() else 0
        if count != 1:
            return f"{self}: the text is in the file {count} times, must be once"
        if not self.tests:
            return f"{self}: names no test"
        missing = [test for test in self.tests.split() if not _is_there(test)]
        return f"{self}: no test {missing[0]}" if missing else ""


def read_lists() -> list[Mutation]:
    lists = [yaml.safe_load(file.read_text()) for file in sorted(LISTS.glob("*.yaml"))]
    return [
        Mutation(file, **entry) for of_room in lists for file, entries in of_room.items() for entry in entries
    ]


def main() -> None:
    """Run the mutations, print the outcome of each, and exit with 1 unless the tests fail on all of them."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("files", nargs="*", help="parts of file names; default: all")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at once")
    asked = parser.parse_args()
    listed = [m for m in read_lists() if not asked.files or any(part in m.file for part in asked.files)]
    if problems := [problem for m in listed if (problem := m.problem())]:
        sys.exit("\n".join(["error: the lists do not fit the code:", *problems]))
    os.environ |= {"OMP_NUM_THREADS": "1", "LOKY_MAX_CPU_COUNT": "1"}  # several run at once
    # Bytecode is looked up by size and second of its source, and a mutation may change neither.
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    # A fork must not inherit threads or multiprocessing locks.
    tqdm.monitor_interval = 0
    tqdm.set_lock(RLock())
    for name in tqdm((*PRELOADED, "hypothesis", "pytest"), desc="import", unit="library"):
        import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutation_") as folder:
        copies = [_copy(Path(folder) / str(job)) for job in range(asked.jobs)]
        _check_that_all_pass(copies, sorted({test for m in listed for test in m.tests.split()}))
        survived = _survivors(listed, copies)
    print(f"{len(listed)} mutations, {len(listed) - len(survived)} red")
    if survived:
        sys.exit("\n".join(["error: the tests pass on", *map(str, survived)]))


def _check_that_all_pass(copies: Sequence[Path], tests: Sequence[str]) -> None:
    """Run the tests on the unchanged code, where they must pass."""
    print(f"{len(tests)} tests on the unchanged code", flush=True)
    shares = [(copy, tests[i :: len(copies)]) for i, copy in enumerate(copies)]
    started = {_start(copy, share): copy for copy, share in shares if share}
    failed = [started[pid] for pid, status in (os.wait() for _ in range(len(started))) if status]
    if failed:
        sys.exit(f"error: tests fail on the unchanged code\n{(failed[0] / OUTPUT).read_text()[-3000:]}")


def _survivors(mutations: Sequence[Mutation], copies: Sequence[Path]) -> list[Mutation]:
    """The mutations on which the tests pass."""
    waiting, free, running, survived = deque(mutations), list(copies), {}, []
    with tqdm(total=len(mutations), desc="mutations", unit="mutation") as bar:
        while waiting or running:
            while waiting and free:
                mutation, copy = waiting.popleft(), free.pop()
                file = copy / mutation.file
                file.write_text(file.read_text().replace(mutation.text, mutation.wrong))
                running[_start(copy, mutation.tests.split())] = (mutation, copy)
            pid, status = os.wait()
            mutation, copy = running.pop(pid)
            shutil.copyfile(ROOT / mutation.file, copy / mutation.file)
            free.append(copy)
            _end_group(pid)
            outcome = _outcome(status)
            survived += [mutation] if outcome not in (RED, HANGS) else []
            bar.update()
            tqdm.write(f"{outcome:5} {mutation}{_reason(copy)}")
    return survived


def _outcome(status: int) -> str:
    if os.WIFSIGNALED(status):
        return HANGS if os.WTERMSIG(status) == signal.SIGALRM else f"killed by {os.WTERMSIG(status)}"
    # 1: tests failed. Others, as for a file that cannot be collected, are not what the entry claims.
    code = os.waitstatus_to_exitcode(status)
    return {0: GREEN, 1: RED}.get(code, f"pytest ended with {code}")


def _reason(copy: Path) -> str:
    """Pytest's last line about a failed test: it shows whether the mutation was the cause."""
    lines = (copy / OUTPUT).read_text().splitlines()
    failures = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return f"  [{failures[-1].rpartition('::')[2][:160]}]" if failures else ""


def _end_group(pid: int) -> None:
    """Kill processes that a run of the tests left behind."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _start(copy: Path, tests: Sequence[str]) -> int:
    """Start pytest in a copy, in a fork, and return its process id; its output goes to OUTPUT."""
    if pid := os.fork():
        return pid
    os.setpgid(0, 0)
    if len(tests) < 20:
        signal.alarm(MAX_SEC)  # a hang counts as red
    output = os.open(copy / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(copy)
    # Import the copy, not this tree.
    for name, module in list(sys.modules.items()):
        if name != "__main__" and _is_ours(getattr(module, "__file__", None)):
            del sys.modules[name]
    sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(ROOT)))]
    code = 3
    try:
        import pytest

        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])
    finally:
        sys.stdout.flush()
        os._exit(code)


def _is_ours(file: str | None) -> bool:
    return file is not None and Path(file).is_relative_to(ROOT) and "site-packages" not in file


def _copy(to: Path) -> Path:
    """Copy tracked files, and untracked ones that are not ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.decode()
    for name in listed.split("\0"):
        if name and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, to / name)
    return to


def _is_there(test: str) -> bool:
    file, _, name = test.partition("::")
    return (ROOT / file).exists() and (not name or f"def {name.split('[')[0]}(" in (ROOT / file).read_text())


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    main()
