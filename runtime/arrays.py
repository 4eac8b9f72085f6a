"""Read .npy arrays from outside: what a header declares is held against the bytes that are there before memory is taken."""

import io
import math
import tokenize
import zipfile
from pathlib import Path
from typing import BinaryIO

import numpy as np

MOST_INFLATED = 1032  # bytes that deflate can make of one
# What numpy's reading of a header raises where it is nonsense.
HEADER_ERRORS = (ValueError, TypeError, LookupError, SyntaxError, OverflowError, RecursionError, MemoryError)
HEADER_ERRORS += (tokenize.TokenError, AttributeError)


def read_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Read the header of an .npy: shape, whether the order is Fortran's, and type.

    Raises:
        ValueError: it is none.
    """
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran_order, dtype = read(file)
    except HEADER_ERRORS as error:
        raise ValueError(f"it has no header of an .npy: {' '.join(str(error).split())[:200]}") from error
    return shape, fortran_order, dtype


def check_size(name: str, shape: tuple[int, ...], dtype: np.dtype, size: int) -> None:
    """Raise a ValueError unless an array has so many bytes, and no objects, which only a pickle can keep."""
    if dtype.hasobject or not dtype.itemsize or min(shape, default=0) < 0:
        raise ValueError(f"{name} holds {dtype} {shape}, must hold an array of numbers")
    needed = math.prod(shape) * dtype.itemsize
    if needed != size:
        raise ValueError(f"{name} holds {size} bytes, its shape {shape} needs {needed}")


def read_array(file: BinaryIO, size: int) -> np.ndarray:
    """Read an .npy of `size` bytes.

    Raises:
        ValueError: it is none, or declares another size.
    """
    shape, fortran_order, dtype = read_header(file)
    left = size - file.tell()
    check_size("it", shape, dtype, left)
    if not left:
        return np.zeros(shape, dtype)
    data = bytearray(file.read(left))
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran_order else "C")


def parse_array(data: bytes) -> np.ndarray:
    """Read an .npy from the content of its file.

    Raises:
        ValueError: it is none, or declares another size.
    """
    return read_array(io.BytesIO(data), len(data))


def member_size(archive: zipfile.ZipFile, name: str) -> int:
    """Return how many bytes a member of an .npz holds.

    Raises:
        KeyError: there is none of that name.
        ValueError: it declares more than the file can hold.
    """
    member = archive.getinfo(name)
    packed = min(member.compress_size, Path(archive.filename).stat().st_size)
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or member.file_size > MOST_INFLATED * packed:
        raise ValueError(f"{name} declares {member.file_size} bytes, more than the {packed} that are there can be")
    return member.file_size


def read_member(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Read a small array of an .npz.

    Raises:
        KeyError: there is none of that name.
        ValueError: it is damaged, or declares another size.
    """
    size = member_size(archive, f"{name}.npy")
    with archive.open(f"{name}.npy") as file:
        return read_array(file, size)
