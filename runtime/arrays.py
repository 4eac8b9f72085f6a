"""Read arrays and tensors from untrusted files: the declared size is checked before memory is allocated."""

import argparse
import io
import math
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from runtime.errors import as_value_error

MAX_INFLATED = 1032  # the largest compression ratio of deflate
NAMES_SHOWN = 10
MAX_HEADER_BYTES = 10_000  # of an .npy; numpy has the same limit, but reads longer ones first
# The 64-bit end of a directory, its locator, the end of a directory.
ZIP64_END_BYTES = 56 + 20 + 22
# Errors of reading a zip that is damaged, encrypted or compressed by an unknown method.
ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError)
ZIP_ERRORS += (ValueError, RuntimeError, LookupError, OverflowError)


def read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Read the header of an .npy: its shape, True for Fortran order, and its type."""
    try:
        first = np.lib.format.read_magic(file) == (1, 0)
        length = file.read(2 if first else 4)
        declared = int.from_bytes(length, "little")
        if declared > MAX_HEADER_BYTES:
            raise ValueError(f"it declares a header of {declared} bytes, must be at most {MAX_HEADER_BYTES}")
        read = np.lib.format.read_array_header_1_0 if first else np.lib.format.read_array_header_2_0
        shape, fortran_order, dtype = read(io.BytesIO(length + file.read(declared)))
    except Exception as error:  # numpy raises many types of errors for invalid bytes
        raise ValueError(f"it has no .npy header: {' '.join(str(error).split())[:200]}") from error
    return shape, fortran_order, dtype


def check_size(name: str, shape: tuple[int, ...], dtype: np.dtype, size: int) -> None:
    """Raise a ValueError unless an array of this shape takes `size` bytes and holds no Python objects."""
    if dtype.hasobject or not dtype.itemsize or min(shape, default=0) < 0:
        raise ValueError(f"{name} holds {dtype} {shape}, must hold an array of numbers")
    needed = math.prod(shape) * dtype.itemsize
    if needed != size:
        raise ValueError(f"{name} holds {size} bytes, its shape {shape} needs {needed}")


def read_array(file: IO[bytes], size: int) -> np.ndarray:
    """Read an .npy of `size` bytes."""
    shape, fortran_order, dtype = read_header(file)
    left = size - file.tell()
    check_size("it", shape, dtype, left)
    if not left:
        return np.zeros(shape, dtype)
    data = bytearray(file.read(left))
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran_order else "C")


def map_array(file: Path) -> np.ndarray:
    """Map the array of an .npy file."""
    with as_value_error(f"{file} is missing, truncated or not an .npy file", ValueError, OSError):
        with file.open("rb") as opened:
            shape, _, dtype = read_header(opened)
            check_size("it", shape, dtype, file.stat().st_size - opened.tell())
        return np.load(file, mmap_mode="r", allow_pickle=False)


def member_size(archive: zipfile.ZipFile, name: str) -> int:
    """The size of a member of an .npz in bytes."""
    member = archive.getinfo(name)
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name} is packed by method {member.compress_type}, must be stored or deflated")
    packed = min(member.compress_size, Path(str(archive.filename)).stat().st_size)
    if member.file_size > MAX_INFLATED * packed:
        rule = f"more than its {packed} compressed bytes can hold"
        raise ValueError(f"{name} declares {member.file_size} bytes, {rule}")
    return member.file_size


def array_names(archive: zipfile.ZipFile) -> str:
    """List the arrays of an .npz, for messages."""
    names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
    return ", ".join(names[:NAMES_SHOWN]) + (", ..." if names[NAMES_SHOWN:] else "") or "no arrays"


def read_member(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Read a small array of an .npz."""
    size = member_size(archive, f"{name}.npy")
    with archive.open(f"{name}.npy") as file:
        return read_array(file, size)


def load_stored(file: Path) -> Any:
    """Load tensors and plain types from a file of torch.save; no code in the file runs."""
    _check_stored(file)
    try:
        # The public DiT and SiT checkpoints hold their arguments in a Namespace, which cannot run code.
        with torch.serialization.safe_globals([argparse.Namespace]):
            # Mapped, so that reading shapes does not read the weights.
            return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # torch raises many types of errors; some suggest to load without protection
        raise ValueError(f"{file} is damaged, or holds more than plain tensors") from error


def _check_stored(file: Path) -> None:
    """Raise a ValueError for a zip that torch.save has not written, such as one with compressed members.

    Other files pass. A zip with two directories is refused: torch and zipfile might read different ones.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        if opened.read(4) != b"PK\3\4":
            return
        opened.seek(max(0, size - ZIP64_END_BYTES))
        end = opened.read().rjust(ZIP64_END_BYTES)
    is_zip64 = end[56:60] == b"PK\6\7"
    begin = size - (len(end) if is_zip64 else 22)
    stated = struct.unpack_from("<Q", end, 64)[0] if is_zip64 else begin
    length, start = struct.unpack_from("<2Q", end, 40) if is_zip64 else struct.unpack_from("<2L", end, 88)
    if end[76:80] != b"PK\5\6" or stated != begin or start + length != begin:
        raise ValueError(f"{file} is damaged: it does not end as files that torch.save writes")
    with as_value_error(f"{file} is damaged", *ZIP_ERRORS), zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    if packed := [member.filename for member in members if member.compress_type != zipfile.ZIP_STORED]:
        raise ValueError(f"{file}: {packed[0]} is compressed, must be stored, as torch.save does")
    declared = sum(max(member.file_size, member.compress_size) for member in members)
    if declared > size:
        raise ValueError(f"{file} declares {declared} bytes, but has {size}")
