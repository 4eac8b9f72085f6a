"""Write a latent folder as WebDataset shards, for data that does not fit the disks it is trained on.

    python -m data.make_shards latents/NAME shards/NAME

The entries are shuffled over all classes. The folder can be put on a server; `data=stream
data.path=FOLDER_OR_URL` trains on it. data/README.md states the format.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.latents import LatentDataset, open_latents
from data.manifest import FILES, to_json
from data.shards import SHARDS_FILE
from data.writer import claimed, hash_blocks
from runtime.config import run_main, user_mistakes
from runtime.errors import check_positive
from runtime.files import write_json

SHARD_ENTRIES = 2048
WRITE_SEED = 0


def write_shards(dataset: LatentDataset, out: Path, shard_entries: int) -> None:
    """Write a latent folder as shards, which appear at `out` when they are complete."""
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
            _write_shard(partial / name, dataset, ids)
            checksums[name] = hash_blocks(partial / name, dataset.manifest.block_bytes)
        write_json(partial / SHARDS_FILE, {name: len(ids) for name, ids in jobs.items()})
        checksums[SHARDS_FILE] = hash_blocks(partial / SHARDS_FILE, dataset.manifest.block_bytes)
        (partial / FILES["manifest"]).write_text(to_json(replace(dataset.manifest, checksums=checksums)))
        partial.rename(out)


def _write_shard(file: Path, dataset: LatentDataset, ids: np.ndarray) -> None:
    from webdataset import TarWriter

    with TarWriter(str(file), mtime=0) as tar:
        for i in ids:
            label = {} if dataset.labels is None else {"cls": str(dataset.labels[i]).encode()}
            tar.write({"__key__": f"{i:09d}", "latents.npy": dataset.stored[i], **label})


def main() -> None:
    """Parse the command line and write the shards."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m data.make_shards", description=__doc__, formatter_class=raw)
    parser.add_argument("path", type=Path, metavar="LATENTS", help="a latent folder")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder of shards to write")
    parser.add_argument("--entries", type=int, default=SHARD_ENTRIES, help="of a shard; default: %(default)s")
    arguments = parser.parse_args()
    with user_mistakes():
        check_positive("--entries", arguments.entries)
        write_shards(open_latents(arguments.path), arguments.out, arguments.entries)
    print(f"Train on it: python train.py data=stream data.path={arguments.out}")


if __name__ == "__main__":
    run_main(main)
