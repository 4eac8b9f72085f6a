"""The output file of a program, `out=FILE`: locked, and overwritten only with overwrite=true."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from runtime.lock import Busy, Lock


def output_path(out: str | None, run: Path, default: str) -> Path:
    """Return the requested file, or the default in a run; its links must not lead out of the run."""
    if out:
        return Path(out)
    file = run / default
    if not file.resolve().is_relative_to(run.resolve()):
        raise ValueError(f"{file} leads out of the run, to {file.resolve()}: set out=FILE")
    return file


def check_free(file: Path, others: Sequence[Path], overwrite: bool) -> None:
    """Raise an OSError if an output would overwrite files; arguments as in `exclusive_output`."""
    if file.is_dir():
        raise IsADirectoryError(f"out={file} is a folder, must be a file")
    existing = next((path for path in (file, *others) if path.exists()), None)
    if existing and not overwrite:
        remedy = "set overwrite=true to replace it, or another out"
        raise FileExistsError(f"out={file}: {existing.name} already exists: {remedy}")


@contextmanager
def exclusive_output(file: Path, others: Sequence[Path], overwrite: bool) -> Iterator[None]:
    """Lock an output file inside the block.

    Args:
        file: the output; its folder is created, and removed again if it stays empty.
        others: other files that the program writes next to it.
        overwrite: replace existing files.

    Raises:
        Busy: another program holds the lock.
        OSError: a file already exists, or the folder cannot be written.
    """
    try:
        lock = Lock(file.with_name(f".{file.name}.lock"), f"out={file}").acquire()
    except Busy:
        raise
    except OSError as error:
        raise OSError(f"out={file} cannot be written: {error}") from error
    try:
        check_free(file, others, overwrite)
        yield
    finally:
        lock.release()
