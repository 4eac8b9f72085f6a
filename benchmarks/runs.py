"""Build the trainers that benchmarks time: as train.py builds them, on a folder of random latents."""

import io
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn as nn

from builders.experiment import Experiment
from builders.trainer import build_trainer
from data import LatentManifest, LatentWriter
from models import cost_of
from runtime.config import user_mistakes
from runtime.machine import start_process
from training.run_folder import RunFolder
from training.speed import fp32_slowdown
from training.trainer import Trainer

NUM_CLASSES, IN_CHANNELS = 1000, 4
ROUTED_KEYS = ("model/routes", "model.routes", "routing.")  # removed for a dense twin
# Timed steps do not log, save or evaluate.
QUIET = ("train.total_steps=10000", "train.log_every=1000", "train.eval_every=null")
QUIET += ("train.sample_every=null", "evaluation=none")


@dataclass(frozen=True)
class Setting:
    """A comparison of training steps."""

    name: str
    overrides: tuple[str, ...]  # of train.py
    input_size: int = 32  # side of the latents
    mask_coverage: float | None = None  # fraction of the tokens; None trains without masks
    plain: bool = False  # also time the plain step
    check: bool = True  # first compare loss and gradients with the plain step's


def overrides_of(setting: Setting, kind: str, folder: Path) -> tuple[str, ...]:
    """Return the overrides of the dense or the routed run of a setting."""
    overrides = setting.overrides
    if kind == "dense":
        overrides = tuple(override for override in overrides if not override.startswith(ROUTED_KEYS))
    if setting.mask_coverage is not None:
        overrides += ("train.masked_loss=true",)
    model = "model=dit" if kind == "dense" else "model=tread"
    return (model, "data=latents_published", f"data.path={folder / 'latents'}", *QUIET, *overrides)


def write_latents(path: Path, setting: Setting) -> None:
    """Write random moments, and masks that cover the upper part of each image if the setting has masks."""
    count, side = 512 * 32 // max(32, setting.input_size), setting.input_size
    rng, masks = np.random.default_rng(0), None
    stored = rng.standard_normal((count, 2 * IN_CHANNELS, side, side), dtype=np.float32)
    stored[:, IN_CHANNELS:] = -10  # log of a small variance
    if setting.mask_coverage is not None:
        masks = np.zeros((count, side, side), np.uint8)
        masks[:, : round(side * setting.mask_coverage)] = 255
    kind = None if masks is None else "mask"
    stored_as = (stored.shape[1:], "float16", "moments")
    manifest = LatentManifest(count, *stored_as, NUM_CLASSES, "benchmark", scale=0.5, conditioning_type=kind)
    with LatentWriter(path, manifest) as writer:
        writer.append(stored, rng.integers(NUM_CLASSES, size=count), masks)


def compose(overrides: Sequence[str]) -> Experiment:
    """Compose the experiment that train.py would run with these overrides."""
    with user_mistakes():
        return Experiment.compose(["run_name=benchmark", *overrides]).check()


def build(folder: Path, overrides: Sequence[str]) -> tuple[Trainer, dict[str, Any]]:
    """Build the trainer that train.py would build, in a new subfolder. Return it and its columns."""
    experiment = compose(overrides)
    run, dataset = RunFolder(tempfile.mkdtemp(dir=folder)), experiment.data()
    with redirect_stdout(io.StringIO()):  # the summary of a run
        trainer = build_trainer(experiment, run, dataset, start_process())
    coverage = experiment.mask_coverage(dataset)
    return trainer, describe(trainer.net, run.manifest()["resolved"], experiment, coverage)


def describe(
    net: nn.Module, resolved: dict[str, Any], experiment: Experiment, coverage: float
) -> dict[str, Any]:
    """Return the columns that describe a trainer. FLOPs exclude what checkpointing recomputes."""
    unchecked = experiment.with_model({"gradient_checkpointing": False})
    cost, batch_size = cost_of(unchecked.meta_net, mask_coverage=coverage), experiment.train.batch_size
    slowdown = fp32_slowdown(net, next(net.parameters()).device, bf16=resolved["mixed_precision"] == "bf16")
    chosen = ("micro_batch_size", "mixed_precision", "compile", "keep_freed_memory")
    routes = [f"{r.start_layer_idx}-{r.end_layer_idx}:{r.selection_ratio:g}" for r in net.routes]
    return {
        "parameters": cost.num_parameters,
        "num_tokens": net.num_tokens,
        "routes": " ".join(routes),
        "batch_size": batch_size,
        **{key: resolved[key] for key in chosen},
        "gradient_checkpointing": experiment.model_node.arguments["gradient_checkpointing"],
        "model_tflop": batch_size * cost.routed_training_flops / 1e12,
        "predicted_speedup": cost_of(net, None, coverage, slowdown).predicted_speedup if net.routes else None,
    }


@torch.no_grad()
def perturb(net: nn.Module) -> None:
    """Randomise weights that start at zero, because they would hide most of the network."""
    torch.manual_seed(0)
    for parameter in net.parameters():
        if not parameter.any():
            parameter.normal_(std=0.05)
