"""Draw samples from a run, into one .npz and a PNG grid.

    accelerate launch sample.py run=runs/NAME num_samples=500
    accelerate launch sample.py run=runs/NAME class_label=3 guidance_scale=1.5 num_steps=40

Sample i is a function of seed first_seed + i alone: it does not depend on the batch size or the number of processes.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from omegaconf import DictConfig
from tqdm import tqdm

from data import image_decoder, manifest_from
from diffusion import balanced_labels, generate
from evaluation.pictures import save_grid
from training import config as configuration
from training.checkpoint import latest_checkpoint, load_weights
from training.machine import start_process
from training.provenance import RunFolder, environment
from training.rules import NUM_SEEDS, check_sampling

GRID_ROWS = 10

configuration.register()


@hydra.main(version_base="1.3", config_path="configs", config_name="sample")
def main(cfg: DictConfig) -> None:
    """Load the averaged weights of a run and sample from them."""
    with configuration.user_mistakes():
        request = configuration.resolve(cfg)
        run = RunFolder(request["run"])
        config, details = run.read()
        settings = _settings(request, config)
        state = start_process()
        # The first process chooses: a run that still trains may save between the looks of two.
        (checkpoint,) = broadcast_object_list([request["checkpoint"] or latest_checkpoint(run.path)])
        if checkpoint is None:
            raise FileNotFoundError(f"run={run.path} has no checkpoint yet")
        checkpoint, manifest = Path(checkpoint), manifest_from(details["data"]["manifest"])
        net = configuration.build_net(config).to(state.device).eval()
        load_weights(net, checkpoint / "ema.safetensors")
        decode = image_decoder(manifest)
    output = Path(request["output"] or run.path / "samples" / _name(checkpoint, settings))
    sample(configuration.build_precond(config, net).eval(), decode, settings, output, state)
    if state.is_main_process:
        protocol = {**settings, "checkpoint": str(checkpoint), "data": details["data"]}
        output.with_suffix(".json").write_text(
            json.dumps({**protocol, "environment": environment(str(state.device))}, indent=2) + "\n"
        )
        state.print(f"samples {output}\npicture {output.with_suffix('.png')}")


@torch.no_grad()
def sample(
    precond: torch.nn.Module,
    decode: Callable[[torch.Tensor], np.ndarray],
    settings: dict[str, Any],
    output: Path,
    state: PartialState,
) -> None:
    """Generate on all processes into one array on disk, then pack it into `output`, with a picture beside it."""
    num_samples, net = settings["num_samples"], precond.net
    image_shape = decode(torch.zeros(1, net.in_channels, net.input_size, net.input_size, device=state.device)).shape[1:]
    unpacked = output.with_name(f".{output.stem}.npy")
    if state.is_main_process:
        output.parent.mkdir(parents=True, exist_ok=True)
        np.lib.format.open_memmap(unpacked, mode="w+", dtype=np.uint8, shape=(num_samples, *image_shape))
    state.wait_for_everyone()
    images = np.lib.format.open_memmap(unpacked, mode="r+")
    labels = _labels(settings, net.num_classes)
    batches = generate(
        precond,
        configuration.build(settings["sampler"]),
        seeds=range(settings["first_seed"], settings["first_seed"] + num_samples),
        class_labels=labels,
        batch_size=settings["batch_size"],
        device=state.device,
        guidance_scale=settings["guidance_scale"],
        process_index=state.process_index,
        num_processes=state.num_processes,
    )
    autocast = torch.autocast(state.device.type, torch.bfloat16, enabled=settings["mixed_precision"] == "bf16")
    with autocast, tqdm(total=num_samples, desc="sample", unit="image", disable=not state.is_main_process) as progress:
        for start, latents in batches:
            pixels = decode(latents)
            images[start : start + len(pixels)] = pixels
            progress.update(min(len(pixels) * state.num_processes, num_samples - progress.n))
    images.flush()
    state.wait_for_everyone()
    if state.is_main_process:
        _pack(images, labels, output)
        save_grid(images[: GRID_ROWS * settings["grid_columns"]], output.with_suffix(".png"), settings["grid_columns"])
        unpacked.unlink()


def _pack(images: np.ndarray, labels: torch.Tensor | None, output: Path) -> None:
    # The layout of [ADM]: arr_0 holds the images, arr_1 the labels.
    partial = output.with_name(f".{output.stem}.partial.npz")
    np.savez(partial, images, *([] if labels is None else [labels.numpy()]))
    partial.replace(output)


def _settings(request: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Return what is asked, completed by what the run says."""
    for key in ("num_samples", "batch_size", "grid_columns"):
        if request[key] < 1:
            raise ValueError(f"{key}={request[key]} must be at least 1")
    if not 0 <= request["first_seed"] <= NUM_SEEDS - request["num_samples"]:
        raise ValueError(f"first_seed={request['first_seed']} must not be negative, and the last seed less than {NUM_SEEDS}")
    if request["output"] and not request["output"].endswith(".npz"):
        raise ValueError(f"output={request['output']} must end in .npz; the picture and the protocol take its name")
    if request["mixed_precision"] not in ("no", "bf16"):
        raise ValueError(f"mixed_precision={request['mixed_precision']} must be no or bf16")
    num_classes, label = config["model"]["num_classes"], request["class_label"]
    if label is not None and not 0 <= label < num_classes:
        raise ValueError(f"class_label={label} must be in [0, {num_classes - 1}]")
    scale = config["guidance"]["guidance_scale"] if request["guidance_scale"] is None else request["guidance_scale"]
    sampler = {**config["sampler"], **({} if request["num_steps"] is None else {"num_steps": request["num_steps"]})}
    check_sampling(sampler, scale, num_classes)
    kept = ("num_samples", "batch_size", "first_seed", "class_label", "mixed_precision", "grid_columns")
    return {
        **{key: request[key] for key in kept},
        "guidance_scale": scale,
        "sampler": sampler,
    }


def _labels(settings: dict[str, Any], num_classes: int) -> torch.Tensor | None:
    if settings["class_label"] is not None:
        return torch.full((settings["num_samples"],), settings["class_label"])
    return balanced_labels(settings["num_samples"], num_classes)


def _name(checkpoint: Path, settings: dict[str, Any]) -> str:
    """Return a file name that holds what tells sets of samples of one run apart."""
    parts = [checkpoint.name, f"n{settings['num_samples']}", f"seed{settings['first_seed']}"]
    parts += [f"class{settings['class_label']}"] if settings["class_label"] is not None else []
    parts += [f"guidance{settings['guidance_scale']:g}"] if settings["guidance_scale"] != 1 else []
    parts += [f"{settings['sampler']['num_steps']}steps"]
    return "_".join(parts) + ".npz"


if __name__ == "__main__":
    configuration.run(main)
