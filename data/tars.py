"""Samples of WebDataset tars, each in bounded memory."""

import tarfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import PurePath
from typing import BinaryIO

MAX_OVERHEAD_BYTES = 2**16  # of a sample beside its files: headers of the tar, padding, what is read ahead
# What reading a damaged tar, and what is in it, may raise.
DAMAGED = (ValueError, EOFError, LookupError, OverflowError, RecursionError, tarfile.TarError)


class _Bounded:
    """A stream of which `left` bytes may be read: tarfile reads all that headers declare."""

    def __init__(self, stream: BinaryIO):
        self.stream, self.left = stream, MAX_OVERHEAD_BYTES

    def read(self, size: int) -> bytes:
        data = self.stream.read(size)
        self.left -= len(data)
        if self.left < 0:
            raise ValueError(f"a sample takes more than {MAX_OVERHEAD_BYTES} bytes beside its files")
        return data


def samples(stream: BinaryIO, max_bytes: int) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Yield the key and the contents, by suffix, of each sample of at most `max_bytes`, not compressed."""
    bounded = _Bounded(stream)
    with tarfile.open(fileobj=bounded, mode="r|") as archive:
        files = (member for member in archive if not member.isdir())
        for key, members in groupby(files, key=lambda member: _key_and_suffix(member.name)[0]):
            sample, room = {}, max_bytes
            for member in members:
                if not member.isreg() or member.issparse() or member.size > room:
                    rule = f"must be a file of at most {room}"
                    raise ValueError(f"{member.name} declares {member.size} bytes, {rule}")
                room, bounded.left = room - member.size, bounded.left + member.size
                suffix = _key_and_suffix(member.name)[1]
                if suffix in sample:
                    raise ValueError(f"{member.name} occurs twice")
                sample[suffix] = archive.extractfile(member).read()
            archive.members = []  # or they pile up
            bounded.left = MAX_OVERHEAD_BYTES
            yield key, sample


def _key_and_suffix(name: str) -> tuple[str, str]:
    """`a/0.latent.npy` is `latent.npy` of the sample `a/0`."""
    path = PurePath(name)
    stem, _, suffix = path.name.partition(".")
    return str(path.parent / stem), suffix
