"""Command lines of benchmarks, programs that run at once, and worker processes that take turns."""

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

# Workers are forks of a process that has imported the libraries and not used a device.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["benchmarks.runs"])
Answers = Mapping[str, Callable[[], Any]]  # request -> function
ANSWERS: dict[str, Callable[[], Any]] = {}  # of this worker process


def program_parser(module: str, description: str) -> argparse.ArgumentParser:
    """Return a parser that prints the description without reflowing it."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(f"python -m {module}", description=description, formatter_class=raw)


def record_all(calls: Mapping[str, Callable[[], Rows]], record: Record, jobs: int) -> None:
    """Call the functions of the settings that are not in a record yet, and add their rows or errors to it.

    `jobs` calls run at once, each on its share of the cores. Ctrl-C stops them and starts no others.
    """
    cores = sorted(os.sched_getaffinity(0))
    shares = [set(cores[i::jobs]) or set(cores) for i in range(jobs)]
    # Programs inherit the cores of the thread that starts them; on shared cores they would wait.
    with ThreadPoolExecutor(jobs, initializer=lambda: os.sched_setaffinity(0, shares.pop())) as pool:
        todo = calls.keys() - record.done()
        settings = {pool.submit(call): name for name, call in calls.items() if name in todo}
        try:
            for i, future in enumerate(as_completed(settings), start=1):
                try:
                    rows = future.result()
                except (OSError, ValueError) as error:  # the same command tries again
                    rows = [{"failed": str(error)}]
                record.add(settings[future], rows)
                print(f"{i} of {len(settings)}: {settings[future]}", flush=True)
        finally:
            pool.shutdown(cancel_futures=True)


def start_program(program: str, log: Path, *overrides: str) -> None:
    """Run a program of the project, and append its output to a log.

    Raises:
        OSError: the program failed.
    """
    command = [sys.executable, program, *overrides]
    with log.open("ab") as file:
        result = subprocess.run(command, cwd=PROJECT, stdout=file, stderr=subprocess.STDOUT)
    if result.returncode:
        raise OSError(f"{program} failed with exit status {result.returncode} (log: {log})")


class Worker(ProcessPoolExecutor):
    """A process that builds an object and answers requests about it.

    Args:
        build: called in the process with `arguments`; returns a report and the answers to requests.
    """

    def __init__(self, build: Callable[..., tuple[Any, Answers]], *arguments: Any):
        super().__init__(1, CONTEXT, _initialize_worker)
        self._built = self.submit(_build, build, *arguments)

    @property
    def ready(self) -> Any:
        """Report of the process, once it has built everything. Raises the errors of `build`."""
        return self._built.result()

    def ask(self, request: str) -> Any:
        """Send a request and wait for the answer."""
        _ = self.ready
        return self.submit(_answer, request).result()

    def __exit__(self, *error: object) -> None:
        with suppress(BrokenExecutor):
            # A normal exit would wait for its data workers, which ignore signals.
            self.submit(os._exit, 0)
        super().__exit__(*error)


def _initialize_worker() -> None:
    # A process inherits its start method. Its data workers use the default one.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _build(build: Callable[..., tuple[Any, Answers]], *arguments: Any) -> Any:
    report, answers = build(*arguments)
    ANSWERS.update(answers)
    return report


def _answer(request: str) -> Any:
    return ANSWERS[request]()


def take_turns(workers: Mapping[str, Worker], request: str, repeats: int) -> dict[str, list[Any]]:
    """Ask workers in turn, so that a busy machine slows all of them. Return the answers of each."""
    answers = {name: [] for name in workers}
    for _ in range(repeats):
        for name, worker in workers.items():
            answers[name].append(worker.ask(request))
    return answers
