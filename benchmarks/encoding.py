"""How fast images are encoded, and what the slices of an autoencoder take in memory.

    python -m benchmarks.encoding

A tiny autoencoder of random weights shows what reading and writing cost beside it; one of the size of
sd-vae-ft-ema, of random weights as well, what encoding and decoding at 256x256 cost on this machine. The
record goes to benchmarks/results/.
"""

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

from benchmarks.memory import peak_gib, reset_peak
from benchmarks.results import measured, write_results
from data import KLEncoder, encode
from data.encoders import PIXELS_AT_ONCE
from data.images import read_image
from runtime.machine import start_process
from runtime.provenance import environment

NUM_IMAGES, REPEATS, RESOLUTION = 512, 3, 256
SLICE = PIXELS_AT_ONCE // RESOLUTION**2
# The architecture of the public autoencoders of Stable Diffusion: 84 million weights.
FULL = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "norm_num_groups": 32}
TINY = {"block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 4}
CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def main() -> None:
    """Measure, print and record."""
    launch = start_process(tf32=False)
    found = environment(launch.device)
    with tempfile.TemporaryDirectory() as folder:
        rows = time_program(Path(folder)) + time_network(Path(folder), launch.device)
    write_results("encoding", rows, found)


def time_program(folder: Path) -> list[dict[str, Any]]:
    """Time data.encode with a tiny autoencoder, and its reading and network by themselves, on 512 cuts of
    photographs.
    """
    from sklearn.datasets import load_sample_images

    rng = np.random.default_rng(0)
    photographs = load_sample_images().images
    for i in range(NUM_IMAGES):
        target = folder / "photos" / str(i % 2) / f"{i:04}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        top, left = rng.integers(427 - 375), rng.integers(640 - 500)  # the usual size of an image of ImageNet
        Image.fromarray(photographs[i % 2][top : top + 375, left : left + 500]).save(target, quality=95)
    vae = _save_autoencoder(folder / "tiny", TINY)
    encoder = KLEncoder(str(vae), start_process(tf32=False).device)
    files = sorted((folder / "photos").rglob("*.jpg"))
    images = torch.randint(0, 256, (NUM_IMAGES, 3, RESOLUTION, RESOLUTION), dtype=torch.uint8)
    found: dict[str, list[float]] = {
        "data.encode": [],
        "reading, one thread": [],
        "network, with flips": [],
    }
    for i in range(REPEATS):
        found["data.encode"].append(
            NUM_IMAGES / _seconds(_encode, folder / "photos", folder / f"latents_{i}", vae)
        )
        found["reading, one thread"].append(NUM_IMAGES / _seconds(_read, files))
        found["network, with flips"].append(
            NUM_IMAGES / _seconds(encoder.encode, torch.cat([images, images]))
        )
    print(f"a tiny autoencoder, {RESOLUTION}x{RESOLUTION}, medians of {REPEATS}:")
    for name, values in found.items():
        print(f"  {name}: {median(values):.1f} images per second")
    return [measured(f"tiny: {name}", "images/s", values) for name, values in found.items()]


def time_network(folder: Path, device: torch.device) -> list[dict[str, Any]]:
    """Time one slice through an autoencoder of full size, and take its peak of memory."""
    encoder = KLEncoder(str(_save_autoencoder(folder / "full", FULL)), device)
    images = torch.randint(0, 256, (SLICE, 3, RESOLUTION, RESOLUTION), dtype=torch.uint8)
    latents = torch.randn(SLICE, 4, RESOLUTION // 8, RESOLUTION // 8)
    rows = []
    for name, call, argument in (("encode", encoder.encode, images), ("decode", encoder.decode, latents)):
        before = reset_peak(device)
        times = [_seconds(call, argument) for _ in tqdm(range(REPEATS), desc=f"full size, {name}")]
        held = peak_gib(device) - before
        rows.append(measured(f"full: {name}", "images/s", [SLICE / t for t in times]))
        rows.append(measured(f"full: {name}, peak of a slice of {SLICE}", "GiB", held))
        print(f"full size, {name}: {SLICE / median(times):.2f} images per second, {held:.1f} GiB")
    return rows


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


def _seconds(call: Any, *arguments: Any) -> float:
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
