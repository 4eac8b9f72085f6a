"""Finished parts of an encoding job, kept in a folder until all are there.

A part is `NNNNNNN.npz`. Images of it that could not be read are listed in `NNNNNNN.errors.json`, written
before the part, and removed after one without errors: whenever a process is killed, a part without that file
is complete.
"""

import errno
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime.arrays import ZIP_ERRORS, read_member
from runtime.files import atomic_write, read_json, write_json

RESUME = "fix this and run the same command again to resume"


@dataclass(frozen=True)
class Part:
    """Latents (n, [2,] C, H, W), masks (n, H, W) or None, positions of their images; errors by position."""

    latents: np.ndarray
    masks: np.ndarray | None
    positions: np.ndarray
    errors: dict[int, str]


class PartFolder:
    """The parts of one job, which is described by `about`."""

    def __init__(self, path: Path, about: dict[str, Any], num_parts: int):
        self.path, self.about, self.num_parts = path, about, num_parts

    def start(self) -> list[int]:
        """Make the folder, or resume the one that is there; return the parts to do."""
        self.path.mkdir(parents=True, exist_ok=True)
        file = self.path / "about.json"
        if not file.exists():
            with _explained(file):
                write_json(file, self.about)
        old = _read_object(file)
        changes = [
            f"{key}: {old.get(key)} -> {new}" for key, new in self.about.items() if old.get(key) != new
        ]
        if changes:
            what = f"{self.path} was started with other settings ({'; '.join(changes)})"
            raise ValueError(f"{what}: use those, or remove it")
        done = {file.stem for file in self.path.glob("*.npz")}
        corrupt = {file.name.partition(".")[0] for file in self.path.glob("*.errors.json")}
        return [i for i in range(self.num_parts) if f"{i:07d}" not in done - corrupt]

    def write(self, i: int, part: Part) -> None:
        """Write a part atomically."""
        masks = {} if part.masks is None else {"masks": part.masks}
        with _explained(self._file(i)):
            if part.errors:
                write_json(self._errors(i), part.errors)
            with atomic_write(self._file(i)) as partial:
                np.savez(partial, latents=part.latents, positions=part.positions, **masks)
        if not part.errors:
            self._errors(i).unlink(missing_ok=True)

    def read(self, i: int) -> Part:
        file = self._file(i)
        try:
            with zipfile.ZipFile(file) as archive:
                masks = read_member(archive, "masks") if "masks.npy" in archive.namelist() else None
                latents, positions = read_member(archive, "latents"), read_member(archive, "positions")
        except ZIP_ERRORS as error:
            # EINVAL: an offset before the start of a damaged file. Other system errors are not damage.
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                raise
            file.unlink()
            raise ValueError(
                f"{file} was damaged ({error}) and is removed: run the same command again"
            ) from error
        return Part(latents, masks, positions, self.errors([i]))

    def errors(self, parts: list[int] | range) -> dict[int, str]:
        """Return the images that could not be read, by position, and why."""
        found = [_read_object(self._errors(i)) for i in parts if self._errors(i).exists()]
        return {int(position): error for errors in found for position, error in errors.items()}

    def remove(self) -> None:
        shutil.rmtree(self.path)

    def _file(self, i: int) -> Path:
        return self.path / f"{i:07d}.npz"

    def _errors(self, i: int) -> Path:
        return self.path / f"{i:07d}.errors.json"


def _read_object(file: Path) -> dict[str, Any]:
    try:
        found = read_json(file, file.stat().st_size)
        if not isinstance(found, dict):
            raise ValueError(f"{file} is damaged, it is not an object")
    except ValueError as error:
        raise ValueError(f"{error}: remove {file.parent} and start again") from error
    return found


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}; {RESUME}", str(file)) from error
