"""Processes that build something and run it on request, so that they can take turns."""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.results import Record, Rows
from runtime.provenance import PROJECT

# Forks of a process that has the libraries and has not touched a device.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["benchmarks.runs"])


class ProcessFailed(Exception):
    """A process of a benchmark has ended in an error, which it has printed."""


def start_apart(function: Callable[..., None], *arguments: Any) -> multiprocessing.Process:
    """Call a function in a process of its own."""
    process = CONTEXT.Process(target=_called, args=(function, *arguments))
    process.start()
    return process


def _called(function: Callable[..., None], *arguments: Any) -> None:
    # A process inherits the method that started it; workers of its own, for data, have the default one.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    function(*arguments)


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


class Worker:
    """A process that builds something, reports, and answers requests.

    Args:
        build: called in the process with its end of a connection and the arguments; ends with `serve`.
    """

    def __init__(self, name: str, build: Callable[..., None], *arguments: Any):
        self.name, (self.connection, other) = name, CONTEXT.Pipe()
        self.process = start_apart(build, other, *arguments)
        other.close()

    @cached_property
    def ready(self) -> Any:
        """The report of the process once all is built."""
        return self._receive()

    def ask(self, word: str) -> Any:
        """Send a request, and return the answer."""
        _ = self.ready  # the first that comes: nobody must take it for an answer
        with suppress(BrokenPipeError):  # `_receive` raises
            self.connection.send(word)
        return self._receive()

    def _receive(self) -> Any:
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise ProcessFailed(f"the process of the {self.name} step failed: see above") from error

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()
        self.process.join()


def take_turns(workers: Mapping[str, Worker], word: str, repeats: int) -> dict[str, list[Any]]:
    """Answers of workers that take turns, so that a machine that is busy slows all of them."""
    found = {name: [] for name in workers}
    for _ in range(repeats):
        for name, worker in workers.items():
            found[name].append(worker.ask(word))
    return found


def serve(connection: Connection, ready: Any, answers: Mapping[str, Callable[[], Any]]) -> None:
    """Report that all is built, and answer requests until the other side closes the connection."""
    connection.send(ready)
    with suppress(EOFError):
        while True:
            connection.send(answers[connection.recv()]())
