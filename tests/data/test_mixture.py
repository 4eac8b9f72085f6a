"""The mixture: its posterior mean against integration over many draws, and its loss in evaluations."""

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal

from data import MixtureDataset, mixture
from diffusion import EDMLoss, EDMPrecond, OptimalPrecond
from diffusion.flow import FlowLoss, FlowPrecond
from evaluation import DenseLoss, ExcessLoss
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
    (_, evaluator), (_, of_excess) = trainer.evaluators
    first, second = evaluator(2), evaluator(4)
    assert first["val_loss_optimal"] == second["val_loss_optimal"] < first["val_loss_dense_ema"]
    levels = {key.removeprefix("val_loss_optimal") for key in first if key.startswith("val_loss_optimal/")}
    assert len(levels) == 5
    assert all(first[f"val_loss_optimal{level}"] < first[f"val_loss_dense_ema{level}"] for level in levels)
    scores = of_excess(2)
    assert scores.keys() == {f"{key}{level}" for key in of_excess.keys for level in {"", *levels}}
    assert all(scores[f"excess{level}"] > 0 for level in levels)
    gap = first["val_loss_dense_ema"] - first["val_loss_optimal"]
    assert scores["excess"] == pytest.approx(gap, rel=0.3), "the same noise"


def test_the_posterior_mean_of_all_classes_is_that_of_one_class_with_all_components():
    drawn = mixture(**SIZES, num_entries=400, seed=3)
    x_t, times = torch.randn(5, 1, 2, 2), (torch.full((5, 1, 1, 1), value) for value in (0.8, 0.6))
    alpha, sigma = times
    means, stored = drawn.means.reshape(1, -1, 4).numpy(), (drawn.stored, drawn.labels * 0, drawn.manifest)
    merged = MixtureDataset(means, drawn.variances.numpy(), *stored)
    expected = merged.posterior_mean(x_t, alpha, sigma, torch.zeros(5, dtype=int))
    actual = drawn.posterior_mean(x_t, alpha, sigma, None)
    torch.testing.assert_close(actual, expected)
    assert not torch.allclose(actual, drawn.posterior_mean(x_t, alpha, sigma, torch.zeros(5, dtype=int)))


def excess_of(drawn, precond, loss, size=4096):
    ids = range(0, len(drawn.stored), size)
    x, labels = (torch.from_numpy(array) for array in (drawn.stored, drawn.labels))
    batches = [(i, x[i : i + size], labels[i : i + size], None) for i in ids]
    cpu = torch.device("cpu")
    excess = ExcessLoss(drawn.posterior_mean, precond, loss, lambda: iter(batches), lambda s: s, cpu)(0)
    mean = DenseLoss({"loss": precond}, loss, lambda: iter(batches), lambda s: s, cpu)(0)
    return excess, mean["loss"]


def sharpened(drawn, scale):
    """D* + (w - 1) g: classifier-free guidance of the optimal denoiser."""

    def denoised(x_t, alpha, sigma, labels):
        of_class, of_all = (drawn.posterior_mean(x_t, alpha, sigma, given) for given in (labels, None))
        return of_all + scale * (of_class - of_all)

    return OptimalPrecond(denoised, 0.5)


def test_excess_and_sharpening_of_known_denoisers():
    drawn, loss = mixture(**SIZES, num_entries=2**17, seed=0), EDMLoss()
    best, optimum = excess_of(drawn, OptimalPrecond(drawn.posterior_mean, 0.5), loss)
    assert {key.partition("/t=")[0] for key in best} == {"excess", "sharpening"} and len(best) == 12
    assert all(value == pytest.approx(0, abs=1e-5) for value in best.values())
    for scale in (0.5, 2.5):
        scores, value = excess_of(drawn, sharpened(drawn, scale), loss)
        for key in (key for key in scores if key.startswith("sharpening")):
            assert scores[key] == pytest.approx(scale - 1, rel=1e-4)
        assert scores["excess"] == pytest.approx(value - optimum, rel=0.15), "in expectation"
    scores, value = excess_of(drawn, EDMPrecond(lambda x, *_, **__: torch.zeros_like(x)), loss)
    assert scores["excess"] == pytest.approx(value - optimum, rel=0.05)
    levels = [value for key, value in scores.items() if key.startswith("excess/")]
    assert scores["excess"] == pytest.approx(np.mean(levels), rel=0.1)


class VelocityPrecond(FlowPrecond):
    """The optimal denoiser on the path of flow matching, times a factor, as a velocity."""

    def __init__(self, drawn, factor):
        super().__init__(torch.nn.Identity())
        self.drawn, self.factor = drawn, factor

    def predict(self, x, t, class_labels, *, routing=None, generator=None):
        t = t.view(-1, 1, 1, 1)
        best = self.drawn.posterior_mean(x, self.path.alpha(t), self.path.sigma(t), class_labels)
        return (x - self.factor * best) / t, None  # v = (x_t - x_0) / t


def test_the_weight_of_excess_is_the_one_of_the_loss():
    drawn, loss = mixture(**SIZES, num_entries=4096, seed=0), FlowLoss()
    _, optimum = excess_of(drawn, VelocityPrecond(drawn, 1.0), loss)
    scores, value = excess_of(drawn, VelocityPrecond(drawn, 0.5), loss)
    assert scores["excess"] == pytest.approx(value - optimum, rel=0.1)


def test_the_density_of_a_class_is_that_of_its_components():
    drawn = mixture(**SIZES, num_entries=100, seed=3)
    x = torch.from_numpy(drawn.stored[:5])
    basis = np.array([[1, 1], [1, -1]]) / 2**0.5  # the cosines of two pixels
    coefficients = (basis @ drawn.stored[:5, 0].astype(np.float64) @ basis.T).reshape(5, 4)
    covariance = np.diag(drawn.variances.numpy())
    for label, means in enumerate(drawn.means.numpy()):
        components = [multivariate_normal(mean, covariance).pdf(coefficients) for mean in means]
        density = drawn.log_density(x)[:, label].exp().numpy()
        np.testing.assert_allclose(density, np.mean(components, axis=0), rtol=1e-6)
