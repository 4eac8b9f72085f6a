"""Samples of the mixture, judged by its density."""

from functools import partial

import pytest
import torch

from data import mixture
from diffusion import CFG, OptimalPrecond, edm_sampler, generate
from study.density import compare, density_scores
from tests.runs import tiny_run

NULL = -1  # the null class
LATENTS = {"input_size": 8, "in_channels": 1, "num_classes": 10, "num_components": 4, "num_held_out": 2048}


class Net(torch.nn.Module):
    """The shape and the null class of a network."""

    latent_shape, routes, class_dropout_prob = (1, 8, 8), (), 0.1

    def null_labels(self, num):
        return torch.full((num,), NULL)


@pytest.fixture(scope="module")
def drawn():
    return mixture(**LATENTS, num_entries=8192, seed=0)


def sampled(drawn, scale):
    """Scores of samples of the optimal denoiser with guidance, of the classes in turn."""

    def denoised(x_t, alpha, sigma, labels):
        return drawn.posterior_mean(x_t, alpha, sigma, None if labels[0] == NULL else labels)

    labels, precond = torch.arange(500) % 10, OptimalPrecond(denoised, 0.5)
    precond.net = Net()
    sampler, cpu = partial(edm_sampler, num_steps=40), torch.device("cpu")
    samples = generate(precond, sampler, CFG(scale), seeds=range(500), class_labels=labels, device=cpu)
    return compare(drawn, samples, labels)


def test_optimal_samples_are_as_typical_as_the_data_and_guided_ones_less(drawn):
    stored, labels = drawn.read(drawn.train_ids)
    real = compare(drawn, stored, labels)
    assert real == {"perplexity": pytest.approx(1, abs=0.01), "accuracy": 1.0}
    assert sampled(drawn, 1) == pytest.approx(real, abs=0.03)
    guided, weak = sampled(drawn, 2), sampled(drawn, 0.5)
    assert guided["perplexity"] > 1.3 and guided["accuracy"] == 1
    assert weak["perplexity"] > 1.1 and weak["accuracy"] < 0.8
    assert compare(drawn, stored, (labels + 1) % 10)["accuracy"] == 0
    assert compare(drawn, stored + 0.3 * torch.randn(stored.shape), labels)["perplexity"] > 1.2
    far = drawn.log_density(stored).amax(dim=1) < drawn.log_density(stored).amax(dim=1).median()
    assert compare(drawn, stored[~far], labels[~far])["perplexity"] < 0.95, "nearer to the modes"


def test_a_run_is_judged_with_and_without_guidance(tmp_path):
    run = tmp_path / "run"
    tiny_run(run, "data=mixture", "data.num_entries=256", "data.num_held_out=64", "train.total_steps=2")

    def scores(scale, first_seed=0):
        return density_scores(run, 2, scale, seeds=range(first_seed, first_seed + 20), num_steps=10)

    unguided = scores(1)
    assert unguided == scores(1) != scores(3) and unguided != scores(1, 20)
