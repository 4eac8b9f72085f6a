"""The file of a result, `out=FILE`: one program writes it at a time, and overwrites it only if told to."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from runtime.lock import Busy, Lock


def output_path(out: str | None, run: Path, default: str) -> Path:
    """The requested file, or the default one inside a run; links must not lead out of the run."""
    if out:
        return Path(out)
    file = run / default
    if not file.resolve().is_relative_to(run.resolve()):
        raise ValueError(f"{file} leads out of the run, to {file.resolve()}: set out=FILE")
    return file


def check_free(file: Path, beside: Sequence[Path], overwrite: bool) -> None:
    """Raise an OSError if a result would overwrite existing files; arguments as in `exclusive_output`."""
    if file.is_dir():
        raise IsADirectoryError(f"out={file} is a folder, must be a file")
    existing = next((path for path in (file, *beside) if path.exists()), None)
    if existing and not overwrite:
        raise FileExistsError(
            f"out={file}: {existing.name} already exists: set overwrite=true to replace it, or another out"
        )


@contextmanager
def exclusive_output(file: Path, beside: Sequence[Path], overwrite: bool) -> Iterator[None]:
    """Lock the file of a result while this program works on it.

    Args:
        file: the result; its folder is created, and removed again if it stays empty.
        beside: further files that are written next to it.
        overwrite: replace existing files.

    Raises:
        Busy: another program is writing it.
        OSError: a file already exists, or nothing can be written there.
    """
    try:
        lock = Lock(file.with_name(f".{file.name}.lock"), f"out={file}").acquire()
    except Busy:
        raise
    except OSError as error:
        raise OSError(f"out={file} cannot be written: {error}") from error
    try:
        check_free(file, beside, overwrite)
        yield
    finally:
        lock.release()
