"""Processes that build something and run it when asked, so that they can take turns."""

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


class ProcessFailed(Exception):
    """A process of a benchmark has ended in an error, which it has printed."""


class Worker:
    """A process that builds one kind of step and runs it when asked.

    Args:
        kind: `ours`, `plain` or `check`, called in the process.

    Raises:
        ProcessFailed: its traceback stands above.
    """

    def __init__(self, kind: Callable[..., None], folder: Path, name: str, overrides: Sequence[str]):
        context = multiprocessing.get_context("spawn")
        self.name, (self.connection, other) = name, context.Pipe()
        self.process = context.Process(target=kind, args=(other, folder, overrides))
        self.process.start()
        other.close()
        self.ready = self._receive()

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
