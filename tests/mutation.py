"""Mutation testing: run the tests on one wrong program after another, and see whether they fail.

    python -m tests.mutation                     all of them, half an hour on two cores
    python -m tests.mutation diffusion/ ema.py   some files only

Each entry of `tests/mutations/*.yaml` names a text in a file of the core, its wrong replacement, and the
tests that must fail. Copies are changed, never this tree.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import yaml
from tqdm import tqdm

from tests.programs import MAX_SEC, ROOT

LISTS = Path(__file__).with_name("mutations")
GREEN, RED, HANGS = "GREEN", "red", "hangs"


@dataclass(frozen=True)
class Mutation:
    """`wrong` in place of `text` in `file`, on which `tests` (arguments of pytest) must fail."""

    file: str
    text: str
    wrong: str
    tests: str

    def __str__(self) -> str:
        text, wrong = (" ".join(code.split()) for code in (self.text, self.wrong))
        return f"{self.file}: {text}  ->  {wrong}"

    def problem(self) -> str:
        """The fault of the entry itself; empty if it has none."""
        file = ROOT / self.file
        count = file.read_text().count(self.text) if file.is_file() else 0
        if count != 1:
            return f"{self}: the text is in the file {count} times, must be once"
        if not self.tests:
            return f"{self}: names no test"
        missing = [test for test in self.tests.split() if not _exists(test)]
        return f"{self}: no test {missing[0]}" if missing else ""


def read_lists() -> list[Mutation]:
    lists = [yaml.safe_load(file.read_text()) for file in sorted(LISTS.glob("*.yaml"))]
    return [Mutation(file, **entry) for room in lists for file, entries in room.items() for entry in entries]


def main() -> None:
    """Run the mutations, print the outcome of each, and exit with 1 unless the tests fail on all of them."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("files", nargs="*", help="parts of file names; default: all")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at once")
    options = parser.parse_args()
    listed = [m for m in read_lists() if not options.files or any(part in m.file for part in options.files)]
    if problems := [problem for m in listed if (problem := m.problem())]:
        sys.exit("\n".join(["error: the lists do not fit the code:", *problems]))
    with tempfile.TemporaryDirectory(prefix="mutation_") as folder:
        copies = [_copy(Path(folder) / str(job)) for job in range(options.jobs)]
        outcome, output = _run_tests(
            copies[0], sorted({test for m in listed for test in m.tests.split()}), None
        )
        if outcome != GREEN:
            sys.exit(f"error: tests fail on the unchanged code\n{output[-3000:]}")
        survived = []
        for mutation, outcome, output in run(listed, copies):
            tqdm.write(f"{outcome:5} {mutation}{_reason(output)}")
            survived += [mutation] if outcome not in (RED, HANGS) else []
    print(f"{len(listed)} mutations, {len(listed) - len(survived)} red")
    if survived:
        sys.exit("\n".join(["error: the tests pass on", *map(str, survived)]))


def run(mutations: Sequence[Mutation], copies: Sequence[Path]) -> Iterator[tuple[Mutation, str, str]]:
    """Yield each mutation with its outcome and the output of its tests; one at a time runs in each copy."""
    free = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def run_one(mutation: Mutation) -> tuple[Mutation, str, str]:
        copy = free.get()
        file = copy / mutation.file
        right = file.read_text()
        file.write_text(right.replace(mutation.text, mutation.wrong))
        outcome = _run_tests(copy, mutation.tests.split(), MAX_SEC)
        file.write_text(right)
        free.put(copy)
        return mutation, *outcome

    with ThreadPoolExecutor(len(copies)) as pool:
        yield from tqdm(pool.map(run_one, mutations), "mutations", len(mutations), unit="mutation")


def _run_tests(copy: Path, tests: Sequence[str], timeout_sec: float | None) -> tuple[str, str]:
    """Run pytest in a copy; its outcome and its output."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    # Several run at once. A mutation may change neither size nor second, by which bytecode is looked up.
    variables = {"OMP_NUM_THREADS": "1", "LOKY_MAX_CPU_COUNT": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "timeout": timeout_sec, "text": True}
    try:
        ended = subprocess.run(command, cwd=copy, env={**os.environ, **variables}, **options)
    except subprocess.TimeoutExpired:
        return HANGS, ""
    # 1: tests failed. Others, as for a file that cannot be collected, are not what the entry claims.
    code = ended.returncode
    return {0: GREEN, 1: RED}.get(code, f"pytest ended with {code}"), ended.stdout


def _reason(output: str) -> str:
    """Pytest's last line about a failed test: it shows whether the mutation was the cause."""
    failures = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return f"  [{failures[-1].rpartition('::')[2][:160]}]" if failures else ""


def _copy(to: Path) -> Path:
    """Copy tracked files, and untracked ones that are not ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout.decode()
    for name in listed.split("\0"):
        if name and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, to / name)
    return to


def _exists(test: str) -> bool:
    file, _, name = test.partition("::")
    return (ROOT / file).exists() and (not name or f"def {name.split('[')[0]}(" in (ROOT / file).read_text())


if __name__ == "__main__":
    main()
