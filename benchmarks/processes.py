"""Processes that build something and run it when asked, so that they can take turns."""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from runtime.provenance import PROJECT

# Forks of a process that has the libraries and has not touched a device.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["benchmarks.runs"])


class ProcessFailed(Exception):
    """A process of a benchmark has ended in an error, which it has printed."""


def run_apart(function: Callable[..., None], *arguments: Any) -> int:
    """Call a function in a process of its own, and return how that ended: its status, or a signal as a
    negative number.
    """
    process = CONTEXT.Process(target=_called, args=(function, *arguments))
    process.start()
    process.join()
    return process.exitcode


def run_program(program: str, *arguments: str) -> None:
    """Run one of the project's programs in a process of its own.

    Raises:
        ProcessFailed: what it said stands above.
    """
    if status := run_apart(_program, program, arguments):
        raise ProcessFailed(f"failed: {program} ended with status {status}, as it says above")


class Worker:
    """A process that builds one kind of step and runs it when asked.

    Args:
        kind: `ours`, `plain` or `check`, called in the process.
    """

    def __init__(self, kind: Callable[..., None], folder: Path, name: str, overrides: Sequence[str]):
        self.name, (self.connection, other) = name, CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_called, args=(kind, other, folder, overrides))
        self.process.start()
        other.close()

    @cached_property
    def ready(self) -> Any:
        """What the process says when all is built.

        Raises:
            ProcessFailed: its traceback stands above.
        """
        return self._receive()

    def ask(self, word: str) -> Any:
        """Send a word, and return the answer."""
        try:
            self.connection.send(word)
        except BrokenPipeError as error:
            raise ProcessFailed(self._failure()) from error
        return self._receive()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        self.connection.close()
        self.process.join()

    def _receive(self) -> Any:
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise ProcessFailed(self._failure()) from error

    def _failure(self) -> str:
        return f"failed: the process of the {self.name} step, as it says above"


def serve(connection: Connection, ready: Any, answers: dict[str, Callable[[], Any]]) -> None:
    """Say that all is built, and answer until the other side closes."""
    connection.send(ready)
    while True:
        try:
            word = connection.recv()
        except EOFError:
            return
        connection.send(answers[word]())


def _called(function: Callable[..., None], *arguments: Any) -> None:
    # A process takes over the method that started it: what it starts itself, workers that read data say,
    # starts as always.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    function(*arguments)


def _program(program: str, arguments: Sequence[str]) -> None:
    os.chdir(PROJECT)
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")
