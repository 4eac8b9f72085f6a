"""Samplers on data whose optimal denoiser is known: samples have the moments of the data."""

import math
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch

from diffusion import DDPMPath, EDMPath, FlowPath
from diffusion.samplers import adaptive_sampler, ddpm_sampler, edm_sampler, ode_sampler, sde_sampler
from diffusion.samplers.times import iddpm_times, respaced_times, rho_times, uniform_times, ve_times, vp_times

PATHS = {"edm": EDMPath(), "flow": FlowPath(), "ddpm": DDPMPath()}
WEIGHTS, MEANS, STDS = (torch.tensor(v, dtype=torch.float64) for v in ([0.3, 0.7], [-1.0, 0.6], [0.2, 0.3]))
POINTS = [torch.tensor(v, dtype=torch.float64) for v in ([0.5, 0.5], [-1.0, 1.0], [0.0, 0.0])]


def mixture(path, weights=WEIGHTS, means=MEANS, stds=STDS):
    """Return the exact denoiser E[x_0 | x_t] of two Gaussians."""

    def denoise(x, t, *, with_variance=False):
        alpha, sigma = path.alpha(t), path.sigma(t)
        variance = alpha**2 * stds**2 + sigma**2
        apart = x.unsqueeze(-1) - alpha * means
        share = (weights.log() - variance.log() / 2 - apart**2 / (2 * variance)).softmax(-1)
        D_x = (share * (means + alpha * stds**2 / variance * apart)).sum(-1)
        return (D_x, torch.full_like(D_x, -1)) if with_variance else D_x

    return denoise


NEAR_DATA = partial(uniform_times, t_min=0.002, t_max=0.98)
rho = partial(ode_sampler, num_steps=60, times=rho_times)
SAMPLERS = {
    "edm": partial(edm_sampler, num_steps=60),
    "edm, churn": partial(edm_sampler, num_steps=80, S_churn=20),
    "euler": partial(ode_sampler, num_steps=250, times=rho_times, solver="euler"),
    "heun": rho,
    "heun, midpoint": partial(rho, midpoint=0.5),
    "heun, churn": partial(rho, num_steps=80, S_churn=20),
    "vp": partial(ode_sampler, num_steps=100, times=vp_times, solve_on="vp"),
    "ve": partial(ode_sampler, num_steps=100, times=ve_times, solve_on="ve"),
    "iddpm": partial(rho, times=iddpm_times, solve_on="edm"),
    "on flow": partial(rho, solve_on="flow"),
    "on flow, uniform": partial(ode_sampler, num_steps=60, solve_on="flow"),
    "on flow, churn": partial(ode_sampler, num_steps=80, solve_on="flow", S_churn=20),
    "sde, as configured": partial(sde_sampler, times=partial(uniform_times, t_min=0.01)),
    "dopri5": partial(adaptive_sampler, t_min=1e-4),
    "ddpm, learned": partial(ddpm_sampler, num_steps=300),
    "ddpm, small": partial(ddpm_sampler, num_steps=300, variance="small"),
    "ddpm, large": partial(ddpm_sampler, num_steps=300, variance="large"),
}
sde = partial(sde_sampler, num_steps=250, times=NEAR_DATA, last_step="denoised")
for name in ("constant", "sbdm", "sigma", "linear", "decreasing", "increasing_decreasing"):
    SAMPLERS[f"sde, {name}"] = partial(sde, coefficient=name)


def _randn_like(x, generator):
    return torch.randn(x.shape, generator=generator, dtype=x.dtype)


def drawn(name, path, num_samples, *data):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(num_samples, 1, 1, 1, generator=generator)
    randn_like = partial(_randn_like, generator=generator)
    return SAMPLERS[name](mixture(path, *data), noise, path, randn_like=randn_like).flatten()


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("name", SAMPLERS)
def test_any_sampler_draws_a_mixture_from_a_network_of_any_path(name, path):
    x = drawn(name, path, 4000)
    assert x.dtype == torch.float64
    mean = (WEIGHTS * MEANS).sum()
    std = ((WEIGHTS * (STDS**2 + MEANS**2)).sum() - mean**2).sqrt()
    third = (WEIGHTS * ((MEANS - mean) ** 3 + 3 * (MEANS - mean) * STDS**2)).sum()
    # 4,000 draws: the standard error of the mean is 0.012, of the third moment 0.012.
    assert x.mean().item() == pytest.approx(mean.item(), abs=0.045)
    assert x.std().item() == pytest.approx(std.item(), rel=0.04)
    assert ((x - x.mean()) ** 3).mean().item() == pytest.approx(third.item(), abs=0.06)
    assert (x < -0.4).double().mean().item() == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize("name", SAMPLERS)
def test_any_sampler_draws_two_points(name):
    """The data are -1 and 1: no sample lies between them."""
    x = drawn(name, FlowPath(), 1000, *POINTS)
    assert x.abs().mean().item() == pytest.approx(1, abs=0.01)
    assert x.abs().std() < (0.12 if name == "sde, as configured" else 0.06)  # "mean" leaves some noise
    assert (x > 0).double().mean().item() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("solver, order", [("euler", 1), ("heun", 2)])
