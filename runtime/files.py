"""Files that are there whole or not at all, and JSON that every reader takes."""

import hashlib
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

MAX_JSON_BYTES = 2**24
# Every list takes some 80 bytes of memory: text of hardly anything but brackets would become thirty times as
# much.
FREE_BRACKETS, BYTES_PER_BRACKET = 1000, 8


@contextmanager
def atomic_write(file: Path) -> Iterator[Path]:
    """Yield where to write what takes the place of `file` when all of it is on the disk.

    Whatever goes wrong before, `file` is as it was. The place has the suffix of `file`, by which libraries
    tell formats.
    """
    partial = file.with_name(f".{file.stem}.partial{file.suffix}")
    partial.unlink(missing_ok=True)  # what a kill left, or a link that came with a folder from elsewhere
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
    """Return what is written of JSON: null in place of numbers that are not finite, for which it has no
    words.
    """
    if isinstance(content, dict):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def read_json(file: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read a JSON file."""
    try:
        with file.open("rb") as opened:
            return parse_json(read_bounded(opened, max_bytes))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged, it is no JSON: {error}") from error


def parse_json(data: bytes) -> Any:
    """Parse JSON from outside, whose bytes are bounded, in memory that is bounded by them."""
    brackets = data.count(b"[") + data.count(b"{")
    if brackets > FREE_BRACKETS + len(data) // BYTES_PER_BRACKET:
        raise ValueError(f"it holds {brackets} brackets in {len(data)} bytes")
    return json.loads(data)


def read_bounded(file: BinaryIO, max_bytes: int) -> bytes:
    """Read a file to its end; raise a ValueError if that is further than so many bytes."""
    data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"it holds more than {max_bytes} bytes, must be at most so many")
    return data


def files_in(folder: Path) -> Iterator[str]:
    """Yield the names of all files in a folder and its subfolders, relative to it, also through links to
    other folders.

    Hidden folders are left out. Not Path.rglob, which takes minutes for a million files and follows no links.
    """
    seen = set()
    for path, folders, files in os.walk(folder, followlinks=True, onerror=_raise):
        status, inside = Path(path).stat(), Path(path).relative_to(folder)
        place = status.st_dev, status.st_ino
        if place in seen:
            raise ValueError(
                f"{path} is a folder that is listed already, under another name: one of the two must go"
            )
        seen.add(place)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        prefix = "" if inside == Path() else f"{inside.as_posix()}/"
        yield from (prefix + name for name in files)


def sha256(file: Path) -> str:
    """Return the hash of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _raise(error: OSError) -> None:
    raise error


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
