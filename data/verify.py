"""Check every block of a latent folder, or of a folder of shards, against the checksums of its manifest.

python -m data.verify path=latents/NAME
"""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from joblib import cpu_count
from tqdm import tqdm

from data.latents import open_latents
from data.manifest import FILES, LatentManifest, read_manifest
from data.shards import SHARDS_FILE, open_shards
from data.writer import hash_block
from runtime.config import command, run_main

HEADER_BYTES = 128  # of the .npy files that data.LatentWriter writes


@dataclass
class VerifyConfig:
    """The keys of `data.verify`."""

    path: str  # a latent folder, or a folder of shards


def damages(path: Path, manifest: LatentManifest) -> Iterator[str | None]:
    """Yield None for each intact block, and a description of each damaged one."""
    if manifest.checksums is None:
        raise ValueError(f"{path} was written without checksums: it cannot be checked")
    checksums = manifest.checksums.items()
    blocks = [(name, i, digest) for name, digests in checksums for i, digest in enumerate(digests)]
    with ThreadPoolExecutor(cpu_count()) as pool:
        yield from pool.map(lambda block: _damage(path, manifest, *block), blocks)
    for name, digests in checksums:
        file, max_bytes = path / name, len(digests) * manifest.block_bytes
        if file.is_file() and file.stat().st_size > max_bytes:
            yield f"{file}: {file.stat().st_size - max_bytes} bytes more than were written"


def _damage(path: Path, manifest: LatentManifest, name: str, block: int, expected: str) -> str | None:
    file, start = path / name, block * manifest.block_bytes
    try:
        found = hash_block(file, start, manifest.block_bytes)
    except OSError as error:
        return f"{file}: block {block} cannot be read: {error.strerror}"
    if found == expected:
        return None
    end = start + manifest.block_bytes
    where = f"bytes {start} to {end}{_entries(manifest, name, start, end)}"
    return f"{file}: block {block} ({where}) is damaged"


def _entries(manifest: LatentManifest, name: str, start: int, end: int) -> str:
    arrays = {FILES[key]: array for key, array in manifest.arrays().items()}
    if name not in arrays:
        return ""
    dtype, shape = arrays[name]
    entry_bytes = np.dtype(dtype).itemsize * math.prod(shape[1:])
    first, last = (max(0, byte - HEADER_BYTES) // entry_bytes for byte in (start, end - 1))
    return f", entries {first} to {min(manifest.count - 1, last)}"


@command("verify", VerifyConfig, __doc__)
def main(request: dict[str, Any]) -> None:
    """Check a folder and print what is damaged."""
    path = Path(request["path"])
    manifest, found = read_manifest(path), []
    total = sum(len(digests) for digests in (manifest.checksums or {}).values())
    for damage in tqdm(damages(path, manifest), total=total, desc="verify", unit="block"):
        if damage:
            found.append(damage)
            tqdm.write(damage)
    if found:
        what = f"{len(found)} of {total} blocks are damaged"
        raise ValueError(f"{path}: {what}: restore them from a copy, or make the folder again")
    arrays = {file.name for file in path.iterdir() if file.suffix in (".npy", ".tar")}
    is_shards = (path / SHARDS_FILE).exists()
    unknown = arrays.union([SHARDS_FILE] if is_shards else []) - manifest.checksums.keys()
    if unknown:
        raise ValueError(f"{path / min(unknown)} has no checksums in the manifest: it cannot be checked")
    (open_shards if is_shards else open_latents)(str(path))
    print(f"{path}: all {total} blocks are intact")


if __name__ == "__main__":
    run_main(main)
