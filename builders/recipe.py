"""The recipe of data=latents: network, steps and intervals that fit the entries, their shape and the device.

It is chosen when a run is started; a run that has results resumes with what its own config.yaml says, on any
machine. Rules of thumb, not findings: the published recipes are those of data=imagenet256.
"""

import os
from math import log
from typing import Any

from omegaconf import DictConfig

from data.encoders import is_at_hand
from data.manifest import LatentManifest, read_manifest
from runtime.machine import device_type
from runtime.provenance import flatten
from training.run_folder import RunFolder

LATENTS = "data.open_latents"
NUM_TOKENS = 256
# From so many entries on: width, depth, heads; those of tiny on a CPU, of S, B and XL on a GPU.
SIZES = {
    "cpu": ((0, (128, 8, 4)),),
    "cuda": ((0, (384, 12, 6)), (100_000, (768, 12, 12)), (1_000_000, (1152, 28, 16))),
}
BATCH_SIZE = {"cpu": 32, "cuda": 256}
BATCHES_AN_EPOCH = 8  # at least: small sets get small batches
STEPS_ON_CPU = 1200  # about ten minutes of two cores
EPOCHS, MIN_STEPS, MAX_STEPS, ROUNDED_TO = 300, 5000, 400_000, 1000
# Learning rate and betas of AdamW: those of the digits for networks so narrow, else of the published sizes.
NARROW, OF_NARROW, OF_OTHERS = 128, (1e-3, [0.9, 0.99]), (1e-4, [0.9, 0.999])
LONG, DECAY, DECAY_OF_SHORT = 10_000, 0.9999, 0.999  # steps; of the averaged weights
MAX_INTERVAL = 5000


def recipe(key: str, *, _root_: DictConfig) -> Any:
    """The value of a key: the one in the run in `output_dir` if it has results, else one that fits."""
    if _root_.data.get("_target_") != LATENTS:
        raise ValueError("model/size=auto and optimizer=adamw_latents need latents, as those of data=latents")
    run = RunFolder(_root_.output_dir)
    if run.has_results():
        run.check_complete()
        saved = flatten(run.config())
        if key in saved:
            return saved[key]
    return CHOICES[key](_root_, read_manifest(_root_.data.path))


def patch_size(input_size: int) -> int:
    """The side of patches that leaves about NUM_TOKENS of them."""
    sides = [side for side in range(1, input_size + 1) if input_size % side == 0]
    return min(sides, key=lambda side: abs(log((input_size / side) ** 2 / NUM_TOKENS)))


def network(manifest: LatentManifest) -> tuple[int, int, int]:
    """Width, depth and heads."""
    return [size for least, size in SIZES[device_type()] if least <= manifest.num_trained][-1]


def batch_size(manifest: LatentManifest) -> int:
    """A power of two, or the next multiple of the number of processes."""
    most = max(1, manifest.num_trained // BATCHES_AN_EPOCH)
    power = min(BATCH_SIZE[device_type()], 1 << (most.bit_length() - 1))
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    return -(-power // num_processes) * num_processes


def total_steps(root: DictConfig, manifest: LatentManifest) -> int:
    """Minutes of steps on a CPU, EPOCHS on a GPU."""
    if device_type() == "cpu":
        return STEPS_ON_CPU
    steps = EPOCHS * manifest.num_trained / root.train.batch_size
    return min(MAX_STEPS, max(MIN_STEPS, round(steps / ROUNDED_TO) * ROUNDED_TO))


def interval(root: DictConfig, times: int) -> int:
    """An interval that divides the training, except for long ones."""
    return max(1, min(MAX_INTERVAL, root.train.total_steps // times))


def sample_every(root: DictConfig, manifest: LatentManifest) -> int | None:
    """None where the encoder would have to be downloaded: training needs none."""
    return interval(root, 8) if is_at_hand(root.data.encoder or manifest.encoder) else None


def optimizer(root: DictConfig) -> tuple[float, list[float]]:
    """Learning rate and betas."""
    return OF_NARROW if root.model.hidden_size <= NARROW else OF_OTHERS


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
    "optimizer.lr": lambda root, manifest: optimizer(root)[0],
    "optimizer.betas": lambda root, manifest: optimizer(root)[1],
    "ema.decay": lambda root, manifest: DECAY if root.train.total_steps > LONG else DECAY_OF_SHORT,
}
