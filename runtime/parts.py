"""Finished parts of a long job, in a folder: a kill loses the parts that are being made, and no others.

A part is a file of arrays, `NNNNNNN.npz`, complete or not there.
"""

import errno
import math
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from runtime.arrays import ZIP_ERRORS, read_member
from runtime.files import atomic_write, read_json, write_json
from runtime.lock import Lock

RESUME = "fix this and run the same command again to resume"
ABOUT = "about.json"


class PartFolder:
    """The parts of one job, which is described by `about`.

    Args:
        hint: what to do about parts of another job, for errors.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], num_parts: int, hint: str = "remove it"):
        self.path, self.about, self.num_parts, self._hint = path, dict(about), num_parts, hint

    def start(self, replace: bool = False) -> list[int]:
        """Make the folder, or resume the one that is there; return the parts to do.

        Args:
            replace: remove the parts of another job, which are an error otherwise.
        """
        file = self.path / ABOUT
        if self.path.is_symlink():
            raise ValueError(f"{self.path} is a link, which may lead anywhere: remove it")
        with explained(file):
            self.path.mkdir(parents=True, exist_ok=True)
            if not file.exists():
                write_json(file, self.about)
        try:
            old = read_object(file)
        except ValueError:
            if not replace:
                raise
            old = {}
        wanted = self.about.items()
        changes = [f"{key}: {old.get(key)} -> {new}" for key, new in wanted if old.get(key) != new]
        if changes and (replace or self.is_empty()):
            self.remove()
            return self.start()
        if changes:
            what = f"{self.path} was started with other settings ({'; '.join(changes)})"
            raise ValueError(f"{what}: use those, or {self._hint}")
        done = self.done()
        return [i for i in range(self.num_parts) if i not in done]

    def done(self) -> set[int]:
        """The finished parts."""
        return {int(file.stem) for file in self.path.glob("*.npz") if file.stem.isdecimal()}

    def is_empty(self) -> bool:
        """True if no part was ever finished."""
        return next(self.path.glob("[0-9]*.npz"), None) is None

    def write(self, i: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Write a part."""
        with explained(self.file(i)), atomic_write(self.file(i)) as partial:
            np.savez(partial, **arrays)

    def read(self, i: int, *names: str) -> dict[str, np.ndarray]:
        """Read the named arrays of a part (all, if none is); a damaged one is removed and made again."""
        file = self.file(i)
        try:
            with zipfile.ZipFile(file) as archive:
                names = names or [name.removesuffix(".npy") for name in archive.namelist()]
                return {name: read_member(archive, name) for name in names}
        except ZIP_ERRORS as error:
            # EINVAL: an offset before the start of a damaged file. Other system errors are not damage.
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                raise
            file.unlink()
            raise ValueError(
                f"{file} was damaged ({error}) and is removed: run the same command again"
            ) from error

    @contextmanager
    def left_if_filled(self) -> Iterator[None]:
        """Remove the folder after an error where no part is there: it has nothing to resume."""
        try:
            yield
        except BaseException:
            if self.path.exists() and self.is_empty():
                self.remove()
            raise

    def lock(self) -> Lock:
        """The lock of the program that makes parts; another program waits for it."""
        return Lock(self.path.with_name(f".{self.path.name}.lock"), str(self.path), wait_sec=math.inf)

    def remove(self) -> None:
        """Remove the folder with all parts."""
        shutil.rmtree(self.path)

    def file(self, i: int) -> Path:
        """The file of a part."""
        return self.path / f"{i:07d}.npz"


def settings_of(path: Path) -> dict[str, Any]:
    """Read what describes the job whose parts are in a folder; empty if there is none."""
    return read_object(path / ABOUT) if (path / ABOUT).is_file() else {}


def read_object(file: Path) -> dict[str, Any]:
    """Read a JSON object of a folder of parts."""
    try:
        found = read_json(file, file.stat().st_size)
        if not isinstance(found, dict):
            raise ValueError(f"{file} is damaged, it is not an object")
    except ValueError as error:
        raise ValueError(f"{error}: remove {file.parent} and start again") from error
    return found


def check_room(key: str, out: Path, num_bytes: int) -> None:
    """Raise a ValueError where a disk has no room for what is about to be written."""
    free = shutil.disk_usage(next(folder for folder in out.resolve().parents if folder.exists())).free
    if free < num_bytes:
        room = f"{num_bytes / 2**30:.1f} GiB while it is written, {free / 2**30:.1f} are free"
        raise ValueError(f"{key}={out} needs {room}")


@contextmanager
def explained(file: Path) -> Iterator[None]:
    """Say in errors of the disk that the job can be resumed."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}; {RESUME}", str(file)) from error
