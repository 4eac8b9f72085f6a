"""Draw samples from a run, into one .npz and a PNG grid.

    python sample.py run=runs/NAME num_samples=500
    python sample.py run=runs/NAME class_label=3 guidance_scale=1.5 num_steps=40

Sample i depends only on seed first_seed + i, not on the number of processes. Finished parts are kept in
OUT.partial: the same command resumes, also with another number of processes.
"""

import runtime.openmp  # noqa: F401 before torch

import math
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import numpy as np
from omegaconf import DictConfig

from builders import config as configuration
from builders.drawing import Drawing, cache_key, start_drawing
from builders.sampling import SampleConfig, open_model, read_request
from evaluation.features import COST, COST_KEYS, extract
from evaluation.pictures import GrowingGrid
from runtime.config import as_job, run_main, user_mistakes
from runtime.errors import check_positive
from runtime.files import atomic_write, sha256, write_json
from runtime.machine import PATIENCE, start_process
from runtime.output import output_path
from runtime.parts import Arrays, check_room, resume_hint
from runtime.provenance import environment

configuration.register("sample", SampleConfig)


@hydra.main(version_base="1.3", config_path="configs", config_name="sample")
@as_job
def main(cfg: DictConfig) -> None:
    """Load the averaged weights of a run and sample from them."""
    with user_mistakes():
        request = configuration.resolve(cfg, SampleConfig)
        check_positive("grid_columns", request.grid_columns)
        if request.out and not request.out.endswith(".npz"):
            raise ValueError(f"out={request.out} must end in .npz")
        request, experiment = read_request(request)
        launch = start_process(timeout=PATIENCE)
        model, name, record = open_model(request, experiment, launch)
        out = output_path(request.out, request.folder, f"samples/{name}.npz")
        folder = out.with_name(f"{out.name}.partial")
        may_replace = request.overwrite or folder.is_dir()  # a job that was stopped while it joined its parts
        with launch.exclusive_output(out, other_files(out), may_replace):
            key = cache_key(record, launch.device)
            images, cache = start_drawing(model, record, folder, key, launch, request.overwrite)
            grid = GrowingGrid(images, cache, request.grid_columns)
            num_bytes = math.prod(images.shape) * (images.count + images.part_size * len(cache.missing()))
            launch.broadcast_from_main(lambda: check_room(out, num_bytes))
            if launch.broadcast_from_main(cache.start):
                launch.print(f"{images}\na picture of the first images: {grid.file}")
            parts = extract(None, images, cache, launch=launch, description="sample", after_part=grid.update)
            record["environment"] = environment(launch.device)
            if launch.is_main:
                pack(parts, images, grid.file, out, record)
                cache.remove()
    launch.print(f"samples {out}\npicture {out.with_suffix('.png')}")


def other_files(out: Path) -> list[Path]:
    """Return the files of picture, record and scores."""
    return [out.with_suffix(suffix) for suffix in (".png", ".json", ".scores.json")]


def pack(parts: Iterator[Arrays], images: Drawing, grid: Path, out: Path, record: dict[str, Any]) -> None:
    """Join images (N, H, W, C) and labels (N,) in the layout of [ADM], with a picture and a record."""
    header = {"descr": "|u1", "fortran_order": False, "shape": (images.count, *images.shape)}
    labels, costs = images.labels(), []
    with resume_hint(out), atomic_write(out) as partial:
        with zipfile.ZipFile(partial, "w") as archive:
            with archive.open("arr_0.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array_header_1_0(file, header)
                for part in parts:
                    file.write(part["images"].tobytes())
                    costs.append(part[COST])
            if labels is not None:
                with archive.open("arr_1.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, labels)
        for file in other_files(out):  # of earlier samples
            file.unlink(missing_ok=True)
        # The samples come last: after a kill, the same command joins the parts again.
        shutil.copyfile(grid, out.with_suffix(".png"))
        record["cost_per_image"] = dict(zip(COST_KEYS, np.mean(costs, axis=0).tolist(), strict=True))
        write_json(out.with_suffix(".json"), {**record, "samples_sha256": sha256(partial)})


if __name__ == "__main__":
    run_main(main)
