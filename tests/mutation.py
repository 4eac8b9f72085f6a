"""Put one wrong program after another before the tests, and see whether they notice.

    python -m tests.mutation                     all of them, half an hour on two cores
    python -m tests.mutation diffusion/ ema.py   those of some files

Each entry of `tests/mutations/*.yaml` names a text of a file, what stands there instead, and the tests that must go red.
An entry that gives `equivalent`, the reason why no test can, is not run. Changed are copies, never this tree.
"""

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml
from tqdm import tqdm

ROOT = Path(__file__).parents[1]
LISTS = Path(__file__).with_name("mutations")
LONGEST_SEC = 300  # a program that hangs is noticed as well
RED, GREEN = "red", "GREEN"


@dataclass(frozen=True)
class Mutation:
    """A mistake: `wrong` in place of `text` in `file`, which `tests` (arguments of pytest) must notice."""

    file: str
    text: str
    wrong: str
    tests: str = ""
    equivalent: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {_one_line(self.text)}  ->  {_one_line(self.wrong)}"

    def problem(self, root: Path) -> str:
        """Return what is wrong with the entry itself, if anything."""
        count = (root / self.file).read_text().count(self.text) if (root / self.file).is_file() else 0
        if count != 1:
            return f"{self}: the text is there {count} times, must be there once"
        if bool(self.tests) == bool(self.equivalent):
            return f"{self}: must give either tests or equivalent"
        missing = [test for test in self.tests.split() if not _is_there(test, root)]
        return f"{self}: no test {missing[0]}" if missing else ""


def read_lists() -> list[Mutation]:
    """Return all entries of the lists."""
    lists = [yaml.safe_load(file.read_text()) for file in sorted(LISTS.glob("*.yaml"))]
    return [Mutation(file, **entry) for of_room in lists for file, entries in of_room.items() for entry in entries]


def main() -> None:
    """Run the mutations asked for, print what became of each, and end with 1 unless all are red."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="parts of the names of files; none: all")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at once")
    asked = parser.parse_args()
    listed = [m for m in read_lists() if not asked.files or any(part in m.file for part in asked.files)]
    if problems := [problem for m in listed if (problem := m.problem(ROOT))]:
        sys.exit("\n".join(["error: the lists do not fit the code:", *problems]))
    mutations = [m for m in listed if not m.equivalent]
    with tempfile.TemporaryDirectory(prefix="mutation_") as folder:
        copies: queue.Queue[Path] = queue.Queue()
        for job in range(asked.jobs):
            copies.put(_copy(Path(folder) / str(job)))
        survived = _run(mutations, copies, asked.jobs)
    print(f"{len(mutations)} mutations, {len(mutations) - len(survived)} red; {len(listed) - len(mutations)} named equivalent")
    if survived:
        sys.exit("\n".join(["error: the tests did not notice:", *map(str, survived)]))


def _run(mutations: Sequence[Mutation], copies: "queue.Queue[Path]", jobs: int) -> list[Mutation]:
    """Return those that the tests did not notice."""
    copy = copies.get()
    print("the tests of the list, on the code as it is", flush=True)
    if (result := _pytest(copy, sorted({test for m in mutations for test in m.tests.split()}))).returncode:
        sys.exit(f"error: the tests fail as it is, so their red would say nothing\n{result.stdout[-3000:]}")
    copies.put(copy)

    def outcome(mutation: Mutation) -> tuple[Mutation, str]:
        copy = copies.get()
        try:
            return mutation, _outcome(mutation, copy)
        finally:
            copies.put(copy)

    survived = []
    with ThreadPoolExecutor(jobs) as pool, tqdm(total=len(mutations), desc="mutations", unit="mutation") as bar:
        for mutation, said in pool.map(outcome, mutations):
            bar.update()
            tqdm.write(f"{said:5} {mutation}")
            if said != RED:
                survived.append(mutation)
    return survived


def _outcome(mutation: Mutation, copy: Path) -> str:
    file = copy / mutation.file
    right = file.read_text()
    file.write_text(right.replace(mutation.text, mutation.wrong))
    try:
        result = _pytest(copy, mutation.tests.split())
    except subprocess.TimeoutExpired:
        return RED
    finally:
        file.write_text(right)
    # 1: tests failed. Anything else, as a file that cannot be read, is not what the entry claims.
    return {0: GREEN, 1: RED}.get(result.returncode, f"ERROR {result.returncode}")


def _pytest(copy: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    # Without bytecode: it is told apart by size and second, and a change may alter neither.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    options = {"cwd": copy, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run(command, **options, timeout=None if len(tests) > 10 else LONGEST_SEC)


def _copy(to: Path) -> Path:
    """Copy what git tracks, and what is new and not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, to / name)
    return to


def _is_there(test: str, root: Path) -> bool:
    file, _, name = test.partition("::")
    if not (root / file).exists():
        return False
    return not name or f"def {name.split('[')[0]}(" in (root / file).read_text()


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    main()
