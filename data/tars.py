"""Read samples of WebDataset tars in bounded memory."""

import tarfile
from collections.abc import Iterator, Sequence
from io import BytesIO
from itertools import groupby
from pathlib import Path, PurePath
from typing import BinaryIO

MAX_OVERHEAD_BYTES = 2**16  # of a sample in addition to its files: headers of the tar, padding, read-ahead
# Errors of reading a damaged tar and its files.
DAMAGED = (ValueError, EOFError, LookupError, OverflowError, RecursionError, tarfile.TarError)


class _Bounded:
    """A stream that raises after `left` bytes. tarfile itself reads as many bytes as the headers declare."""

    def __init__(self, stream: BinaryIO):
        self.stream, self.left = stream, MAX_OVERHEAD_BYTES

    def read(self, size: int) -> bytes:
        data = self.stream.read(size)
        self.left -= len(data)
        if self.left < 0:
            raise ValueError(f"a sample takes more than {MAX_OVERHEAD_BYTES} bytes in addition to its files")
        return data


def samples(stream: BinaryIO, max_bytes: int) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield (key, {suffix: content}) of each sample of an uncompressed tar.

    Raises:
        ValueError: the files of a sample have more than `max_bytes`, or the tar is damaged (see DAMAGED).
    """
    bounded = _Bounded(stream)
    with tarfile.open(fileobj=bounded, mode="r|") as archive:
        files = (member for member in archive if not member.isdir())
        for key, members in groupby(files, key=lambda member: _key_and_suffix(member.name)[0]):
            sample, remaining = {}, max_bytes
            for member in members:
                if not member.isreg() or member.issparse() or member.size > remaining:
                    rule = f"must be a file of at most {remaining}"
                    raise ValueError(f"{member.name} declares {member.size} bytes, {rule}")
                remaining, bounded.left = remaining - member.size, bounded.left + member.size
                suffix = _key_and_suffix(member.name)[1]
                if suffix in sample:
                    raise ValueError(f"{member.name} is in the tar twice")
                sample[suffix] = archive.extractfile(member).read()
            archive.members = []  # tarfile would keep all of them
            bounded.left = MAX_OVERHEAD_BYTES
            yield key, sample


def _key_and_suffix(name: str) -> tuple[str, str]:
    """Split `a/0.latent.npy` into the key `a/0` and the suffix `latent.npy`."""
    path = PurePath(name)
    stem, _, suffix = path.name.partition(".")
    return str(path.parent / stem), suffix


def index_tars(tars: Sequence[Path]) -> dict[str, tuple[Path, int, int]]:
    """Locate the files of uncompressed tars: their name is SHARD-PATH, with `-` for each slash.

    Returns:
        The tar, first byte and number of bytes of each file.

    Raises:
        ValueError: a tar is damaged, truncated or compressed, or two files have one name.
    """
    found = {}
    for path in tars:
        try:
            with tarfile.open(path, "r:") as archive:
                for member in archive:
                    name = f"{path.stem}-{member.name.replace('/', '-')}"
                    if name in found:
                        raise ValueError(f"two files are named {name}")
                    if member.isreg() and not member.issparse():
                        found[name] = path, member.offset_data, member.size
                    archive.members = []  # tarfile would keep all of them
                archive.fileobj.seek(archive.offset)
                if archive.fileobj.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
                    raise ValueError("it is truncated or damaged")
        except (*DAMAGED, OSError) as error:
            raise ValueError(f"{path} cannot be read as an uncompressed tar: {error}") from error
    return found


def read_at(path: Path, start: int, size: int) -> BytesIO:
    """Read a file of a tar."""
    with path.open("rb") as file:
        file.seek(start)
        data = file.read(size)
    if len(data) < size:
        raise ValueError(f"{path} is truncated: {size} bytes at {start} are not complete")
    return BytesIO(data)
