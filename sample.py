"""Draw samples from a run, into one .npz and a PNG grid.

    accelerate launch sample.py run=runs/NAME num_samples=500
    accelerate launch sample.py run=runs/NAME class_label=3 guidance_scale=1.5 num_steps=40

Sample i is a function of seed first_seed + i alone: it does not depend on the batch size or the number of processes.
"""

import json
from pathlib import Path

import hydra
import numpy as np
from accelerate import PartialState
from accelerate.utils import gather_object
from omegaconf import DictConfig
from tqdm import tqdm

from data import encoder_for, encoder_record, image_decoder, manifest_from
from diffusion import ImageSource
from evaluation.pictures import in_turn, save_grid
from runtime.files import sha256
from training import config as configuration
from training.machine import start_process
from training.provenance import environment
from training.rules import check_positive
from training.sampling import check_run, open_run

GRID_ROWS = 10

configuration.register()


@hydra.main(version_base="1.3", config_path="configs", config_name="sample")
def main(cfg: DictConfig) -> None:
    """Load the averaged weights of a run and sample from them."""
    with configuration.user_mistakes():
        request = configuration.resolve(cfg)
        check_positive("grid_columns", request["grid_columns"])
        if request["output"] and not request["output"].endswith(".npz"):
            raise ValueError(f"output={request['output']} must end in .npz; the picture and the protocol take its name")
        check_run(request)
        state = start_process()
        run = open_run(request, state)
        weights_sha256 = sha256(run.weights)  # now: a run that still trains removes old checkpoints
        manifest = manifest_from(run.data["manifest"])
        encoder = encoder_for(manifest, state.device, **run.decoding)
        decode = image_decoder(manifest, encoder, run.decoding["official"])
        source = ImageSource(run.precond, run.sampler, decode, **run.drawing, state=state, gather=gather_object)
    output = Path(request["output"] or Path(request["run"]) / "samples" / f"{run.name}.npz")
    sample(source, request["num_samples"], request["grid_columns"], output, state)
    if state.is_main_process:
        record = {
            **run.protocol,
            "encoder": encoder_record(encoder),
            "weights_sha256": weights_sha256,
            "samples_sha256": sha256(output),
        }
        record["environment"] = environment(state.device)
        output.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n")
        state.print(f"samples {output}\npicture {output.with_suffix('.png')}")


def sample(source: ImageSource, num_samples: int, columns: int, output: Path, state: PartialState) -> None:
    """Generate on all processes into one array on disk, then pack it into `output`, with a picture beside it."""
    unpacked = output.with_name(f".{output.stem}.npy")
    if state.is_main_process:
        output.parent.mkdir(parents=True, exist_ok=True)
        np.lib.format.open_memmap(unpacked, mode="w+", dtype=np.uint8, shape=(num_samples, *source.image_shape))
    state.wait_for_everyone()
    images = np.lib.format.open_memmap(unpacked, mode="r+")
    with tqdm(total=num_samples, desc="sample", unit="image", disable=not state.is_main_process) as progress:
        for start, pixels in source.batches(num_samples):
            images[start : start + len(pixels)] = pixels
            progress.update(min(len(pixels) * state.num_processes, num_samples - progress.n))
    images.flush()
    state.wait_for_everyone()
    if state.is_main_process:
        labels = source.labels(num_samples)
        # The layout of [ADM]: arr_0 holds the images, arr_1 the labels.
        partial = output.with_name(f".{output.stem}.partial.npz")
        np.savez(partial, images, *([] if labels is None else [labels.numpy()]))
        partial.replace(output)
        shown = np.arange(num_samples) if labels is None else in_turn(labels.numpy())
        save_grid(images[shown[: GRID_ROWS * columns]], output.with_suffix(".png"), columns)
        unpacked.unlink()


if __name__ == "__main__":
    configuration.run(main)
