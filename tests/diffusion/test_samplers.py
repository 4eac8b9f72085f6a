import math
from itertools import pairwise

import numpy as np
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


@pytest.mark.parametrize(("S_churn", "gamma"), [(1, 1 / 4), (40, math.sqrt(2) - 1)])
def test_churn_raises_the_noise_of_the_levels_in_its_range(S_churn, gamma):
    """With rho 2 and a denoiser that returns 0, x is proportional to sigma but for the added ones."""
    seen = []

    def denoise(x, sigma):
        seen.append((float(x), float(sigma)))
        return torch.zeros_like(x)

    options = {"num_steps": 4, "sigma_min": 1, "sigma_max": 16, "rho": 2}
    options |= {"S_min": 3, "S_max": 10, "S_noise": 1.5}
    edm_sampler(denoise, torch.ones(1, 1, 1, 1), **options, S_churn=S_churn, randn_like=torch.ones_like)
    x, expected = 16.0, []
    for sigma, sigma_next in pairwise((16, 9, 4, 1, 0)):
        sigma_hat = sigma * (1 + gamma) if sigma in (9, 4) else sigma
        x += 1.5 * math.sqrt(sigma_hat**2 - sigma**2)
        expected.append((x, sigma_hat))
        x *= sigma_next / sigma_hat
        expected += [(x, sigma_next)] if sigma_next else []
    np.testing.assert_allclose(seen, expected)


def test_second_order_convergence():
    noise = torch.linspace(-2, 2, 9, dtype=torch.float64).view(-1, 1, 1, 1)
    # sigma_min near zero, so that the last Euler step adds nothing to the error that is measured.
    options, exact = {"sigma_min": 1e-6, "sigma_max": 10}, exact_solution(noise, 10)
    samples = [edm_sampler(gaussian_denoiser, noise, num_steps=n, **options) for n in (32, 64, 128)]
    errors = [(x - exact).abs().max() for x in samples]
    orders = [math.log2(coarse / fine) for coarse, fine in pairwise(errors)]
    assert all(1.8 < order < 2.4 for order in orders), orders


@pytest.mark.parametrize("num_steps", [1, 2, 18])
def test_number_of_network_evaluations(num_steps):
    sigmas, denoised = [], []

    def denoise(x, sigma):
        assert x.dtype == sigma.dtype == torch.float64
        sigmas.append(float(sigma))
        denoised.append(gaussian_denoiser(x, sigma))
        return denoised[-1]

    x = edm_sampler(denoise, torch.randn(2, 1, 1, 1), num_steps=num_steps)
    torch.testing.assert_close(x, denoised[-1])  # the step to sigma 0 goes all the way
    assert len(sigmas) == 2 * num_steps - 1
    assert sigmas[0] == pytest.approx(80)
    assert min(sigmas) == pytest.approx(0.002 if num_steps > 1 else 80)
