"""The recipe of data=latents: network, steps and intervals for a data set and a device.

The recipe is chosen when a run starts. A run that has results resumes with the values in its config.yaml, on
any machine. These are rules of thumb; data=imagenet256 has the published recipes.
"""

import os
from math import log
from typing import Any

from omegaconf import DictConfig

from data.encoders import is_local
from data.manifest import LatentManifest, read_manifest
from runtime.machine import device_type
from runtime.provenance import flatten
from training.run_folder import RunFolder

LATENTS = "data.open_latents"
NUM_TOKENS = 256
SIZES = {  # (smallest number of entries, (width, depth, heads)): tiny on a CPU; S, B and XL on a GPU
    "cpu": ((0, (128, 8, 4)),),
    "cuda": ((0, (384, 12, 6)), (100_000, (768, 12, 12)), (1_000_000, (1152, 28, 16))),
}
BATCH_SIZE = {"cpu": 32, "cuda": 256}
BATCHES_AN_EPOCH = 8  # at least, so that small data sets get small batches
STEPS_ON_CPU = 1200  # about ten minutes on two cores
EPOCHS, MIN_STEPS, MAX_STEPS, ROUNDED_TO = 300, 5000, 400_000, 1000
LONG, DECAY, DECAY_OF_SHORT = 10_000, 0.9999, 0.999  # steps; EMA decay of longer and of other trainings
MAX_INTERVAL = 5000


def recipe(key: str, *, _root_: DictConfig) -> Any:
    """Choose the value of a key; a run in `output_dir` that has results keeps its value."""
    if _root_.data.get("_target_") != LATENTS:
        raise ValueError("model/size=auto and ema=latents need data=latents")
    run = RunFolder(_root_.output_dir)
    if run.has_results():
        run.check_complete()
        if key in (saved := flatten(run.config())):
            return saved[key]
    return CHOICES[key](_root_, read_manifest(_root_.data.path))


def patch_size(input_size: int) -> int:
    """Choose the patch size that gives about NUM_TOKENS tokens."""
    sides = [side for side in range(1, input_size + 1) if input_size % side == 0]
    return min(sides, key=lambda side: abs(log((input_size / side) ** 2 / NUM_TOKENS)))


def network(manifest: LatentManifest) -> tuple[int, int, int]:
    """Choose width, depth and heads."""
    return [size for least, size in SIZES[device_type()] if least <= manifest.num_trained][-1]


def batch_size(manifest: LatentManifest) -> int:
    """Choose a power of two, rounded up to a multiple of the number of processes."""
    most = max(1, manifest.num_trained // BATCHES_AN_EPOCH)
    power = min(BATCH_SIZE[device_type()], 1 << (most.bit_length() - 1))
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    return -(-power // num_processes) * num_processes


def total_steps(root: DictConfig, manifest: LatentManifest) -> int:
    """Choose STEPS_ON_CPU on a CPU, or the steps of EPOCHS on a GPU."""
    if device_type() == "cpu":
        return STEPS_ON_CPU
    steps = EPOCHS * manifest.num_trained / root.train.batch_size
    return min(MAX_STEPS, max(MIN_STEPS, round(steps / ROUNDED_TO) * ROUNDED_TO))


def interval(root: DictConfig, times: int) -> int:
    """Divide the training into `times` intervals of at most MAX_INTERVAL steps."""
    return max(1, min(MAX_INTERVAL, root.train.total_steps // times))


def sample_every(root: DictConfig, manifest: LatentManifest) -> int | None:
    """Choose the interval of pictures; None if the encoder would have to be downloaded."""
    return interval(root, 8) if is_local(root.data.encoder or manifest.encoder) else None


CHOICES = {
    "model.patch_size": lambda root, manifest: patch_size(manifest.input_size),
    "model.hidden_size": lambda root, manifest: network(manifest)[0],
    "model.depth": lambda root, manifest: network(manifest)[1],
    "model.num_heads": lambda root, manifest: network(manifest)[2],
    "train.batch_size": lambda root, manifest: batch_size(manifest),
    "train.total_steps": total_steps,
    "train.log_every": lambda root, manifest: min(100, interval(root, 40)),
    "train.save_every": lambda root, manifest: interval(root, 8),
    "train.eval_every": lambda root, manifest: 2 * root.train.save_every,
    "train.sample_every": sample_every,
    "train.num_workers": lambda root, manifest: 4 if device_type() == "cuda" else 0,
    "ema.decay": lambda root, manifest: DECAY if root.train.total_steps > LONG else DECAY_OF_SHORT,
}
