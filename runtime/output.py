"""The place of a result: of one program at a time, and not overwritten unless asked."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from runtime.lock import Busy, Lock


def place_of(key: str, asked: str | None, run: Path, inside: str) -> Path:
    """The file of a result: as requested, or inside a run, whose links must not lead out of it."""
    if asked:
        return Path(asked)
    place = run / inside
    if not place.resolve().is_relative_to(run.resolve()):
        raise ValueError(f"{place} leads out of the run, to {place.resolve()}: give {key}=FILE")
    return place


def check_free(key: str, file: Path, beside: Sequence[Path], overwrite: bool) -> None:
    """Raise an OSError if a result would overwrite something unasked; see `claimed`."""
    if file.is_dir():
        raise IsADirectoryError(f"{key}={file} is a folder, must be a file")
    there = next((found for found in (file, *beside) if found.exists()), None)
    if there and not overwrite:
        raise FileExistsError(
            f"{key}={file}: {there.name} is there already: overwrite=true replaces it, {key}=OTHER leaves it"
        )


@contextmanager
def claimed(key: str, file: Path, beside: Sequence[Path], overwrite: bool) -> Iterator[None]:
    """Lock the place of a result while this program works on it.

    Args:
        key: that the user sets to choose another place.
        file: where the result goes; its folder is made, and removed if it stays empty.
        beside: what is written beside it.
        overwrite: True if what is there may be replaced.

    Raises:
        Busy: another program is writing there.
        OSError: there is something already, or nothing can be written there.
    """
    what = f"{key}={file}"
    try:
        lock = Lock(file.with_name(f".{file.name}.lock"), what).acquire()
    except Busy:
        raise
    except OSError as error:
        raise OSError(f"{what} cannot be written: {error}") from error
    try:
        check_free(key, file, beside, overwrite)
        yield
    finally:
        lock.release()
