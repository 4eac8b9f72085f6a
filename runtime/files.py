"""Atomic writes, JSON in the standard format, and hashes of files."""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from runtime.errors import as_value_error

MAX_JSON_BYTES = 2**24
# A list takes about 80 bytes of memory: a text of brackets alone would take thirty times its size.
FREE_BRACKETS, BYTES_PER_BRACKET = 1000, 8


@contextmanager
def atomic_write(file: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, which replaces `file` once it is complete on the disk.

    After an error `file` is unchanged. The temporary path has the suffix of `file`.
    """
    partial = file.with_name(f".{file.stem}.partial{file.suffix}")
    partial.unlink(missing_ok=True)  # left by a killed process, or a link
    try:
        yield partial
        sync(partial)
        partial.replace(file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(file.parent)


def write_text(file: Path, text: str) -> None:
    """Write a text atomically."""
    with atomic_write(file) as partial:
        partial.write_text(text)


def write_json(file: Path, content: Any) -> None:
    """Write JSON atomically; numbers that are not finite become null."""
    write_text(file, json.dumps(finite(content), indent=2) + "\n")


def finite(content: Any) -> Any:
    """Replace numbers that are not finite by None in JSON content."""
    if isinstance(content, dict):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def read_json(file: Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    damaged = as_value_error(f"{file} is damaged, not JSON", ValueError, RecursionError)
    with damaged, file.open("rb") as opened:
        return parse_json(read_bounded(opened, max_bytes))


def parse_json(data: bytes) -> Any:
    """Parse untrusted JSON in memory proportional to its size."""
    brackets = data.count(b"[") + data.count(b"{")
    if brackets > FREE_BRACKETS + len(data) // BYTES_PER_BRACKET:
        raise ValueError(f"it holds {brackets} brackets in {len(data)} bytes")
    return json.loads(data)


def read_bounded(file: BinaryIO, max_bytes: int) -> bytes:
    """Read a file; raise a ValueError if it has more than `max_bytes`."""
    data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"it holds more than {max_bytes} bytes")
    return data


def files_in(folder: Path) -> Iterator[str]:
    """Yield the relative names of all files in a folder and its subfolders; links are followed.

    Hidden folders are skipped. Path.rglob would take minutes for a million files, and follows no links.
    """
    seen = set()
    for path, folders, files in os.walk(folder, followlinks=True, onerror=_raise):
        status, inside = Path(path).stat(), Path(path).relative_to(folder)
        identity = status.st_dev, status.st_ino
        if identity in seen:
            raise ValueError(f"{path} is reached twice, through links: remove one of them")
        seen.add(identity)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        prefix = "" if inside == Path() else f"{inside.as_posix()}/"
        yield from (prefix + name for name in files)


def sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def hash_files(folder: Path, names: Iterable[str | Path]) -> str:
    """Hash the names and contents of files in a folder."""
    listing = [f"{name.as_posix()} {sha256(folder / name)}" for name in sorted(map(Path, names))]
    return hashlib.sha256("\n".join(listing).encode()).hexdigest()


def _raise(error: OSError) -> None:
    raise error


def sync(path: Path) -> None:
    """Wait until a file or a folder's entries are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
