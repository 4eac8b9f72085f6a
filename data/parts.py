"""Finished parts of an encoding job, kept in a folder until all are there.

A part is `NNNNNNN.npz`. Images of it that could not be read are told in `NNNNNNN.errors.json`, written before
the part, and removed after one without errors: whatever moment a process is killed at, a part without that
file lacks nothing.
"""

import errno
import json
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.images import ZIP_ERRORS
from runtime.arrays import read_member
from runtime.files import atomic_write


@dataclass(frozen=True)
class Part:
    """Latents (n, [2,] C, H, W), masks (n, H, W) or None, and the positions of their images; errors by
    position.
    """

    latents: np.ndarray
    masks: np.ndarray | None
    positions: np.ndarray
    errors: dict[int, str]

    @staticmethod
    def join(pieces: list["Part"]) -> "Part":
        """Put pieces together."""
        masks = None if pieces[0].masks is None else np.concatenate([piece.masks for piece in pieces])
        latents, positions = (
            np.concatenate([getattr(piece, key) for piece in pieces]) for key in ("latents", "positions")
        )
        errors = {position: error for piece in pieces for position, error in piece.errors.items()}
        return Part(latents, masks, positions, errors)


class PartFolder:
    """The parts of one job.

    Args:
        about: what must not change while parts of it are there.
    """

    def __init__(self, path: Path, about: dict[str, Any], num_parts: int):
        self.path, self.about, self.num_parts = path, about, num_parts

    def begin(self) -> list[int]:
        """Make the folder, or go on with the one that is there; return the parts that are still to do.

        Raises:
            ValueError: it was begun with something else, or what it was begun with cannot be read.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        file = self.path / "about.json"
        if not file.exists():
            with _replacing(file) as partial:
                partial.write_text(json.dumps(self.about, indent=2))
        begun = _read_json(file)
        changes = [
            f"{key}: {begun.get(key)} -> {value}"
            for key, value in self.about.items()
            if begun.get(key) != value
        ]
        if changes:
            raise ValueError(
                f"{self.path} was begun with something else ({'; '.join(changes)}): go on with that, or "
                "remove it"
            )
        there = {file.name for file in self.path.iterdir()}
        done = [
            self._file(i).name in there and self._errors(i).name not in there for i in range(self.num_parts)
        ]
        return [i for i in range(self.num_parts) if not done[i]]

    def write(self, i: int, part: Part) -> None:
        """Write a part, whole or not at all."""
        if part.errors:
            with _replacing(self._errors(i)) as partial:
                partial.write_text(json.dumps(part.errors))
        with _replacing(self._file(i)) as partial:
            masks = {} if part.masks is None else {"masks": part.masks}
            np.savez(partial, latents=part.latents, positions=part.positions, **masks)
        if not part.errors:
            self._errors(i).unlink(missing_ok=True)

    def read(self, i: int) -> Part:
        """Read a part.

        Raises:
            ValueError: its file was damaged; it is removed, so that it is made again.
        """
        file = self._file(i)
        try:
            with zipfile.ZipFile(file) as archive:
                masks = read_member(archive, "masks") if "masks.npy" in archive.namelist() else None
                return Part(
                    read_member(archive, "latents"),
                    masks,
                    read_member(archive, "positions"),
                    self.errors([i]),
                )
        except (KeyError, *ZIP_ERRORS) as error:
            if isinstance(error, OSError) and error.errno not in (
                None,
                errno.EINVAL,
            ):  # a place before the start is damage
                raise
            file.unlink()
            raise ValueError(
                f"{file} was damaged ({error}) and is removed: run the same command again"
            ) from error

    def errors(self, parts: list[int] | range) -> dict[int, str]:
        """Return the images that could not be read, by position, and why."""
        files = [self._errors(i) for i in parts]
        found = [_read_json(file) for file in files if file.exists()]
        return {int(position): error for errors in found for position, error in errors.items()}

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path)

    def _file(self, i: int) -> Path:
        return self.path / f"{i:07d}.npz"

    def _errors(self, i: int) -> Path:
        return self.path / f"{i:07d}.errors.json"


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged ({error}): remove {file.parent} and start anew") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} is damaged (no object): remove {file.parent} and start anew")
    return found


@contextmanager
def _replacing(file: Path) -> Iterator[Path]:
    try:
        with atomic_write(file) as partial:
            yield partial
    except OSError as error:
        raise OSError(
            error.errno, f"{error.strerror}; mend this and run the same command again to go on", str(file)
        ) from error
