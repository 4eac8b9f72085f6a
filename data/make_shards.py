"""Write a latent folder as WebDataset shards, for data that does not fit the disks it is trained on.

    python -m data.make_shards path=latents/NAME out=shards/NAME

The entries are shuffled over all classes. The folder can be put on a server; `data=stream
data.path=FOLDER_OR_URL` trains on it. data/README.md states the format.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.latents import LatentDataset, open_latents
from data.manifest import FILES
from data.shards import SHARDS_FILE
from data.writer import claimed, hash_blocks
from runtime.config import command, run_main
from runtime.errors import check_positive
from runtime.files import write_json

WRITE_SEED = 0


@dataclass
class ShardsConfig:
    """The keys of `data.make_shards`."""

    path: str  # a latent folder
    out: str  # the folder of shards to write
    entries: int = 2048  # of a shard


def write_shards(dataset: LatentDataset, out: Path, shard_entries: int) -> None:
    """Write a latent folder as shards, which appear at `out` when they are complete."""
    from webdataset import TarWriter

    if dataset.manifest.conditioning_type:
        what = f"conditioning_type={dataset.manifest.conditioning_type}"
        raise ValueError(f"{what}: shards hold no masks, use the latent folder")
    with claimed(out) as partial:
        order = np.random.default_rng(WRITE_SEED).permutation(dataset.train_ids)
        jobs = {}
        for kind, ids in (("train", order), ("held_out", dataset.held_out_ids)):
            for i, start in enumerate(range(0, len(ids), shard_entries)):
                jobs[f"{kind}-{i:06d}.tar"] = ids[start : start + shard_entries]
        checksums = {}
        for name, ids in tqdm(jobs.items(), desc="write", unit="shard"):
            with TarWriter(str(partial / name), mtime=0) as tar:
                for i in ids:
                    label = {} if dataset.labels is None else {"cls": str(dataset.labels[i]).encode()}
                    tar.write({"__key__": f"{i:09d}", "latents.npy": dataset.stored[i], **label})
            checksums[name] = hash_blocks(partial / name, dataset.manifest.block_bytes)
        write_json(partial / SHARDS_FILE, {name: len(ids) for name, ids in jobs.items()})
        checksums[SHARDS_FILE] = hash_blocks(partial / SHARDS_FILE, dataset.manifest.block_bytes)
        manifest = replace(dataset.manifest, checksums=checksums)
        write_json(partial / FILES["manifest"], asdict(manifest))
        partial.rename(out)


@command("make_shards", ShardsConfig, __doc__)
def main(request: ShardsConfig) -> None:
    """Write the shards."""
    check_positive("entries", request.entries)
    write_shards(open_latents(request.path), Path(request.out), request.entries)
    print(f"Train on it: python train.py data=stream data.path={request.out}")


if __name__ == "__main__":
    run_main(main)
