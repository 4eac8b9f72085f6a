"""Write latent folders with checksums of all blocks. A folder appears only when it is complete."""

import hashlib
import shutil
from contextlib import ExitStack
from dataclasses import asdict, replace
from io import BytesIO, FileIO
from pathlib import Path

import numpy as np

from data.latents import check_labels
from data.manifest import FILES, LatentManifest
from runtime.files import sync, write_json
from runtime.lock import Lock

_CHUNK = 2**22


def next_steps(path: str | Path, manifest: LatentManifest) -> str:
    """Return the commands that check a latent folder and train on it."""
    keys = "model=tread" + (" model/conditioning=prefix" if manifest.text else "")
    check = f"Check it: python -m data.report path={path}"
    return f"{check}\nTrain on it: python train.py {keys} data=latents data.path={path}"


class LatentWriter:
    """Write a latent folder next to `path`, and move it to `path` when it is complete.

    Use it as a context manager, and call `append` until `manifest.count` entries are written. The writer adds
    the checksums to the manifest.

    Raises:
        Busy: another process is writing the folder.
        FileExistsError: `path` already exists.
        ValueError: entries or their number contradict the manifest.
        OSError: the disk is full. The message names the file, and the partial folder is removed.
    """

    def __init__(self, path: str | Path, manifest: LatentManifest):
        self.path, self.manifest, self.num_written = Path(path), manifest, 0

    def __enter__(self) -> "LatentWriter":
        self.files: dict[str, FileIO] = {}
        with ExitStack() as stack:
            stack.enter_context(lock_of(self.path))
            check_out(self.path)
            self.partial = self.path.with_name(f".{self.path.name}.partial")
            shutil.rmtree(self.partial, ignore_errors=True)  # of a killed process
            self.partial.mkdir()
            stack.callback(shutil.rmtree, self.partial, ignore_errors=True)
            for key, (dtype, shape) in self.manifest.arrays().items():
                # Without a buffer, `write` raises on a full disk, not `close`.
                self.files[key] = stack.enter_context((self.partial / FILES[key]).open("wb", buffering=0))
                header, descr = BytesIO(), np.lib.format.dtype_to_descr(np.dtype(dtype))
                fields = {"descr": descr, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(header, fields)
                _write(self.files[key], header.getbuffer())
            self._opened = stack.pop_all()
        return self

    def append(
        self,
        stored: np.ndarray,
        labels: np.ndarray | None,
        masks: np.ndarray | None = None,
        features: np.ndarray | None = None,
        text: np.ndarray | None = None,
    ) -> None:
        """Append latents (N, C', H, W), or (N, 2, C', H, W) with hflip, labels (N,), masks (N, H, W),
        features (N, T, F), or (N, 2, T, F) with hflip, and captions (N, R, M) or (N, R, M, F).
        """
        manifest, end = self.manifest, self.num_written + len(stored)
        entries = f"{self.path}: entries {self.num_written}..{end - 1}"
        if end > manifest.count:
            raise ValueError(f"{entries} are more than count={manifest.count}")
        with np.errstate(over="ignore"):
            arrays = {"latents": stored.astype(manifest.dtype)}
        if not np.isfinite(arrays["latents"]).all():
            raise ValueError(f"{entries} are not finite in {manifest.dtype}")
        if manifest.num_classes and labels is not None:
            check_labels(labels, manifest.num_classes, self.path, first=self.num_written)
            arrays["labels"] = labels.astype(np.int64)
        others = {"masks": masks, "features": features, "text": text}
        arrays |= {key: array for key, array in others.items() if array is not None}
        layout = manifest.arrays().items()
        expected = [f"{key} {dtype} {(len(stored), *shape[1:])}" for key, (dtype, shape) in layout]
        actual = [f"{key} {array.dtype} {array.shape}" for key, array in arrays.items()]
        if actual != expected:
            raise ValueError(f"{entries} are {', '.join(actual)}, must be {', '.join(expected)}")
        for key, array in arrays.items():
            if array.size:
                _write(self.files[key], memoryview(np.ascontiguousarray(array)).cast("B"))
        self.num_written = end

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        with self._opened:
            if error_type is not None:
                return
            if self.num_written != (count := self.manifest.count):
                raise ValueError(f"{self.path}: {self.num_written} entries written, must be count={count}")
            checksums, size = {}, self.manifest.block_bytes
            for name in (FILES[key] for key in self.files):
                file = self.partial / name
                sync(file)
                checksums[name] = hash_blocks(file, size)
            manifest = replace(self.manifest, checksums=checksums)
            write_json(self.partial / FILES["manifest"], asdict(manifest))
            self.partial.rename(self.path)


def check_out(out: str | Path) -> None:
    """Raise a FileExistsError if `out` exists."""
    if Path(out).exists():
        raise FileExistsError(f"out={out} already exists: move it away, or choose another name")


def lock_of(path: Path) -> Lock:
    """Return the lock that a process must hold to write `path`."""
    return Lock(path.with_name(f".{path.name}.lock"), f"out={path}")


def hash_blocks(file: Path, num_bytes: int) -> list[str]:
    """Hash each block of `num_bytes` of a file, with SHA-256."""
    return [hash_block(file, start, num_bytes) for start in range(0, file.stat().st_size, num_bytes)]


def hash_block(file: Path, start: int, num_bytes: int) -> str:
    """Hash at most `num_bytes` of a file from byte `start` on, with SHA-256."""
    digest = hashlib.sha256()
    with file.open("rb") as f:
        f.seek(start)
        while num_bytes and (chunk := f.read(min(_CHUNK, num_bytes))):
            digest.update(chunk)
            num_bytes -= len(chunk)
    return digest.hexdigest()


def _write(file: FileIO, data: memoryview) -> None:
    try:
        while data:
            data = data[file.write(data) :]
    except OSError as error:  # it does not name the file
        raise OSError(error.errno, error.strerror, str(file.name)) from error
