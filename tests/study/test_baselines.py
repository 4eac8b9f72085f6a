"""Baselines are scored by the objective of their task."""

import pytest
import torch

from benchmarks.runs import compose
from builders.evaluators import EVALUATION_BATCH
from data import held_out_batches
from study.baselines import GaussianDenoiser, losses
from study.twins import LOSS


def test_the_gaussians_denoise_on_the_path_of_x0(tmp_path):
    """The mean of |(D - x) / t|^2 at x_t = (1 - t) x + t eps, with the noise of an evaluation."""
    keys = ("model=dit", "data=digits", "data.num_images=300", "diffusion=x0")
    experiment = compose((*keys, f"data.path={tmp_path / 'digits'}"))
    dataset, cpu = experiment.data(), torch.device("cpu")
    latents, labels = dataset.read(dataset.train_ids)
    latents = dataset.manifest.to_latents(latents, torch.Generator())
    gaussians = GaussianDenoiser(latents.numpy(), labels.numpy())
    loss, errors = experiment.loss(experiment.meta_net), []
    for index, x, labels, _ in held_out_batches(dataset, EVALUATION_BATCH, cpu, rank=0, world_size=1):
        noise = torch.Generator().manual_seed(index)
        t = loss.draw_t(len(x), noise, cpu).view(-1, 1, 1, 1)
        x_t = (1 - t) * x + t * torch.randn(x.shape, generator=noise)
        errors.append(((gaussians(x_t, 1 - t, t, labels) - x) / t.clamp(min=0.05)).square())
    expected = torch.cat(errors).mean().item()
    assert losses(experiment, dataset)["class Gaussians"][LOSS] == pytest.approx(expected)
