"""How fast images are encoded, and what the slices of an autoencoder take in memory.

    python -m benchmarks.encoding

A tiny autoencoder of random weights shows what reading and writing cost beside it; one of the size of sd-vae-ft-ema, of random
weights as well, what encoding and decoding at 256x256 cost on this machine. The record goes to benchmarks/results/.
"""

import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from PIL import Image
from tqdm import tqdm

from benchmarks.memory import memory_gib
from data import KLEncoder, encode
from data.encoders import PIXELS_AT_ONCE
from data.images import read_image
from training.machine import start_process
from training.provenance import environment

NUM_IMAGES, REPEATS, RESOLUTION = 512, 3, 256
SLICE = PIXELS_AT_ONCE // RESOLUTION**2
# The architecture of the public autoencoders of Stable Diffusion: 84 million weights.
FULL = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "norm_num_groups": 32}
TINY = {"block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 4}
CONFIGS = Path(__file__).resolve().parents[1] / "configs"
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Measure, print and record."""
    state = start_process()
    with tempfile.TemporaryDirectory() as folder:
        found = {"tiny": time_program(Path(folder)), "full": time_network(Path(folder), state.device)}
    RESULTS.mkdir(exist_ok=True)
    record = {"environment": environment(state.device), "images": NUM_IMAGES, "resolution": RESOLUTION, **found}
    (RESULTS / f"encoding_{state.device.type}.json").write_text(json.dumps(record, indent=2) + "\n")


def time_program(folder: Path) -> dict[str, list[float]]:
    """Time data.encode with a tiny autoencoder, and its reading and network by themselves, on 512 cuts of photographs."""
    from sklearn.datasets import load_sample_images

    rng = np.random.default_rng(0)
    photographs = load_sample_images().images
    for i in range(NUM_IMAGES):
        target = folder / "photos" / str(i % 2) / f"{i:04}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        top, left = rng.integers(427 - 375), rng.integers(640 - 500)  # the usual size of an image of ImageNet
        Image.fromarray(photographs[i % 2][top : top + 375, left : left + 500]).save(target, quality=95)
    vae = _save_autoencoder(folder / "tiny", TINY)
    encoder = KLEncoder(str(vae), start_process().device)
    files = sorted((folder / "photos").rglob("*.jpg"))
    images = torch.randint(0, 256, (NUM_IMAGES, 3, RESOLUTION, RESOLUTION), dtype=torch.uint8)
    found: dict[str, list[float]] = {"data.encode": [], "reading, one thread": [], "network, mirror images too": []}
    for i in range(REPEATS):
        found["data.encode"].append(NUM_IMAGES / _seconds(_encode, folder / "photos", folder / f"latents_{i}", vae))
        found["reading, one thread"].append(NUM_IMAGES / _seconds(_read, files))
        found["network, mirror images too"].append(NUM_IMAGES / _seconds(encoder.encode, torch.cat([images, images])))
    print(f"a tiny autoencoder, {RESOLUTION}x{RESOLUTION}, medians of {REPEATS}:")
    for name, values in found.items():
        print(f"  {name}: {median(values):.1f} images per second")
    return {f"{name}, images per second": values for name, values in found.items()}


def time_network(folder: Path, device: torch.device) -> dict[str, Any]:
    """Time one slice through an autoencoder of full size, and take its peak of memory."""
    encoder = KLEncoder(str(_save_autoencoder(folder / "full", FULL)), device)
    images = torch.randint(0, 256, (SLICE, 3, RESOLUTION, RESOLUTION), dtype=torch.uint8)
    latents = torch.randn(SLICE, 4, RESOLUTION // 8, RESOLUTION // 8)
    found: dict[str, Any] = {}
    for name, call, argument in (("encode", encoder.encode, images), ("decode", encoder.decode, latents)):
        before = _reset_peak(device)
        times = [_seconds(call, argument) for _ in tqdm(range(REPEATS), desc=f"full size, {name}")]
        found[f"{name}, images per second"] = [SLICE / t for t in times]
        found[f"{name}, peak of a slice of {SLICE}, GiB"] = _peak_gib(device) - before
        print(f"full size, {name}: {SLICE / median(times):.2f} images per second, {_peak_gib(device) - before:.1f} GiB")
    return found


def _save_autoencoder(folder: Path, sizes: dict[str, Any]) -> Path:
    from diffusers import AutoencoderKL

    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    torch.manual_seed(0)
    AutoencoderKL(**sizes, **blocks, latent_channels=4).save_pretrained(folder)
    return folder


def _encode(source: Path, out: Path, vae: Path) -> None:
    overrides = [f"source={source}", f"out={out}", f"encoder={vae}", f"resolution={RESOLUTION}"]
    with initialize_config_dir(config_dir=str(CONFIGS), version_base="1.3"):
        encode.main(compose("encode", overrides=overrides))


def _read(files: list[Path]) -> None:
    for file in files:
        with file.open("rb") as f:
            read_image(f, RESOLUTION)


def _reset_peak(device: torch.device) -> float:
    """Begin a new peak, and return what is held now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() / 2**30
    Path("/proc/self/clear_refs").write_text("5")  # Linux: VmHWM begins anew
    return memory_gib("VmRSS")


def _peak_gib(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else memory_gib("VmHWM")


def _seconds(call: Any, *arguments: Any) -> float:
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
