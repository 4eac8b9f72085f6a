"""How images are drawn: precision, batches and compilation, decided once for all parts of a job."""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from joblib import cpu_count
from tqdm import tqdm

from diffusion import ImageSource
from diffusion.generate import cost_of_evaluations
from diffusion.graphs import CudaRecorder, replay_forward
from evaluation.features import COST
from evaluation.pictures import in_turn, save_grid
from runtime.files import finite
from runtime.launch import Launch
from runtime.machine import (
    can_compile,
    can_keep_freed_memory,
    compile_blocks,
    has_fast_bf16,
    keep_freed_memory,
)
from runtime.parts import PartFolder, check_room, settings_of
from runtime.provenance import flatten, source_sha256

LEFT_OPEN = {"mixed_precision": "auto", "batch_size": None, "compile": "auto"}
PATHS = ("run", "checkpoint", "encoder.name")  # the weights are known by their hashes
GRID, GRID_ROWS = "grid.png", 10
TOKENS_AT_ONCE = 4096  # on a CPU, where larger batches are not faster (benchmarks/LOG.md)
MAX_BATCH, MEMORY_SHARE, PROBE_BATCH = 256, 0.25, 8
# Assumed for an estimate that is the same on any number of processes and in every start: FLOPs per second (of
# a core, of a GPU) of blocks that are not compiled, the share of the time that compiled ones save, and the
# seconds that compiling takes, for the first length and for each further one.
FLOPS_PER_SEC = {"cpu": 7.5e10, "cuda": 2e14}
SAVED_SHARE = {"cpu": 0.35, "cuda": 0.3}
COMPILE_SEC = {"cpu": (15, 5), "cuda": (40, 20)}


def settle(
    source: ImageSource, asked: dict[str, Any], saved: dict[str, Any], num_samples: int, launch: Launch
) -> dict[str, Any]:
    """Decide what was left open, the same on all ranks and on any number of them, and set a source to it.

    Args:
        asked: the keys of LEFT_OPEN.
        saved: what the job was started with, if it was.
        num_samples: of the whole job.
    """

    def decide() -> dict[str, Any]:
        chosen = {
            key: saved.get(key) if asked[key] == left_open else asked[key]
            for key, left_open in LEFT_OPEN.items()
        }
        precision = chosen["mixed_precision"] or ("bf16" if has_fast_bf16(launch.device) else "no")
        source.bf16 = precision == "bf16"
        batch_size = chosen["batch_size"] or default_batch_size(source)
        compiled = chosen["compile"]
        if compiled is None:
            compiled = is_worth_compiling(source, num_samples)
        compiled = compiled in (True, "true")
        return {"mixed_precision": precision, "batch_size": batch_size, "compile": compiled}

    if can_keep_freed_memory(launch.device):
        keep_freed_memory()
    resolved = launch.broadcast_from_main(decide)
    source.bf16, source.batch_size = resolved["mixed_precision"] == "bf16", resolved["batch_size"]
    return resolved


def prepare(source: ImageSource) -> None:
    """Compile the blocks of the networks that a source evaluates, and have CUDA replay their forwards."""
    gc.collect()  # networks of earlier settings of a sweep, which refer to themselves once compiled
    evaluations = source.count_evaluations()
    for net in dict.fromkeys(net for net, _ in evaluations):
        # One graph for each length, alone and with the guided branch beside.
        compile_blocks(net.blocks, 2 * num_lengths(evaluations))
        if source.launch.device.type == "cuda":
            replay_forward(net, CudaRecorder)


def num_lengths(evaluations: Any) -> int:
    """Count the sequence lengths that the blocks see."""
    return len({length for net, kept in evaluations for length in (net.num_tokens, *kept)} - {0})


def is_worth_compiling(source: ImageSource, num_samples: int) -> bool:
    """True if compiled blocks save more time than compiling takes."""
    kind = source.launch.device.type
    if kind not in FLOPS_PER_SEC or not can_compile(source.launch.device):
        return False
    evaluations = source.count_evaluations()
    flops = cost_of_evaluations(evaluations, 1)["flops"] * num_samples
    sec = flops / FLOPS_PER_SEC[kind] / (cpu_count() if kind == "cpu" else 1)
    first, further = COMPILE_SEC[kind]
    return SAVED_SHARE[kind] * sec > first + further * (num_lengths(evaluations) - 1)


