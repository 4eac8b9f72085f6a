"""Objectives against closed forms, on every path."""

import math
from functools import partial

import pytest
import torch

from diffusion import EDMLoss, EDMPrecond, FlowLoss, FlowPrecond, X0Loss, X0Precond, respaced_times
from diffusion.ddpm import DDPMLoss, DDPMPath, DDPMPrecond, variational_bound
from diffusion.path import EDMPath, FlowPath, VEPath, VPPath, on_path
from diffusion.samplers.ode import ode_sampler, velocity
from tests.networks import Field, seeded, small_batch, small_dit

PATHS = {"edm": EDMPath(), "flow": FlowPath(), "ddpm": DDPMPath(), "vp": VPPath(), "ve": VEPath()}
MEAN, STD = 0.3, 0.5  # the data of these tests: one Gaussian


def best(path, x, t):
    """E[x_0 | x_t]."""
    alpha, sigma = path.alpha(t), path.sigma(t)
    return MEAN + alpha * STD**2 / (alpha**2 * STD**2 + sigma**2) * (x - alpha * MEAN)


def edm_output(clean):
    def write(x_in, c_noise):
        sigma = (4 * c_noise).exp()
        scale = (sigma**2 + 0.25).sqrt()
        x = x_in * scale
        return (clean(x, sigma) - 0.25 / scale**2 * x) * scale / (sigma * 0.5)

    return write


def ddpm_output(clean):
    def write(x, index):
        path, t = DDPMPath(), index + 1
        return (x - path.alpha(t) * clean(x, t)) / path.sigma(t)

    return write


# Preconditioning, loss, and the output of a network that predicts clean(x_t, t).
OBJECTIVES = {
    "edm": (EDMPrecond, EDMLoss, edm_output),
    "flow": (FlowPrecond, FlowLoss, lambda clean: lambda x, t: (x - clean(x, t)) / t),
    "from_noise": (
        partial(FlowPrecond, from_noise=True),
        FlowLoss,
        lambda clean: lambda x, u: (clean(x, 1 - u) - x) / (1 - u),
    ),
    "x0": (X0Precond, X0Loss, lambda clean: clean),
    "ddpm": (DDPMPrecond, DDPMLoss, ddpm_output),
}
BEST_PATHS = {"edm": EDMPath(), "ddpm": DDPMPath()}
PRECONDS = {
    name: make_precond(Field(output(partial(best, BEST_PATHS.get(name, FlowPath())))))
    for name, (make_precond, _, output) in OBJECTIVES.items()
}


@pytest.mark.parametrize("name", PATHS)
def test_a_path_agrees_with_its_derivatives_and_its_inverse(name):
    path = PATHS[name]
    t = torch.linspace(0.00317, 0.9973, 17, dtype=torch.float64) * path.t_max
    h = 1e-6 * t
    for value, slope in ((path.alpha, path.alpha_dot), (path.sigma, path.sigma_dot)):
        difference = (value(t + h) - value(t - h)) / (2 * h)
        torch.testing.assert_close(slope(t), difference, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(path.time_at(path.sigma(t) / path.alpha(t)), t, rtol=1e-9, atol=1e-9)


def test_the_schedule_of_ddpm_is_as_in_the_paper():
    products = (1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)).cumprod(0)
    t = torch.arange(1, 1001, dtype=torch.float64)
    torch.testing.assert_close(DDPMPath().alpha(t) ** 2, products)
    torch.testing.assert_close(DDPMPath().sigma(t) ** 2, 1 - products)
    assert DDPMPath().alpha(torch.zeros(1)) == 1 and DDPMPath().sigma(torch.zeros(1)) == 0


