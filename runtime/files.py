"""Files that are there whole or not at all, and JSON that every reader takes."""

import hashlib
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def atomic_write(file: Path) -> Iterator[Path]:
    """Yield where to write what takes the place of `file` when all of it is on the disk.

    Whatever goes wrong before, `file` is as it was. The place has the suffix of `file`, by which libraries tell formats.
    """
    partial = file.with_name(f".{file.stem}.partial{file.suffix}")
    try:
        yield partial
        sync(partial)
        partial.replace(file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(file.parent)


def write_text(file: Path, text: str) -> None:
    """Write a text, whole or not at all."""
    with atomic_write(file) as partial:
        partial.write_text(text)


def write_json(file: Path, content: Any) -> None:
    """Write JSON, whole or not at all."""
    write_text(file, json.dumps(finite(content), indent=2) + "\n")


def finite(content: Any) -> Any:
    """Return what is written of JSON: null in place of numbers that are not finite, for which it has no words."""
    if isinstance(content, dict):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def read_json(file: Path) -> Any:
    """Read a JSON file.

    Raises:
        ValueError: it is damaged.
    """
    try:
        return json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged, it is no JSON: {error}") from error


def sha256(file: Path) -> str:
    """Return the hash of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