def test_solvers_have_their_order(path, solver, order):
    """The flow of a Gaussian is known: x_t / std(x_t) is constant."""
    noise = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    denoise = mixture(path, *torch.tensor([[1.0], [0.0], [0.5]], dtype=torch.float64))
    first = torch.tensor(0.9 * path.t_max, dtype=torch.float64)
    times = partial(uniform_times, t_max=first.item(), t_min=0.3 * path.t_max)

    def std(t):
        return (path.alpha(t) ** 2 * 0.25 + path.sigma(t) ** 2).sqrt()

    def error(num_steps):
        seen = []
        record = lambda x, t: seen.append((x, t)) or denoise(x, t)  # noqa: E731
        ode_sampler(record, noise, path, num_steps=num_steps, times=times, solver=solver)
        x, t = seen[-1]
        return (x - path.sigma(first) / std(first) * std(t)).abs().item()

    assert math.log2(error(33) / error(65)) == pytest.approx(order, abs=0.25)


@pytest.mark.parametrize(("S_churn", "gamma"), [(1, 1 / 4), (40, math.sqrt(2) - 1)])
def test_churn_raises_the_noise_of_the_levels_in_its_range(S_churn, gamma):
    """With rho 2 and a denoiser that returns 0, x is proportional to sigma, except for the added noise."""
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


@pytest.mark.parametrize("num_steps", [1, 2, 18])
def test_edm_evaluates_from_the_first_level_down_to_the_data(num_steps):
    sigmas, denoised = [], []

    def denoise(x, sigma):
        assert x.dtype == sigma.dtype == torch.float64
        sigmas.append(float(sigma))
        denoised.append(0.5 * x)
        return denoised[-1]

    x = edm_sampler(denoise, torch.randn(2, 1, 1, 1), num_steps=num_steps)
    torch.testing.assert_close(x, denoised[-1])  # the step to sigma 0 ends at D_x
    assert len(sigmas) == 2 * num_steps - 1
    assert sigmas[0] == pytest.approx(80)
    assert min(sigmas) == pytest.approx(0.002 if num_steps > 1 else 80)


@pytest.mark.parametrize("path", [EDMPath(), FlowPath()], ids=["edm", "flow"])
@pytest.mark.parametrize("S_churn", [0, 20])
def test_edm_is_a_special_case_of_the_general_sampler(path, S_churn):
    noise = torch.randn(8, 1, 2, 2)

    def draw(sampler):
        generator = torch.Generator().manual_seed(1)
        randn_like = partial(_randn_like, generator=generator)
        return sampler(mixture(path), noise, path, num_steps=20, S_churn=S_churn, randn_like=randn_like)

    general = partial(ode_sampler, times=rho_times, solve_on="edm")
    torch.testing.assert_close(draw(general), draw(edm_sampler), rtol=1e-9, atol=1e-9)


def test_samplers_evaluate_the_network_as_often_as_documented():
    euler, small = partial(ode_sampler, solver="euler"), partial(ddpm_sampler, variance="small")
    for sampler, count in ((euler, 7), (ode_sampler, 13), (sde_sampler, 7), (small, 7)):
        times = []
        sampler(lambda x, t: times.append(t) or 0 * x, torch.zeros(1, 1, 1, 1), FlowPath(), num_steps=7)  # noqa: B023
        assert len(times) == count


def test_respaced_steps_are_as_in_iddpm():
    """Indices start at 0 and advance by 999 / (n - 1), rounded half to even."""
    for num_steps in range(2, 1001):
        index, kept = 0.0, []
        for _ in range(num_steps):
            kept.append(round(index))
            index += 999 / (num_steps - 1)
        assert respaced_times(DDPMPath(), num_steps).tolist() == [1.0 + k for k in reversed(kept)], num_steps
    assert respaced_times(DDPMPath(), 1).tolist() == [1000]  # DEVIATION
    with pytest.raises(ValueError, match="num_steps=1001 must be in"):
        respaced_times(DDPMPath(), 1001)


def test_levels_are_as_in_table_1_of_edm():
    edm = EDMPath()
    t = 1 + torch.arange(18, dtype=torch.float64) / 17 * (1e-3 - 1)
    vp = (torch.exp(19.9 / 2 * t**2 + 0.1 * t) - 1).sqrt()
    torch.testing.assert_close(vp_times(edm, 18), vp, rtol=1e-9, atol=1e-12)
    ve = (100**2 * (0.02**2 / 100**2) ** (torch.arange(18, dtype=torch.float64) / 17)).sqrt()
    torch.testing.assert_close(ve_times(edm, 18), ve)
    assert ve_times(FlowPath(), 2).tolist() == pytest.approx([100 / 101, 0.02 / 1.02])
    iddpm = iddpm_times(edm, 18)
    assert (iddpm.diff() < 0).all() and iddpm[-1] > 0
    # The last level of the cosine schedule: u_999 of sin^2.
    alpha = [math.sin(math.pi / 2 * j / (1000 * 1.008)) ** 2 for j in (999, 1000)]
    assert iddpm_times(edm, 2)[1].item() == pytest.approx(math.sqrt(alpha[1] / alpha[0] - 1), rel=1e-6)


def test_shifted_times_move_towards_noise():
    plain, shifted = (uniform_times(FlowPath(), 4, shift=s) for s in (1, 3))
    assert plain.tolist() == [1, 0.75, 0.5, 0.25]
    assert shifted.tolist() == pytest.approx([1, 0.9, 0.75, 0.5])
    assert uniform_times(FlowPath(), 4, t_min=0.04, shift=3)[-1].item() == pytest.approx(0.04)
