import math
from itertools import pairwise

import pytest
import torch

from diffusion import edm_sampler

MEAN, STD = 0.3, 0.5


def gaussian_denoiser(x, sigma):
    """E[y | y + sigma n = x] for y ~ N(MEAN, STD^2)."""
    return (STD**2 * x + sigma**2 * MEAN) / (STD**2 + sigma**2)


def exact_solution(noise, sigma_max):
    """The probability flow of a Gaussian is linear: it maps x(sigma_max) to sigma = 0 in closed form."""
    return MEAN + STD / math.sqrt(STD**2 + sigma_max**2) * (noise.double() * sigma_max - MEAN)


def test_variance_and_mean_of_gaussian_data():
    noise = torch.randn(20_000, 1, 1, 1, generator=torch.Generator().manual_seed(0))
    x = edm_sampler(gaussian_denoiser, noise, num_steps=40)
    assert x.dtype == torch.float64
    assert abs(x.mean() - MEAN) < 0.015
    assert abs(x.std() - STD) < 0.015


def test_churn_keeps_the_distribution_and_draws_its_noise():
    noise = torch.randn(20_000, 1, 1, 1, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)

    def randn_like(x):
        return torch.randn(x.shape, generator=generator, dtype=x.dtype)

    churn = {"S_churn": 20, "S_min": 0.05, "S_max": 50, "S_noise": 1.0}
    x = edm_sampler(gaussian_denoiser, noise, num_steps=80, **churn, randn_like=randn_like)
    assert abs(x.std() - STD) < 0.02
    assert not torch.allclose(x, edm_sampler(gaussian_denoiser, noise, num_steps=80))
    assert torch.equal(
        edm_sampler(gaussian_denoiser, noise, num_steps=18, S_churn=40, S_min=100),
        edm_sampler(gaussian_denoiser, noise, num_steps=18),
    )


def test_second_order_convergence():
    noise = torch.linspace(-2, 2, 9, dtype=torch.float64).view(-1, 1, 1, 1)
    # sigma_min near zero, so that the last Euler step adds nothing to the error that is measured.
    errors = [
        (edm_sampler(gaussian_denoiser, noise, num_steps=n, sigma_min=1e-6, sigma_max=10) - exact_solution(noise, 10))
        .abs()
        .max()
        for n in (32, 64, 128)
    ]
    orders = [math.log2(coarse / fine) for coarse, fine in pairwise(errors)]
    assert all(1.8 < order < 2.4 for order in orders), orders


@pytest.mark.parametrize("num_steps", [1, 2, 18])
def test_number_of_network_evaluations(num_steps):
    sigmas = []

    def denoise(x, sigma):
        sigmas.append(float(sigma))
        return gaussian_denoiser(x, sigma)

    edm_sampler(denoise, torch.randn(2, 1, 1, 1), num_steps=num_steps)
    assert len(sigmas) == 2 * num_steps - 1
    assert sigmas[0] == pytest.approx(80)
    assert min(sigmas) == pytest.approx(0.002 if num_steps > 1 else 80)
