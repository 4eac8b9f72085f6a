"""The mixture: its posterior mean against integration over many draws, and its loss in evaluations."""

import numpy as np
import pytest
import torch

from data import mixture
from diffusion import EDMLoss, EDMPrecond, OptimalPrecond
from tests.runs import tiny_trainer

SIZES = {"input_size": 2, "in_channels": 1, "num_classes": 2, "num_components": 3, "num_held_out": 8}
TRAINED = ("data=mixture", "data.num_entries=256", "data.num_held_out=64", "train.eval_every=2")


def test_the_mixture_is_a_function_of_its_seed():
    a, b, c = (mixture(**SIZES, num_entries=5000, seed=seed) for seed in (0, 0, 1))
    assert np.array_equal(a.stored, b.stored) and np.array_equal(a.labels, b.labels)
    assert not np.array_equal(a.stored, c.stored)
    of_many = mixture(8, 1, 10, 40, num_entries=5000, num_held_out=0, seed=0)
    assert of_many.stored.std() == pytest.approx(0.5, rel=0.05), "sigma_data of EDM"
    assert len(of_many.train_ids) == 5000 and set(of_many.labels.tolist()) == set(range(10))


@pytest.mark.parametrize(("alpha", "sigma"), [(1.0, 0.3), (0.6, 0.8), (1.0, 5.0)])
def test_the_posterior_mean_matches_many_draws(alpha, sigma):
    """E[x | x_t] is the mean of draws of the class, weighted by the likelihood of x_t."""
    drawn = mixture(**SIZES, num_entries=400_000, seed=3)
    rng = np.random.default_rng(0)
    for label in (0, 1):
        draws = drawn.stored[drawn.labels == label].reshape(-1, 4).astype(np.float64)
        x_t = alpha * draws[:3] + sigma * rng.standard_normal((3, 4))
        log_weights = -((x_t[:, None] - alpha * draws) ** 2).sum(-1) / (2 * sigma**2)
        weights = np.exp(log_weights - log_weights.max(1, keepdims=True))
        expected = (weights @ draws) / weights.sum(1, keepdims=True)
        times = (torch.full((3, 1, 1, 1), value) for value in (alpha, sigma))
        x_t = torch.from_numpy(x_t).view(3, 1, 2, 2)
        actual = drawn.posterior_mean(x_t, *times, torch.full((3,), label)).view(3, 4).numpy()
        np.testing.assert_allclose(actual, expected, atol=0.03)


def test_no_denoiser_has_a_lower_loss_than_the_optimal_one():
    """Nor does a denoiser for another class, or one with small errors in any direction."""
    drawn = mixture(**SIZES, num_entries=20_000, seed=0)
    best, loss = OptimalPrecond(drawn.posterior_mean, 0.5), EDMLoss()
    x, labels = (torch.from_numpy(array) for array in (drawn.stored, drawn.labels))

    def loss_of(precond, labels=labels):
        return loss(precond, x, labels, generator=torch.Generator().manual_seed(0)).mean().item()

    optimum = loss_of(best)
    assert loss_of(best, 1 - labels) > optimum + 0.05
    for factor, shift in ((0.97, 0), (1.03, 0), (1, 0.02), (1, -0.02)):
        off = OptimalPrecond(lambda *a, f=factor, s=shift: f * drawn.posterior_mean(*a) + s, 0.5)
        assert loss_of(off) > optimum
    assert loss_of(EDMPrecond(lambda x, *_, **__: torch.zeros_like(x))) > optimum + 0.05


def test_evaluations_report_the_optimal_loss_of_the_same_noise(tmp_path):
    trainer, _ = tiny_trainer(tmp_path, *TRAINED)
    ((_, evaluator),) = trainer.evaluators
    first, second = evaluator(2), evaluator(4)
    assert first["val_loss_optimal"] == second["val_loss_optimal"] < first["val_loss_dense_ema"]
    levels = {key.removeprefix("val_loss_optimal") for key in first if key.startswith("val_loss_optimal/")}
    assert len(levels) == 5
    assert all(first[f"val_loss_optimal{level}"] < first[f"val_loss_dense_ema{level}"] for level in levels)
