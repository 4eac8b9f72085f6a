"""Processes that build something and run it on request, so that they can take turns."""

import multiprocessing
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from multiprocessing.connection import Connection
from typing import Any

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


def serve(connection: Connection, ready: Any, answers: Mapping[str, Callable[[], Any]]) -> None:
    """Report that all is built, and answer requests until the other side closes the connection."""
    connection.send(ready)
    with suppress(EOFError):
        while True:
            connection.send(answers[connection.recv()]())
