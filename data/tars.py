"""Locate the files of WebDataset tars. Only headers are read, and they are bounded."""

import tarfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from runtime.errors import as_value_error

MAX_HEADER_BYTES = 2**16  # of a file: its name and metadata
MAX_FILE_BYTES = 2**28
# Errors of reading a damaged tar and its files.
DAMAGED = (ValueError, EOFError, LookupError, OverflowError, RecursionError, tarfile.TarError)
Index = dict[str, tuple[Path, int, int]]  # tar, first byte and number of bytes of each file


class _Headers:
    """File object that limits the headers of a tar; tarfile alone reads as many bytes as they declare."""

    def __init__(self, stream: BinaryIO):
        self.seek, self.tell, self._stream, self.left = stream.seek, stream.tell, stream, MAX_HEADER_BYTES

    def read(self, size: int) -> bytes:
        self.left -= size
        if self.left < 0:
            raise ValueError(f"the header of a file has more than {MAX_HEADER_BYTES} bytes")
        return self._stream.read(size)


def index_tars(tars: Sequence[Path]) -> Index:
    """Locate the files of uncompressed tars: their name is SHARD/PATH.

    Raises:
        ValueError: a tar is damaged, truncated or compressed, or two files have one name.
    """
    index: Index = {}
    for path in tars:
        damaged = as_value_error(f"{path} cannot be read as an uncompressed tar", *DAMAGED, OSError)
        with damaged, path.open("rb") as file:
            headers = _Headers(file)
            with tarfile.open(fileobj=headers, mode="r:") as archive:
                for member in archive:
                    name = f"{path.stem}/{PurePosixPath(member.name)}"
                    if name in index:
                        raise ValueError(f"two files are named {name}")
                    if member.isreg() and not member.issparse():
                        index[name] = path, member.offset_data, member.size
                    archive.members, headers.left = [], MAX_HEADER_BYTES  # tarfile would keep all of them
                file.seek(archive.offset)
                if file.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
                    raise ValueError("it is truncated or damaged")
    return index


def read_at(path: Path, start: int, size: int) -> BytesIO:
    """Read a file of a tar. Raise a ValueError if it is incomplete or too large."""
    if size > MAX_FILE_BYTES:
        raise ValueError(f"{path} declares a file of {size} bytes, must have at most {MAX_FILE_BYTES}")
    with path.open("rb") as file:
        file.seek(start)
        data = file.read(size)
    if len(data) < size:
        raise ValueError(f"{path} is truncated: {size} bytes at {start} are not complete")
    return BytesIO(data)