def default_batch_size(source: ImageSource) -> int:
    """Fill a CPU's caches, or at most a quarter of a GPU's memory."""
    device, num_tokens = source.launch.device, source.precond.net.num_tokens
    if device.type != "cuda":
        return max(1, TOKENS_AT_ONCE // num_tokens)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    source.one_evaluation(PROBE_BATCH)
    per_image = max(1, torch.cuda.max_memory_allocated(device) - before) / PROBE_BATCH
    room = MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory
    return min(MAX_BATCH, 2 ** int(np.log2(max(1, room / per_image))))


def about(record: dict[str, Any], launch: Launch) -> dict[str, Any]:
    """The settings that a part of samples depends on, as JSON."""
    flat = {key: value for key, value in flatten(record).items() if key not in PATHS}
    flat |= {"code": source_sha256(), "torch": torch.__version__, "device": launch.device.type}
    return json.loads(json.dumps(finite(flat)))


def parts_of(output: Path) -> Path:
    """Folder of the finished parts of samples."""
    return output.with_name(f"{output.name}.partial")


def begun_with(path: Path, asked: dict[str, Any], overwrite: bool) -> dict[str, Any]:
    """Settings of the job in a folder; empty where it is another job that may be replaced."""
    try:
        saved = settings_of(path)
    except ValueError:
        if not overwrite:
            raise
        return {}
    other = any(saved.get(key) != value for key, value in asked.items() if key not in LEFT_OPEN)
    return {} if overwrite and other else saved


def draw(
    source: ImageSource, record: dict[str, Any], output: Path, columns: int, overwrite: bool, launch: Launch
) -> PartFolder:
    """Draw what is missing of the images of a record, on all ranks, and return the folder of the parts.

    A grid of the first ones grows in it.

    Raises:
        OSError: the disk is full; what is drawn stays.
        ValueError: a sample is not finite, or the folder has parts of another job.
    """
    path, num_samples = parts_of(output), record["num_samples"]
    saved = launch.broadcast_from_main(lambda: begun_with(path, about(record, launch), overwrite))
    record |= settle(source, {key: record[key] for key in LEFT_OPEN}, saved, num_samples, launch)
    size = source.part_size(num_samples)
    parts = PartFolder(path, about(record, launch), -(-num_samples // size), "overwrite=true starts again")

    def start() -> list[int]:
        num_left = num_samples - size * len(parts.done() if saved else ())
        num_bytes = int(np.prod(source.image_shape)) * (num_samples + num_left)  # the file, and its parts
        check_room("output", output, num_bytes)
        return parts.start(replace=overwrite)

    todo = launch.broadcast_from_main(start)
    if todo and record["compile"]:
        prepare(source)
    if launch.is_main and todo:
        precision = "bf16" if source.bf16 else "fp32"
        print(f"{num_samples} images, {size} at a time, the network in {precision}")
        print(f"a picture of the first ones, class by class, grows in {path / GRID}")
    grid = GrowingGrid(source, parts, num_samples, columns)
    finished = min(num_samples, size * (parts.num_parts - len(todo)))
    bar = {"total": num_samples, "initial": finished, "desc": "sample", "unit": "image"}
    with tqdm(**bar, disable=not launch.is_main) as progress, resumable(parts, launch):
        for part, images in source.batches(num_samples, size, todo[launch.rank :: launch.world_size]):
            parts.write(part, {"images": images, COST: np.array([*source.cost().values()])})
            if launch.is_main:
                done = parts.done()
                grid.update(done)
                progress.update(min(size * len(done), num_samples) - progress.n)
    launch.barrier()
    if launch.is_main:
        grid.update(parts.done())
    return parts


@contextmanager
def resumable(parts: PartFolder, launch: Launch) -> Iterator[None]:
    """Say where a drawing that is interrupted goes on; leave nothing where nothing was drawn."""
    try:
        with parts.left_if_filled() if launch.world_size == 1 else nullcontext():
            yield
    except KeyboardInterrupt:
        if parts.path.exists():
            launch.print(f"\nstopped: the same command resumes from {parts.path}")
        raise


class GrowingGrid:
    """A picture of the first samples, class by class, of which those are shown that are drawn."""

    def __init__(self, source: ImageSource, parts: PartFolder, num_samples: int, columns: int):
        labels = source.labels(num_samples)
        order = np.arange(num_samples) if labels is None else in_turn(labels.numpy())
        self.shown = order[: GRID_ROWS * columns]
        self._captions = source.captions(None if labels is None else labels[self.shown].tolist())
        self._size, self._parts, self._columns = source.part_size(num_samples), parts, columns
        self._images = np.zeros((len(self.shown), *source.image_shape), np.uint8)
        self._seen: set[int] = set()

    def update(self, done: set[int]) -> None:
        """Write the picture again where finished parts have something to show."""
        of_part = self.shown // self._size
        fresh = (done - self._seen) & set(of_part.tolist())
        for part in fresh:
            images = self._parts.read(part)["images"]
            self._images[of_part == part] = images[self.shown[of_part == part] % self._size]
        self._seen |= done
        if fresh:
            save_grid(self._images, self._parts.path / GRID, self._columns, self._captions)
