"""Check every block of a latent folder against the checksums of its manifest.

python -m data.verify path=latents/NAME
"""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from joblib import cpu_count
from tqdm import tqdm

from data.latents import open_latents
from data.manifest import LatentManifest, read_manifest
from data.writer import hash_block
from runtime.config import command, run_main


@dataclass
class VerifyConfig:
    """The keys of `data.verify`."""

    path: str  # a latent folder


def damages(path: Path, manifest: LatentManifest) -> Iterator[str | None]:
    """Yield None for each intact block, and a description of each damaged one."""
    if manifest.checksums is None:
        raise ValueError(f"{path} has no checksums in its manifest: it cannot be checked")
    checksums = manifest.checksums.items()
    blocks = [(name, i, digests) for name, digests in checksums for i in range(len(digests))]
    with ThreadPoolExecutor(cpu_count()) as pool:
        yield from pool.map(lambda block: _damage(path, manifest, *block), blocks)


def _damage(path: Path, manifest: LatentManifest, name: str, block: int, digests: list[str]) -> str | None:
    file, start = path / name, block * manifest.block_bytes
    end = start + manifest.block_bytes
    try:  # hash the last block to the end of the file: nothing may follow it
        digest = hash_block(file, start, sys.maxsize if block == len(digests) - 1 else manifest.block_bytes)
    except OSError as error:
        return f"{file}: block {block} cannot be read: {error.strerror}"
    if digest == digests[block]:
        return None
    return f"{file}: block {block} (bytes {start} to {end}) is damaged"


@command("verify", VerifyConfig, __doc__)
def main(request: VerifyConfig) -> None:
    """Check a folder and print the damaged blocks."""
    path = Path(request.path)
    manifest, num_damaged = read_manifest(path), 0
    total = sum(len(digests) for digests in (manifest.checksums or {}).values())
    for damage in tqdm(damages(path, manifest), total=total, desc="verify", unit="block"):
        if damage:
            num_damaged += 1
            tqdm.write(damage)
    if num_damaged:
        blocks = f"{num_damaged} of {total} blocks are damaged"
        raise ValueError(f"{path}: {blocks}: restore the files from a copy, or make the folder again")
    if unknown := {file.name for file in path.glob("*.npy")} - manifest.checksums.keys():
        raise ValueError(f"{path / min(unknown)} has no checksums in the manifest: it cannot be checked")
    open_latents(path)
    print(f"{path}: all {total} blocks are intact")


if __name__ == "__main__":
    run_main(main)
