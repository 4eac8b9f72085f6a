"""Draw samples from a run, into one .npz and a PNG grid.

    accelerate launch sample.py run=runs/NAME num_samples=500
    accelerate launch sample.py run=runs/NAME class_label=3 guidance_scale=1.5 num_steps=40

Sample i is a function of seed first_seed + i alone: it does not depend on the batch size or the number of
processes.
"""

import os
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import torch
from omegaconf import DictConfig
from tqdm import tqdm

from builders import config as configuration
from builders.sampling import SampleConfig, check_sampling, folder_of, open_source
from diffusion import ImageSource
from evaluation.pictures import in_turn, save_grid
from runtime.config import run_main, user_mistakes
from runtime.errors import check_positive
from runtime.files import atomic_write, sha256, write_json
from runtime.launch import Launch
from runtime.machine import start_process
from runtime.output import check_free, place_of
from runtime.provenance import environment

GRID_ROWS = 10

configuration.register("sample", SampleConfig)


@hydra.main(version_base="1.3", config_path="configs", config_name="sample")
def main(cfg: DictConfig) -> None:
    """Load the averaged weights of a run and sample from them."""
    with user_mistakes():
        request = configuration.resolve(cfg)
        check_positive("grid_columns", request["grid_columns"])
        if asked := request["output"]:
            if not asked.endswith(".npz"):
                raise ValueError(f"output={asked} must end in .npz; picture and record take its name")
            check_free("output", Path(asked), beside(Path(asked)), request["overwrite"])
        check_sampling(request)
        launch = start_process()
        source, name, record = open_source(request, launch)
        output = place_of("output", request["output"], folder_of(request), f"samples/{name}.npz")
        record["environment"] = environment(launch.device)
        with launch.claimed_by_main("output", output, beside(output), request["overwrite"]):
            sample(source, request["num_samples"], request["grid_columns"], output, record, launch)
    launch.print(f"samples {output}\npicture {output.with_suffix('.png')}")


def beside(output: Path) -> list[Path]:
    """Return where picture, record and scores of samples go."""
    return [output.with_suffix(suffix) for suffix in (".png", ".json", ".scores.json")]


def sample(
    source: ImageSource, num_samples: int, columns: int, output: Path, record: dict[str, Any], launch: Launch
) -> None:
    """Generate on all ranks into one array on disk, then pack it into `output`, with picture and record."""
    unpacked = output.with_name(f".{output.stem}.npy")
    try:
        launch.broadcast_from_main(lambda: _make_array(unpacked, (num_samples, *source.image_shape)))
        images = np.lib.format.open_memmap(unpacked, mode="r+")
        with tqdm(total=num_samples, desc="sample", unit="image", disable=not launch.is_main) as progress:
            for start, pixels in source.batches(num_samples):
                images[start : start + len(pixels)] = pixels
                progress.update(min(len(pixels) * launch.world_size, num_samples - progress.n))
        images.flush()
        launch.barrier()
        if launch.is_main:
            record["cost_per_image"] = source.cost()
            pack(images, source.labels(num_samples), columns, output, record)
    finally:
        if launch.is_main:
            unpacked.unlink(missing_ok=True)


def pack(
    images: np.ndarray, labels: torch.Tensor | None, columns: int, output: Path, record: dict[str, Any]
) -> None:
    """Write images (N, H, W, C) and labels (N,) in the layout of [ADM], with a picture and a record."""
    with atomic_write(output) as partial:
        np.savez(partial, images, *([] if labels is None else [labels.numpy()]))  # arr_0 and arr_1
    for file in beside(output):  # of earlier samples
        file.unlink(missing_ok=True)
    shown = np.arange(len(images)) if labels is None else in_turn(labels.numpy())
    save_grid(images[shown[: GRID_ROWS * columns]], output.with_suffix(".png"), columns)
    write_json(output.with_suffix(".json"), {**record, "samples_sha256": sha256(output)})


def _make_array(file: Path, shape: tuple[int, ...]) -> None:
    """Make an .npy of bytes and reserve its disk space: a full disk kills a process that writes to a map."""
    file.unlink(missing_ok=True)  # left by a kill, or a link that came with the run
    np.lib.format.open_memmap(file, mode="w+", dtype=np.uint8, shape=shape)
    with file.open("r+b") as opened:
        os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)


if __name__ == "__main__":
    run_main(main)