def test_a_field_written_for_each_objective_gives_the_same_samples():
    """Networks that know the best denoiser, each with the output of its objective, draw the same samples."""
    noise, steps = torch.randn(64, 1, 2, 2, generator=seeded()), DDPMPath()

    def sample(denoise):  # on whole steps, because a DDPM network rounds the time
        return ode_sampler(denoise, noise, steps, num_steps=50, times=respaced_times, solver="euler")

    expected = sample(partial(best, steps))
    for precond in PRECONDS.values():
        denoise = on_path(partial(precond, class_labels=None), precond.path, steps)
        torch.testing.assert_close(sample(denoise), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_network_that_knows_the_data_has_no_loss(name):
    make_precond, make_loss, output = OBJECTIVES[name]
    x = torch.randn(16, 1, 4, 4)
    write = output(lambda x_t, t: x)
    assert make_loss()(make_precond(Field(write)), x, None).max() < 1e-4
    wrong = make_loss()(make_precond(Field(lambda x_t, t: write(x_t, t) + 1)), x, None)
    assert wrong.min() > 0.5


def test_the_loss_of_data_prediction_is_the_error_of_its_velocity():
    x, t = torch.randn(8, 1, 4, 4), torch.linspace(0.06, 0.9, 8)
    off = X0Precond(Field(lambda x_t, t: x + 0.1))
    torch.testing.assert_close(X0Loss()(off, x, None, t=t), (0.1 / t) ** 2, check_dtype=False)
    assert X0Loss(t_min=0.5)(off, x, None, t=torch.full((8,), 0.1)).max() < (0.1 / 0.5) ** 2 + 1e-6


@pytest.mark.parametrize("from_noise", [False, True])
def test_the_angle_between_velocities_is_taken_over_the_channels(from_noise):
    x, t = torch.randn(3, 5, 2, 2), torch.full((3,), 0.4)
    v = torch.randn(3, 5, 2, 2)
    precond = FlowPrecond(Field(lambda x_t, t: -v if from_noise else v), from_noise=from_noise)
    losses = (FlowLoss(cosine_weight=weight) for weight in (0, 0.5))
    plain, both = (loss(precond, x, None, t=t, generator=seeded(1)) for loss in losses)
    u = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) - x
    angle = (v * u).sum(dim=1) / (v.square().sum(dim=1) * u.square().sum(dim=1)).sqrt()  # (N, H, W)
    torch.testing.assert_close(both - plain, 0.5 * (1 - angle).mean(dim=(1, 2)), check_dtype=False)


def test_the_angle_of_a_network_at_its_start_has_a_bounded_gradient():
    v = torch.zeros(3, 5, 2, 2, requires_grad=True)
    x, t = torch.randn(3, 5, 2, 2), torch.full((3,), 0.4)
    FlowLoss(cosine_weight=1)(FlowPrecond(Field(lambda x_t, t: v)), x, None, t=t).sum().backward()
    assert v.grad.abs().max() < 10


@pytest.mark.parametrize(
    "loss, moments",
    [
        (FlowLoss("uniform"), (0.5, 1 / math.sqrt(12))),
        (FlowLoss(), (0.5, 0.2083)),
        (FlowLoss(P_mean=-1.0, P_std=0.1), (0.2693, 0.0197)),
        (FlowLoss("uniform", shift=3.0), (0.6761, 0.2657)),
        (DDPMLoss(), (500.5, 1000 / math.sqrt(12))),
        (EDMLoss(P_mean=-1.2, P_std=1.2), (-1.2, 1.2)),  # moments of ln(sigma)
    ],
)
def test_times_are_drawn_from_their_distribution(loss, moments):
    t = loss.draw_t(200_000, torch.Generator().manual_seed(0), torch.device("cpu"))
    assert t.min() >= 0
    if isinstance(loss, EDMLoss):
        t = t.log()
    else:
        assert t.max() <= (1000 if isinstance(loss, DDPMLoss) else 1)
    assert (t.mean().item(), t.std().item()) == pytest.approx(moments, rel=0.01)


@pytest.mark.parametrize("name", ["edm", "flow", "x0"])
def test_other_targets_are_pushed_away_only_in_training(name):
    make_precond, make_loss, _ = OBJECTIVES[name]
    precond, x = make_precond(Field(lambda x_in, c_noise: 0.3 * x_in)), torch.randn(6, 1, 4, 4)
    t, path = torch.full((6,), 0.7), precond.path

    def losses(weight):
        return make_loss(contrastive_weight=weight)(precond, x, None, t=t, generator=seeded(1))

    eps = torch.randn(x.shape, generator=seeded(1))
    t_ = t.view(-1, 1, 1, 1)
    x_t = path.alpha(t_) * x + path.sigma(t_) * eps
    predicted = velocity(path, precond(x_t, t, None), x_t, t_)
    u = path.alpha_dot(t_) * x + path.sigma_dot(t_) * eps
    same, other = ((predicted - target).square().mean(dim=(1, 2, 3)) for target in (u, u.roll(1, 0)))
    factor = losses(0.0) / same  # weight of the squared velocity error in this objective
    torch.testing.assert_close(losses(0.25), factor * (same - 0.25 * other), rtol=1e-5, atol=1e-5)
    precond.eval()
    torch.testing.assert_close(losses(0.25), factor * same)
    precond.train()
    with pytest.raises(ValueError, match="needs micro-batches of at least 2 samples"):
        make_loss(contrastive_weight=0.25)(precond, x[:1], None)


