"""Processes that build something and run it on request, so that they can take turns."""

import argparse
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.results import Record, Rows
from runtime.provenance import PROJECT

# Forks of a process that has the libraries and has not touched a device.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["benchmarks.runs"])
Answers = Mapping[str, Callable[[], Any]]  # by request
ANSWERS: dict[str, Callable[[], Any]] = {}  # in the process of a worker


def program_parser(module: str, description: str) -> argparse.ArgumentParser:
    """The parser of a program, whose help shows the description as it is written."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(f"python -m {module}", description=description, formatter_class=raw)


def study_parser(module: str, description: str) -> argparse.ArgumentParser:
    """The same for a program that trains many runs and records them."""
    parser = program_parser(module, description)
    parser.add_argument("out", type=Path, help="folder of the runs and the records")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal, at sizes that take seconds")
    parser.add_argument(
        "--jobs", type=int, default=2, help="at a time, each on its share of the cores; default: 2"
    )
    return parser


def record_all(calls: Mapping[str, Callable[[], Rows]], record: Record, jobs: int) -> None:
    """Call functions by what is not in a record yet, some at a time, each on its share of the cores, and add
    their rows as they end, or why they failed. Ctrl-C ends the programs that run, and starts no other.
    """
    cores = sorted(os.sched_getaffinity(0))
    shares = [set(cores[i::jobs]) or set(cores) for i in range(jobs)]
    # What a thread starts runs on its cores: programs that share cores wait for each other.
    with ThreadPoolExecutor(jobs, initializer=lambda: os.sched_setaffinity(0, shares.pop())) as pool:
        todo = calls.keys() - record.done()
        started = {pool.submit(call): name for name, call in calls.items() if name in todo}
        try:
            for i, ended in enumerate(as_completed(started), start=1):
                try:
                    rows = ended.result()
                except (OSError, ValueError) as error:  # the same command tries again
                    rows = [{"failed": str(error)}]
                record.add(started[ended], rows)
                print(f"{i} of {len(started)}: {started[ended]}", flush=True)
        finally:
            pool.shutdown(cancel_futures=True)


def start_program(program: str, log: Path, *overrides: str) -> None:
    """Run a program of the project on the CPU; its output goes to the end of a file.

    Args:
        program: a file, or `-m` and a module.

    Raises:
        OSError: it ended with an error.
    """
    command = [sys.executable, *program.split(), *overrides]
    with log.open("ab") as file:
        on_cpu = {**os.environ, "ACCELERATE_USE_CPU": "true"}
        ended = subprocess.run(command, cwd=PROJECT, env=on_cpu, stdout=file, stderr=subprocess.STDOUT)
    if ended.returncode:
        raise OSError(f"{program} ended with status {ended.returncode} ({log})")


class Worker(ProcessPoolExecutor):
    """A process that builds something, and answers requests about it.

    Args:
        build: called in the process with the arguments; returns a report, and what answers each request.
    """

    def __init__(self, build: Callable[..., tuple[Any, Answers]], *arguments: Any):
        super().__init__(1, CONTEXT, _started)
        self._built = self.submit(_build, build, *arguments)

    @property
    def ready(self) -> Any:
        """The report of the process once all is built; raises what building raised."""
        return self._built.result()

    def ask(self, word: str) -> Any:
        """Send a request, and wait for the answer."""
        _ = self.ready
        return self.submit(_answer, word).result()

    def __exit__(self, *error: object) -> None:
        with suppress(BrokenExecutor):
            # Else it would wait for workers of its own, for data, which ignore signals.
            self.submit(os._exit, 0)
        super().__exit__(*error)


def _started() -> None:
    # A process inherits the method that started it; workers of its own, for data, have the default one.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _build(build: Callable[..., tuple[Any, Answers]], *arguments: Any) -> Any:
    report, answers = build(*arguments)
    ANSWERS.update(answers)
    return report


def _answer(word: str) -> Any:
    return ANSWERS[word]()


def take_turns(workers: Mapping[str, Worker], word: str, repeats: int) -> dict[str, list[Any]]:
    """Answers of workers that take turns, so that a machine that is busy slows all of them."""
    found = {name: [] for name in workers}
    for _ in range(repeats):
        for name, worker in workers.items():
            found[name].append(worker.ask(word))
    return found
