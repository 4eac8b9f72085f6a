"""Write a latent folder as WebDataset shards, for data that does not fit the disks it is trained on.

    python -m data.make_shards latents/NAME shards/NAME

The entries are shuffled over all classes. The folder can be put on a server; `data=stream
data.path=FOLDER_OR_URL` trains on it. data/README.md states the format.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data.latents import LatentDataset, open_latents
from data.manifest import FILES, read_manifest, to_json
from data.shards import SHARDS_FILE
from data.writer import claimed, hash_blocks
from runtime.lock import TRY_AGAIN, Busy

SHARD_ENTRIES = 2048
WRITE_SEED = 0


def write_shards(dataset: LatentDataset, out: Path, shard_entries: int) -> None:
    """Write a latent folder as shards, beside their place, and move them there when they are whole.

    Raises:
        Busy: another process is writing them.
        FileExistsError: there is something at `out` already.
        ValueError: the folder holds masks, which shards do not.
    """
    if dataset.manifest.conditioning_type:
        raise ValueError(
            f"conditioning_type={dataset.manifest.conditioning_type}: shards hold no masks, use the latent "
            "folder"
        )
    with claimed(out) as partial:
        order = np.random.default_rng(WRITE_SEED).permutation(dataset.train_ids)
        parts = {
            "train": _pieces(order, shard_entries),
            "held_out": _pieces(dataset.held_out_ids, shard_entries),
        }
        jobs = [
            (f"{kind}-{i:06d}.tar", ids) for kind, pieces in parts.items() for i, ids in enumerate(pieces)
        ]
        checksums = {}
        for name, ids in tqdm(jobs, desc="write", unit="shard"):
            _write_shard(partial / name, dataset, ids)
            checksums[name] = hash_blocks(partial / name, dataset.manifest.block_bytes)
        (partial / SHARDS_FILE).write_text(
            json.dumps({name: len(ids) for name, ids in jobs}, indent=2) + "\n"
        )
        checksums[SHARDS_FILE] = hash_blocks(partial / SHARDS_FILE, dataset.manifest.block_bytes)
        (partial / FILES["manifest"]).write_text(to_json(replace(dataset.manifest, checksums=checksums)))
        partial.rename(out)


def _write_shard(file: Path, dataset: LatentDataset, ids: np.ndarray) -> None:
    from webdataset import TarWriter

    with TarWriter(str(file), mtime=0) as tar:
        for i in ids:
            label = {} if dataset.labels is None else {"cls": str(dataset.labels[i]).encode()}
            tar.write({"__key__": f"{i:09d}", "latents.npy": dataset.stored[i], **label})


def _pieces(ids: np.ndarray, size: int) -> list[np.ndarray]:
    return [ids[start : start + size] for start in range(0, len(ids), size)]


def main() -> None:
    """Write a latent folder as shards."""
    parser = argparse.ArgumentParser(
        prog="python -m data.make_shards",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", type=Path, metavar="LATENTS", help="a latent folder")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder of shards to write")
    parser.add_argument(
        "--entries", type=int, default=SHARD_ENTRIES, help="of each shard; default: %(default)s"
    )
    arguments = parser.parse_args()
    try:
        if arguments.entries < 1:
            raise ValueError(f"--entries {arguments.entries} must be greater than 0")
        manifest = read_manifest(arguments.path)
        dataset = open_latents(
            str(arguments.path), manifest.input_size, manifest.in_channels, manifest.num_classes
        )
        write_shards(dataset, arguments.out, arguments.entries)
    except Busy as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(TRY_AGAIN)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"Train on it: accelerate launch train.py data=stream data.path={arguments.out}")


if __name__ == "__main__":
    main()
