"""Build the evaluators of a training: pictures, the held-out loss, scores of samples."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.nn as nn

from builders.auto import Resolved
from builders.drawing import Drawing, DrawOptions, ImageModel
from builders.experiment import Experiment
from builders.references import reference_of
from builders.sampling import open_run, text_condition
from builders.scoring import build_suite
from data import LatentDataset, MixtureDataset, encoder_for, held_out_batches, image_decoder, open_images
from diffusion import EDMPrecond, OptimalPrecond, Precond
from evaluation import DenseLoss, ExcessLoss, SampleGrid, ScoreSamples, open_reference
from runtime.launch import Launch
from training.recorder import LEVEL
from training.run_folder import RunFolder

GRID_SAMPLES, GRID_COLUMNS = 10, 10
MAX_CLASSES_SHOWN = 100  # with more classes, pictures show the first ten
EVALUATION_BATCH = 64


def build_evaluators(
    experiment: Experiment,
    run: RunFolder,
    dataset: LatentDataset,
    launch: Launch,
    net: nn.Module,
    ema_net: nn.Module,
    loss: Any,
    resolved: Resolved,
) -> list[tuple[int, Any]]:
    """Build pairs (interval in steps, evaluator)."""
    settings, device, scored = experiment.train, launch.device, experiment.evaluation
    share = {"rank": launch.rank, "world_size": launch.world_size}
    # Without DDP and autocast.
    denoiser, ema_denoiser = experiment.precond(net), experiment.precond(ema_net)
    evaluators, model, encoder = [], None, None
    if settings.sample_every or scored:  # otherwise the encoder is not needed
        model, encoder = _image_model(experiment, dataset, launch, ema_denoiser)
    if settings.sample_every and model:
        num_samples, columns = grid_of(0 if experiment.takes_text else len(dataset.manifest.trained_classes))
        options = DrawOptions(num_samples, EVALUATION_BATCH, mixed_precision=resolved.mixed_precision)
        grid = SampleGrid(Drawing(model, options), run.path / "samples", columns, launch)
        evaluators.append((settings.sample_every, grid))
    if settings.eval_every and len(dataset.held_out_ids):
        share |= {"with_masks": settings.masked_loss, "with_text": experiment.takes_text}
        batches = partial(held_out_batches, dataset, EVALUATION_BATCH, device, **share)
        denoisers = {"val_loss_dense": denoiser, "val_loss_dense_ema": ema_denoiser}
        if isinstance(dataset, MixtureDataset) and isinstance(denoiser, EDMPrecond):
            denoisers["val_loss_optimal"] = OptimalPrecond(dataset.posterior_mean, denoiser.sigma_data)
        by_level = [key for key in denoisers if key != "val_loss_dense"]
        dense_loss = DenseLoss(denoisers, loss, batches, launch.sum, device, by_level)
        evaluators.append((settings.eval_every, dense_loss))
        if isinstance(dataset, MixtureDataset):
            excess = ExcessLoss(dataset.posterior_mean, ema_denoiser, loss, batches, launch.sum, device)
            evaluators.append((settings.eval_every, excess))
    if settings.eval_every and scored and model:
        path = scored.arguments.get("reference")
        reference = (
            open_reference(Path(path), open_images) if path else reference_of(dataset, encoder, "data")
        )
        suite = build_suite(scored, reference, launch, run.path / "features")
        compiled = resolved.compile and model.is_worth_compiling(suite.num_samples)
        # Before the first step: the grid of samples uses the same networks.
        model = model.compiled if compiled else model
        values: dict[str, Any] = {"mixed_precision": resolved.mixed_precision, "compile": compiled}
        options = DrawOptions(suite.num_samples, EVALUATION_BATCH, labels=suite.labels, **values)
        scores = ScoreSamples(suite, Drawing(model, options), run.path / "features/samples")
        evaluators.append((settings.eval_every, scores))
    return evaluators


def check_sweep_metric(metric: str | None, evaluators: Sequence[tuple[int, Any]]) -> None:
    """Check that a run logs the metric of a sweep."""
    scoring = [evaluator for _, evaluator in evaluators if not isinstance(evaluator, SampleGrid)]
    known = ["loss", *(key for evaluator in scoring for key in evaluator.keys)]
    if metric is not None and metric.partition(LEVEL)[0] not in known:
        raise ValueError(f"sweep_metric={metric} must be a metric of the run: {', '.join(known)}")


def grid_of(num_classes: int) -> tuple[int, int]:
    """Return samples and columns of pictures: about ten samples; up to 100 classes appear equally often."""
    if not 0 < num_classes <= MAX_CLASSES_SHOWN:
        return GRID_SAMPLES, GRID_COLUMNS
    columns = GRID_COLUMNS // num_classes * num_classes or GRID_COLUMNS
    return num_classes * max(1, round(GRID_SAMPLES / num_classes)), columns


def _image_model(
    experiment: Experiment, dataset: LatentDataset, launch: Launch, denoiser: Precond
) -> tuple[ImageModel, Any]:
    manifest, official = dataset.manifest, experiment.decoding == "official"
    condition: tuple[Any, ...] = (manifest.trained_classes, manifest.class_names)
    try:
        encoder = encoder_for(manifest, launch.device, dataset.encoder, official=official)
        if experiment.takes_text:
            condition = text_condition(manifest, launch.device)
    except ValueError as error:
        raise ValueError(f"{error}. To train without: train.sample_every=null evaluation=none") from error
    guidance = experiment.guidance(lambda run, checkpoint: open_run(run, checkpoint, launch=launch).precond)
    decode = image_decoder(manifest, encoder, official)
    parts = (denoiser, experiment.sampler(), guidance, decode, launch.device)
    return ImageModel(*parts, *condition), encoder