def test_the_bound_is_the_divergence_of_two_gaussians():
    """KL(q || p) is computed by torch.distributions, from the textbook form of the posterior."""
    path, x = DDPMPath(), torch.rand(4, 1, 3, 3, dtype=torch.float64) * 2 - 1
    D_x, x_t, v = (torch.rand(4, 1, 3, 3, dtype=torch.float64) * 2 - 1 for _ in range(3))
    t = torch.tensor([2.0, 10, 500, 1000], dtype=torch.float64).view(-1, 1, 1, 1)
    betas = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
    products = torch.cat([torch.ones(1), (1 - betas).cumprod(0)])
    i = t.long()
    beta, now, before = betas[i - 1], products[i], products[i - 1]

    def mean(clean):
        return (before.sqrt() * beta * clean + (1 - beta).sqrt() * (1 - before) * x_t) / (1 - now)

    low = (1 - before) / (1 - now) * beta
    std = (beta ** ((v + 1) / 2) * low ** ((1 - v) / 2)).sqrt()
    normal = torch.distributions.Normal
    kl = torch.distributions.kl_divergence(normal(mean(x), low.sqrt()), normal(mean(D_x), std))
    bound = variational_bound(path, D_x, v, x_t, t, x)
    torch.testing.assert_close(bound, kl / math.log(2), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("x", [-1.5, 0.2, 1.5])
@pytest.mark.parametrize("v", [-1.0, 1.0])
def test_the_bound_of_the_first_step_is_the_mass_of_a_byte(x, v):
    """The network predicts 0 in place of eps. DEVIATION: public code approximates the CDF by a tanh."""
    path, one = DDPMPath(), torch.ones(1, dtype=torch.float64)
    eps = torch.randn(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    D_x = x + path.sigma(one) / path.alpha(one) * eps
    bound = variational_bound(path, D_x, v * one, 0 * D_x, one, x * torch.ones_like(D_x))
    first, second = (path.alpha(k * one) ** 2 for k in (1, 2))
    low, high = (1 - first) / (1 - second) * (1 - second / first), 1 - first
    cdf = torch.distributions.Normal(D_x, (low if v < 0 else high).sqrt()).cdf
    above = cdf(x + one / 255) if x < 1 else one
    below = cdf(x - one / 255) if x > -1 else 0 * one
    exact = -(above - below).clamp(min=1e-12).log2()
    near = exact < 30  # elsewhere the mass is 0 in float64
    torch.testing.assert_close(bound[near], exact[near], rtol=1e-5, atol=1e-6)


def test_the_bound_trains_only_the_variance():
    output = torch.randn(4, 2, 4, 4, requires_grad=True)
    precond, x = DDPMPrecond(Field(lambda x_t, i: output)), torch.rand(4, 1, 4, 4)
    t, generator = torch.tensor([1.0, 2, 40, 900]), torch.Generator().manual_seed(0)
    DDPMLoss()(precond, x, None, t=t, generator=generator).sum().backward()
    eps = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(output.grad[:, :1], 2 * (output[:, :1] - eps).detach() / 16)
    assert output.grad[:, 1:].abs().amax(dim=(1, 2, 3)).min() > 0


@pytest.mark.parametrize("weight", [0.5, 0.2])
@pytest.mark.parametrize("learn_sigma", [False, True])
def test_the_error_of_the_inner_head_is_added_in_training(weight, learn_sigma):
    """L(F_x) + weight L(F_inner), for the same noise; evaluations judge F_x alone."""
    net = small_dit(inner_head=2, class_dropout_prob=0.0, learn_sigma=learn_sigma)
    precond, loss = FlowPrecond(net), FlowLoss(inner_weight=weight)
    if learn_sigma:
        precond, loss = DDPMPrecond(net), DDPMLoss(inner_weight=weight)
    x, _, labels = small_batch(4)

    def losses(training, swapped=False):
        forward = type(net).forward
        precond.train(training)
        if swapped:
            net.forward = lambda *args, **kwargs: forward(net, *args, **kwargs)[1]
        value = loss(precond, x, labels, t=loss.draw_t(4, seeded(0), x.device), generator=seeded(1))
        vars(net).pop("forward", None)
        return value

    final, inner = losses(False), losses(False, swapped=True)
    torch.testing.assert_close(losses(True), final + weight * inner)
    assert not torch.allclose(final, inner)
