"""Finished parts of a long job in a folder, so that the job can resume: a kill loses only unfinished parts.

A part is a file of arrays, `NNNNNNN.npz`, written atomically.
"""

import errno
import hashlib
import json
import math
import shutil
import zipfile
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from runtime.arrays import ZIP_ERRORS, read_member
from runtime.files import atomic_write, finite, read_json, write_json
from runtime.launch import Launch
from runtime.lock import Lock

RESUME = "fix this and run the same command again to resume"
KEY = "about.json"
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Part:
    """The images of a part."""

    index: int
    images: np.ndarray  # (n, H, W, C) uint8
    cost: np.ndarray | None = None  # network evaluations and FLOPs of an image; None: not sampled


class PartCache:
    """The finished parts of a job.

    Args:
        path: the folder.
        key: everything the parts depend on, as JSON.
        num_items, part_size: number of images, in total and in each part but the last.
        hint: for errors: what to do if the folder has parts with another key.
        replace: remove parts with another key instead of an error.
    """

    def __init__(
        self,
        path: Path,
        key: Mapping[str, Any],
        num_items: int,
        part_size: int,
        hint: str = "remove it",
        replace: bool = False,
    ):
        self.path, self.key, self.num_parts = path, as_json(key), -(-num_items // part_size)
        self._num_items, self._part_size, self._hint, self._replace = num_items, part_size, hint, replace

    def start(self) -> list[int]:
        """Create the folder, or resume an existing one; return the missing parts."""
        file = self.path / KEY
        if self.path.is_symlink():
            raise ValueError(f"{self.path} is a link, must be a folder: remove it")
        with resume_hint(file):
            self.path.mkdir(parents=True, exist_ok=True)
            if not file.exists():
                write_json(file, self.key)
        try:
            old = saved_key(self.path)
        except ValueError:
            if not self._replace:
                raise
            old = {}
        changes = [f"{key}: {old.get(key)} -> {new}" for key, new in self.key.items() if old.get(key) != new]
        if changes and (self._replace or not self.done()):
            self.remove()
            return self.start()
        if changes:
            what = f"{self.path} was started with other settings ({'; '.join(changes)})"
            raise ValueError(f"{what}: use those, or {self._hint}")
        return self.missing()

    def done(self) -> set[int]:
        """Return the finished parts."""
        return {int(file.stem) for file in self.path.glob("*.npz") if file.stem.isdecimal()}

    def missing(self) -> list[int]:
        """Return the parts that are not finished; all parts if the folder has another key."""
        with suppress(ValueError):  # damaged: `start` refuses or replaces it
            if saved_key(self.path) not in (self.key, {}):
                return [*range(self.num_parts)]
        done = self.done()
        return [i for i in range(self.num_parts) if i not in done]

    def write(self, i: int, arrays: Mapping[str, np.ndarray]) -> None:
        with resume_hint(self.file(i)), atomic_write(self.file(i)) as partial:
            np.savez(partial, **arrays)  # pyright: ignore[reportArgumentType]  no array is allow_pickle

    def read(self, i: int, *names: str) -> Arrays:
        """Read the named arrays of a part, by default all. A damaged part is removed."""
        file = self.file(i)
        try:
            with zipfile.ZipFile(file) as archive:
                all_names = [name.removesuffix(".npy") for name in archive.namelist()]
                return {name: read_member(archive, name) for name in names or all_names}
        except ZIP_ERRORS as error:
            # EINVAL: an offset before the start of a damaged file. Other system errors do not mean damage.
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                raise
            file.unlink()
            rule = "has been removed: run the same command again"
            raise ValueError(f"{file} was damaged ({error}) and {rule}") from error

    def fill(
        self,
        make: Callable[[list[int]], Generator[tuple[int, Arrays], None, None]],
        launch: Launch,
        description: str,
        after_part: Callable[[], None] = lambda: None,
    ) -> None:
        """Make the missing parts, a share on each rank; collective. Other programs wait until it ends.

        Args:
            make: yields (part, arrays) for each of the given parts.
            description: label of the progress bar.
            after_part: called on the first rank after each of its parts, and at the end.

        Raises:
            ValueError: see `start`, or a part is missing at the end.
        """
        lock = Lock(self.path.with_name(f".{self.path.name}.lock"), str(self.path), wait_sec=math.inf)
        with lock if launch.is_main else nullcontext():
            todo = launch.broadcast_from_main(self.start)
            num_items, size = self._num_items, self._part_size
            finished = num_items - sum(min(size, num_items - size * i) for i in todo)
            bar = {"total": num_items, "initial": finished, "desc": description, "unit": "image"}
            share = make(todo[launch.rank :: launch.world_size])
            try:
                with closing(share) as made, tqdm(**bar, disable=not launch.is_main) as progress:
                    for i, arrays in made:
                        self.write(i, arrays)
                        progress.update(min(size * launch.world_size, num_items - progress.n))
                        if launch.is_main:
                            after_part()
            except BaseException as error:
                if self.path.exists() and launch.world_size == 1 and not self.done():
                    self.remove()  # nothing to resume
                elif isinstance(error, KeyboardInterrupt):
                    launch.print(f"\nstopped: the same command resumes from {self.path}")
                raise
            launch.barrier()
        if launch.is_main:
            after_part()  # the other ranks have finished, too
            if missing := len(self.missing()):
                count = f"{missing} of {self.num_parts}"
                raise ValueError(f"{count} parts are missing: run the same command again")

    def remove(self) -> None:
        """Remove the folder with all parts."""
        shutil.rmtree(self.path)

    def file(self, i: int) -> Path:
        return self.path / f"{i:07d}.npz"


def as_json(content: Mapping[str, Any]) -> dict[str, Any]:
    """Convert content to the types that a JSON file returns."""
    return json.loads(json.dumps(finite(content)))


def digest_of(key: Mapping[str, Any]) -> str:
    """Hash a key for the name of a folder."""
    return hashlib.sha256(json.dumps(as_json(key), sort_keys=True).encode()).hexdigest()[:16]


def saved_key(path: Path) -> dict[str, Any]:
    """Read the key of the parts in a folder; empty if it has none."""
    file = path / KEY
    if not file.is_file():
        return {}
    try:
        key = read_json(file, file.stat().st_size)
        if not isinstance(key, dict):
            raise ValueError(f"{file} is damaged, it is not an object")
    except ValueError as error:
        raise ValueError(f"{error}: remove {file.parent} and start again") from error
    return key


def check_room(out: Path, num_bytes: int) -> None:
    """Raise a ValueError if the disk of a file has fewer than `num_bytes` free."""
    free = shutil.disk_usage(next(folder for folder in out.resolve().parents if folder.exists())).free
    if free < num_bytes:
        room = f"{num_bytes / 2**30:.1f} GiB while it is written, {free / 2**30:.1f} are free"
        raise ValueError(f"out={out} needs {room}")


@contextmanager
def resume_hint(file: Path) -> Iterator[None]:
    """Add to an OSError that the job can resume."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}; {RESUME}", str(file)) from error
