"""Write latent folders: beside their place, from start to end, with a checksum of every block, and moved when
whole.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from data.latents import check_labels
from data.manifest import FILES, LatentManifest, to_json
from runtime.lock import Lock

CHUNK = 2**22


class LatentWriter:
    """Write a latent folder beside its place and move it there when it is whole.

    Use as a context manager and call `append` until `manifest.count` entries are written. The checksums of
    the manifest are filled in.

    Args:
        partial: where it is written before it is moved, by one who holds the lock of `path`; None: beside
            `path`.

    Raises:
        Busy: another process is writing it.
        FileExistsError: there is something at `path` already.
        ValueError: entries of another shape, labels outside the classes, masks that are missing or not
            wanted, or another count than the manifest's.
        OSError: the disk is full; the file is named, and nothing is left behind.
    """

    def __init__(self, path: str | Path, manifest: LatentManifest, partial: Path | None = None):
        self.path, self.manifest, self.partial = Path(path), manifest, partial
        self.num_written = 0

    def __enter__(self) -> "LatentWriter":
        manifest = self.manifest
        arrays = {FILES["latents"]: (manifest.dtype, manifest.stored_shape)}
        if manifest.num_classes:
            arrays[FILES["labels"]] = ("int64", (manifest.count,))
        if manifest.conditioning_type:
            arrays[FILES["masks"]] = ("uint8", (manifest.count, *manifest.shape[1:]))
        self.files: dict[str, _ArrayFile] = {}
        with ExitStack() as stack:
            self.partial = stack.enter_context(claimed(self.path, self.partial))
            for name, (dtype, shape) in arrays.items():
                self.files[name] = _ArrayFile(self.partial / name, dtype, shape, manifest.block_bytes)
                stack.callback(self.files[name].close)
            self._opened = stack.pop_all()
        return self

    def append(self, stored: np.ndarray, labels: np.ndarray | None, masks: np.ndarray | None = None) -> None:
        """Add entries (N, C', H, W), with hflip (N, 2, C', H, W), their labels (N,), and masks (N, H, W)
        uint8 if any.
        """
        manifest, end = self.manifest, self.num_written + len(stored)
        if stored.shape[1:] != manifest.stored_shape[1:] or end > manifest.count:
            raise ValueError(
                f"{self.path}: entries {self.num_written}..{end - 1} of shape {stored.shape[1:]} "
                f"must be of shape {manifest.stored_shape[1:]} and at most {manifest.count} in all"
            )
        if manifest.num_classes:
            if labels is None or labels.shape != (len(stored),):
                raise ValueError(f"{self.path}: {len(stored)} entries must come with as many labels")
            check_labels(labels, manifest.num_classes, self.path, first=self.num_written)
        expected = (len(stored), *stored.shape[-2:]) if manifest.conditioning_type else None
        if (None if masks is None else masks.shape) != expected or (
            masks is not None and masks.dtype != np.uint8
        ):
            given = "None" if masks is None else f"{masks.dtype} {masks.shape}"
            rule = (
                f"uint8 {expected}"
                if expected
                else "None, or conditioning_type of the manifest be mask or segmentation"
            )
            raise ValueError(f"{self.path}: masks={given} must be {rule}")
        with np.errstate(over="ignore"):
            latents = stored.astype(manifest.dtype)
        if not np.isfinite(latents).all():
            raise ValueError(
                f"{self.path}: entries {self.num_written}..{end - 1} are not finite in {manifest.dtype}"
            )
        self.files[FILES["latents"]].append(latents)
        if manifest.num_classes:
            self.files[FILES["labels"]].append(labels.astype(np.int64))
        if masks is not None:
            self.files[FILES["masks"]].append(masks)
        self.num_written = end

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        with self._opened:
            if error_type is None:
                self._finish()

    def _finish(self) -> None:
        if self.num_written != self.manifest.count:
            raise ValueError(
                f"{self.path}: {self.num_written} entries written, the manifest promises "
                f"{self.manifest.count}"
            )
        manifest = replace(
            self.manifest, checksums={name: file.finish() for name, file in self.files.items()}
        )
        with (self.partial / FILES["manifest"]).open("w") as f:
            f.write(to_json(manifest))
            f.flush()
            os.fsync(f.fileno())
        self.partial.rename(self.path)


def lock_of(path: Path) -> Lock:
    """Return the lock that a process must hold to make what is to lie at `path`."""
    return Lock(path.with_name(f".{path.name}.lock"), f"out={path}")


@contextmanager
def claimed(path: Path, partial: Path | None = None) -> Iterator[Path]:
    """Yield a new folder for what is moved to `path` when it is whole. What a killed process left of it is
    removed.

    Args:
        partial: the folder, where the lock of `path` is held already; None: beside it, and the lock is taken.

    Raises:
        Busy: another process is writing it.
        FileExistsError: there is something at `path` already.
    """
    with lock_of(path) if partial is None else nullcontext():
        if path.exists():
            raise FileExistsError(f"{path} exists: move it away to write it anew")
        partial = partial or path.with_name(f".{path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def hash_blocks(file: Path, block_bytes: int) -> list[str]:
    """Return the SHA-256 of each block of a file."""
    return [hash_block(file, start, block_bytes) for start in range(0, file.stat().st_size, block_bytes)]


def hash_block(file: Path, start: int, num_bytes: int) -> str:
    """Return the SHA-256 of so many bytes of a file, or of as many as there are."""
    digest = hashlib.sha256()
    with file.open("rb") as f:
        f.seek(start)
        while num_bytes and (chunk := f.read(min(CHUNK, num_bytes))):
            digest.update(chunk)
            num_bytes -= len(chunk)
    return digest.hexdigest()


class _ArrayFile:
    """An .npy file that is written from start to end, and the hash of each of its blocks."""

    def __init__(self, path: Path, dtype: str, shape: tuple[int, ...], block_bytes: int):
        self.path, self.block_bytes = path, block_bytes
        self.file = path.open("wb", buffering=0)  # so that a full disk is met here and not in `close`
        self.digest, self.room, self.checksums = hashlib.sha256(), block_bytes, []
        header = BytesIO()
        description = {
            "descr": np.lib.format.dtype_to_descr(np.dtype(dtype)),
            "fortran_order": False,
            "shape": shape,
        }
        np.lib.format.write_array_header_1_0(header, description)
        self._write(memoryview(header.getvalue()))

    def append(self, array: np.ndarray) -> None:
        """Write the next rows."""
        if array.size:
            self._write(memoryview(np.ascontiguousarray(array)).cast("B"))

    def finish(self) -> list[str]:
        """Bring everything to the disk and return the hashes."""
        self._named(os.fsync, self.file.fileno())
        return [*self.checksums, self.digest.hexdigest()] if self.room < self.block_bytes else self.checksums

    def close(self) -> None:
        self.file.close()

    def _write(self, data: memoryview) -> None:
        while data:
            written = self._named(self.file.write, data[: self.room])
            self.digest.update(data[:written])
            data, self.room = data[written:], self.room - written
            if not self.room:
                self.checksums.append(self.digest.hexdigest())
                self.digest, self.room = hashlib.sha256(), self.block_bytes

    def _named(self, call: Callable[[Any], Any], argument: Any) -> Any:
        try:
            return call(argument)
        except OSError as error:  # which does not say which file
            raise OSError(error.errno, error.strerror, str(self.path)) from error
