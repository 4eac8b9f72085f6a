"""Draw samples from a run, into one .npz and a PNG grid.

    accelerate launch sample.py run=runs/NAME num_samples=500
    accelerate launch sample.py run=runs/NAME class_label=3 guidance_scale=1.5 num_steps=40

Sample i is a function of seed first_seed + i alone: it does not depend on the batch size or the number of processes.
"""

import json
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import torch
import yaml
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from omegaconf import DictConfig
from tqdm import tqdm

from data import LatentManifest, image_decoder, manifest_from
from diffusion import balanced_labels, generate
from evaluation.pictures import save_grid
from training import config as configuration
from training.checkpoint import latest_checkpoint, load_weights
from training.provenance import RunFolder, environment

GRID_ROWS = 10

configuration.register()


@hydra.main(version_base="1.3", config_path="configs", config_name="sample")
def main(cfg: DictConfig) -> None:
    """Load the averaged weights of a run and sample from them."""
    with configuration.one_line_errors():
        request = configuration.resolve(cfg)
        run = RunFolder(request["run"])
        if not run.config_file.is_file():
            raise FileNotFoundError(f"run={run.path} is no run: {run.config_file} not found")
        config = yaml.safe_load(run.config_file.read_text())
        manifest = manifest_from(run.manifest()["data"]["manifest"])
        checkpoint = Path(request["checkpoint"]) if request["checkpoint"] else latest_checkpoint(run.path)
        if checkpoint is None:
            raise FileNotFoundError(f"run={run.path} has no checkpoint yet")
        settings = _settings(request, config)
        state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        net = configuration.build_net(config).to(state.device).eval()
        load_weights(net, checkpoint / "ema.safetensors")
    output = Path(request["output"] or run.path / "samples" / _name(checkpoint, settings))
    sample(configuration.build_precond(config, net).eval(), manifest, settings, output, state)
    if state.is_main_process:
        protocol = {**settings, "checkpoint": str(checkpoint), "data": run.manifest()["data"]}
        output.with_suffix(".json").write_text(
            json.dumps({**protocol, "environment": environment(str(state.device))}, indent=2) + "\n"
        )
        state.print(f"samples {output}\npicture {output.with_suffix('.png')}")


def sample(
    precond: torch.nn.Module, manifest: LatentManifest, settings: dict[str, Any], output: Path, state: PartialState
) -> None:
    """Generate on all processes into one array on disk, and pack it."""
    num_samples, batch_size = settings["num_samples"], settings["batch_size"]
    labels = _labels(settings, precond.net.num_classes)
    decode = image_decoder(manifest)
    shared = output.with_name(f".{output.stem}.npy")
    batches = generate(
        precond,
        configuration.build(settings["sampler"]),
        seeds=range(settings["first_seed"], settings["first_seed"] + num_samples),
        class_labels=labels,
        batch_size=batch_size,
        device=state.device,
        guidance_scale=settings["guidance_scale"],
        process_index=state.process_index,
        num_processes=state.num_processes,
    )
    images = None
    autocast = torch.autocast(state.device.type, torch.bfloat16, enabled=settings["mixed_precision"] == "bf16")
    with autocast, tqdm(total=num_samples, desc="sample", unit="image", disable=not state.is_main_process) as progress:
        for start, latents in batches:
            pixels = decode(latents)
            if images is None:
                images = _shared_array(shared, (num_samples, *pixels.shape[1:]), state)
            images[start : start + len(pixels)] = pixels
            progress.update(min(len(pixels) * state.num_processes, num_samples - progress.n))
