"""Samples of a network trained on the mixture, judged by the density of the mixture, which is known."""

from functools import partial
from pathlib import Path

import torch

from builders.drawing import TOKENS_AT_ONCE
from builders.sampling import open_run
from data import MixtureDataset
from diffusion import CFG, generate


def density_scores(
    run: Path, step: int, guidance_scale: float, *, seeds: range, num_steps: int
) -> dict[str, float]:
    """Draw a sample from each seed with the classes in turn, and compare them with the mixture.

    Args:
        step: of the checkpoint.
        num_steps: of the run's sampler.
    """
    opened = open_run(run, str(step))
    dataset = opened.experiment.data()
    sampler, guidance = partial(opened.sampler, num_steps=num_steps), CFG(guidance_scale)
    labels = torch.arange(len(seeds)) % dataset.manifest.num_classes
    size = max(1, TOKENS_AT_ONCE // opened.precond.net.num_tokens)
    parts = [slice(start, start + size) for start in range(0, len(seeds), size)]
    draw = partial(generate, opened.precond, sampler, guidance, device=torch.device("cpu"))
    samples = torch.cat([draw(seeds=seeds[part], class_labels=labels[part]) for part in parts])
    return compare(dataset, samples, labels)


def compare(dataset: MixtureDataset, samples: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """Compare samples (N, C, H, W) of classes (N,) with the mixture.

    Returns:
        `perplexity`: exp of the mean of -log p(x | class) per entry of a latent, relative to held-out
        latents. 1: samples are as typical as the data; below 1: nearer to the modes; above 1: farther away.
        `accuracy`: the share of samples whose requested class gives them the highest density.
    """
    stored, classes = dataset.read(dataset.held_out_ids)
    log_p, real_log_p = dataset.log_density(samples), dataset.log_density(stored)  # (N, num_classes)
    sampled = log_p.gather(1, labels[:, None]).mean()
    real = real_log_p.gather(1, classes[:, None]).mean()
    accuracy = (log_p.argmax(dim=1) == labels).double().mean()
    return {"perplexity": ((real - sampled) / samples[0].numel()).exp().item(), "accuracy": accuracy.item()}
