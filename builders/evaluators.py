"""Evaluators of a training: pictures, the held-out loss, scores of samples."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.nn as nn

from builders.auto import Resolved
from builders.drawing import is_worth_compiling, prepare
from builders.experiment import Experiment, TrainingData
from builders.sampling import open_run
from builders.scoring import build_suite, reference_of
from data import (
    MixtureDataset,
    encoder_for,
    held_out_batches,
    image_decoder,
    open_images,
)
from diffusion import EDMPrecond, ImageSource, OptimalPrecond
from diffusion.generate import cost_of_evaluations
from evaluation import DenseLoss, SampleGrid, Suite, open_reference
from runtime.launch import Launch
from training.recorder import LEVEL
from training.run_folder import RunFolder

GRID_SAMPLES, GRID_COLUMNS = 10, 10
MAX_CLASSES_SHOWN = 100  # all of them; of more the first ten
EVALUATION_BATCH = 64


def build_evaluators(
    experiment: Experiment,
    run: RunFolder,
    dataset: TrainingData,
    launch: Launch,
    net: nn.Module,
    ema_net: nn.Module,
    loss: Any,
    resolved: Resolved,
) -> list[tuple[int, Any]]:
    """Build pairs (interval in steps, evaluator)."""
    settings, device, scored = experiment.train, launch.device, experiment.evaluation
    share = {"rank": launch.rank, "world_size": launch.world_size}
    # Around the networks themselves: no DDP, no autocast.
    denoiser, ema_denoiser = (experiment.precond(n) for n in (net, ema_net))
    evaluators = []
    if settings.sample_every or scored:  # otherwise the encoder need not be there
        source, encoder = _image_source(experiment, dataset, launch, ema_denoiser, resolved)
    if settings.sample_every:
        num_samples, columns = grid_of(len(dataset.manifest.trained_classes))
        grid = SampleGrid(source, run.path / "samples", num_samples, columns, write=launch.is_main)
        evaluators.append((settings.sample_every, grid))
    if settings.eval_every and len(dataset.held_out_ids):
        share["with_masks"] = settings.masked_loss
        batches = partial(held_out_batches, dataset, EVALUATION_BATCH, device, **share)
        denoisers = {"val_loss_dense": denoiser, "val_loss_dense_ema": ema_denoiser}
        if isinstance(dataset, MixtureDataset) and isinstance(denoiser, EDMPrecond):
            denoisers["val_loss_optimal"] = OptimalPrecond(dataset.posterior_mean, denoiser.sigma_data)
        by_level = [key for key in denoisers if key != "val_loss_dense"]
        dense_loss = DenseLoss(denoisers, loss, batches, launch.sum, device, by_level)
        evaluators.append((settings.eval_every, dense_loss))
    if settings.eval_every and scored:
        path = scored.arguments.get("reference")
        reference = (
            open_reference(Path(path), open_images) if path else reference_of(dataset, encoder, "data")
        )
        suite = build_suite(scored, reference, launch, source, run.path / "features")
        evaluators.append((settings.eval_every, suite))
        if resolved.compile and is_worth_compiling(source, suite.num_samples):
            prepare(source)
    return evaluators


def check_sweep_metric(metric: str | None, evaluators: Sequence[tuple[int, Any]]) -> None:
    """Check that a run has the number that a sweeper waits for."""
    scoring = [each for _, each in evaluators if not isinstance(each, SampleGrid)]
    known = ["loss", *(key for each in scoring for key in each.keys)]
    if metric is not None and metric.partition(LEVEL)[0] not in known:
        raise ValueError(f"sweep_metric={metric} must be one of what the run logs: {', '.join(known)}")


def drawing_flops(evaluators: Sequence[tuple[int, Any]]) -> float:
    """FLOPs of the samples drawn while training, for each step."""
    flops = 0.0
    for interval, evaluator in evaluators:
        if isinstance(evaluator, SampleGrid | Suite):
            of_image = cost_of_evaluations(evaluator.source.count_evaluations(), 1)["flops"]
            flops += evaluator.num_samples * of_image / interval
    return flops


def grid_of(num_classes: int) -> tuple[int, int]:
    """Samples and columns of a training's pictures: about ten samples, each of up to 100 classes as often."""
    if not 0 < num_classes <= MAX_CLASSES_SHOWN:
        return GRID_SAMPLES, GRID_COLUMNS
    columns = GRID_COLUMNS // num_classes * num_classes or GRID_COLUMNS
    return num_classes * max(1, round(GRID_SAMPLES / num_classes)), columns


def _image_source(
    experiment: Experiment,
    dataset: TrainingData,
    launch: Launch,
    denoiser: nn.Module,
    resolved: Resolved,
) -> tuple[ImageSource, Any]:
    official = experiment.decoding == "official"
    try:
        encoder = encoder_for(dataset.manifest, launch.device, dataset.encoder, official=official)
    except ValueError as error:
        raise ValueError(f"{error}. To train without: train.sample_every=null evaluation=none") from error
    sampler = experiment.sampler()
    guidance = experiment.guidance(lambda run, checkpoint: open_run(run, checkpoint, launch=launch).precond)
    decode = image_decoder(dataset.manifest, encoder, official)
    options = {"batch_size": EVALUATION_BATCH, "launch": launch, "bf16": resolved.bf16}
    options |= {"class_names": dataset.manifest.class_names, "classes": dataset.manifest.trained_classes}
    return ImageSource(denoiser, sampler, guidance, decode, **options), encoder
