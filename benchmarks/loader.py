"""How fast latents are read in the order of training, how much memory that takes, and how soon a large folder
is open.

    python -m benchmarks.loader                     needs 2 GiB of disk, for a while, in the folder for
    temporary files python -m benchmarks.loader --folder FOLDER     on the disk that you mean to train from

On one core: a folder of 2 GiB, entries of 8x32x32 float16, is read in random order, each entry once, cold
(its pages dropped from the cache) and warm. A second folder is as large as ImageNet with flips, but
sparse. The record goes to benchmarks/results/.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.memory import memory_gib
from benchmarks.results import measured, write_results
from data import LatentDataset, LatentManifest, LatentWriter, open_latents, stream
from data.manifest import FILES, to_json
from runtime.provenance import environment

SHAPE, NUM_CLASSES = (8, 32, 32), 1000
GIB, ENTRY_BYTES = 2**30, 8 * 32 * 32 * 2
COUNT = 2 * GIB // ENTRY_BYTES
IMAGENET_COUNT = 1_281_167
BATCH_SIZE, REPEATS, STARTS = 256, 5, 7


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.loader",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--folder", type=Path, help="where the folders are written; default: the system's for temporary files"
    )
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # one core, so that the figures are those of one
    found = environment(torch.device("cpu"))
    with tempfile.TemporaryDirectory(dir=parser.parse_args().folder) as folder:
        rows = time_start(Path(folder) / "sparse") + time_reading(Path(folder) / "full")
    write_results("loader", rows, found)


def time_reading(path: Path) -> list[dict[str, Any]]:
    """Read every entry once in random order, cold and warm, by itself and as the batches of training."""
    manifest = LatentManifest(COUNT, SHAPE, "float16", "moments", NUM_CLASSES, "benchmark")
    rng = np.random.default_rng(0)
    with LatentWriter(path, manifest) as writer:
        for start in tqdm(range(0, COUNT, 4096), desc="write"):
            count = min(4096, COUNT - start)
            writer.append(
                rng.standard_normal((count, *SHAPE), dtype=np.float32), rng.integers(NUM_CLASSES, size=count)
            )
    order = rng.permutation(COUNT)
    batches = [order[start : start + BATCH_SIZE] for start in range(0, COUNT, BATCH_SIZE)]

    def read(dataset: LatentDataset) -> None:
        for ids in batches:
            dataset.read(ids)

    def train(dataset: LatentDataset) -> None:
        options = {
            "batch_size": BATCH_SIZE,
            "micro_batch_size": BATCH_SIZE,
            "num_workers": 0,
            "pin_memory": False,
        }
        for _ in islice(stream(dataset, 0, seed=0, rank=0, world_size=1, **options), len(batches)):
            pass

    def watch(dataset: LatentDataset) -> list[float]:
        return [memory_gib("RssAnon") for ids in batches if dataset.read(ids)]

    _drop_from_cache(path / FILES["latents"])
    cold = COUNT / _seconds(read, _open(path, manifest))
    held = [memory_gib("RssAnon")]
    dataset = _open(path, manifest)
    held += watch(dataset)
    warm, training = [], []
    for _ in range(REPEATS):  # in turn, so that a busy machine slows both
        warm.append(COUNT / _seconds(read, dataset))
        training.append(COUNT / _seconds(train, dataset))
        held.append(memory_gib("RssAnon"))
    rows = [
        measured(f"{COUNT} entries: cold", "entries/s", cold),
        measured(f"{COUNT} entries: warm", "entries/s", warm),
    ]
    rows.append(measured(f"{COUNT} entries: warm, as the batches of training", "entries/s", training))
    rows.append(measured("anonymous memory, most against least", "MiB", (max(held) - min(held)) * 1024))
    print(f"{COUNT:,} entries of 16 KiB in random order, one core, medians of {REPEATS}:")
    print(f"  cold   {cold:12,.0f} entries per second (n = 1)")
    print(
        f"  warm   {median(warm):12,.0f} entries per second; as the batches of training "
        f"{median(training):,.0f}"
    )
    print(
        f"  memory {(max(held) - min(held)) * 1024:12.1f} MiB between most and least that are not the file's"
    )
    return rows


def time_start(path: Path) -> list[dict[str, Any]]:
    """Open a folder as large as ImageNet with flips, and read the first batch of a training; the file
    is sparse.
    """
    manifest = LatentManifest(
        IMAGENET_COUNT, SHAPE, "float16", "moments", NUM_CLASSES, "benchmark", hflip=True, num_held_out=5000
    )
    path.mkdir()
    with (path / FILES["latents"]).open("wb") as file:
        description = {"descr": "<f2", "fortran_order": False, "shape": manifest.stored_shape}
        np.lib.format.write_array_header_1_0(file, description)
        file.truncate(file.tell() + 2 * ENTRY_BYTES * IMAGENET_COUNT)
    np.save(path / FILES["labels"], np.random.default_rng(0).integers(NUM_CLASSES, size=IMAGENET_COUNT))
    (path / FILES["manifest"]).write_text(to_json(manifest))
    opening, starting = [], []
    for _ in range(STARTS):
        start = time.perf_counter()
        dataset = _open(path, manifest)
        dataset.describe()
        opening.append(time.perf_counter() - start)
        options = {
            "batch_size": BATCH_SIZE,
            "micro_batch_size": BATCH_SIZE,
            "num_workers": 0,
            "pin_memory": False,
        }
        next(iter(stream(dataset, 0, seed=0, rank=0, world_size=1, **options)))
        starting.append(time.perf_counter() - start)
    print(
        f"{IMAGENET_COUNT:,} entries with flips, {2 * ENTRY_BYTES * IMAGENET_COUNT / 1e9:.0f} GB, "
        f"medians of {STARTS}:"
    )
    print(
        f"  open {median(opening):.3f} s; to the first batch {median(starting):.3f} s (the first time "
        f"{starting[0]:.3f} s)"
    )
    later = [measured("open", "s", opening), measured("to the first batch", "s", starting)]
    rows = [measured("to the first batch, the first time", "s", starting[0]), *later]
    return [row | {"what": f"{IMAGENET_COUNT} entries with flips: {row['what']}"} for row in rows]


def _open(path: Path, manifest: LatentManifest) -> LatentDataset:
    return open_latents(str(path), manifest.input_size, manifest.in_channels, manifest.num_classes)


def _drop_from_cache(file: Path) -> None:
    # pages that are still to be written cannot be dropped, and writing them would disturb the clock
    os.sync()
    with file.open("rb") as f:
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _seconds(read: Callable[[LatentDataset], None], dataset: LatentDataset) -> float:
    start = time.perf_counter()
    read(dataset)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
