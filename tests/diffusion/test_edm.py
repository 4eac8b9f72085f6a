import pytest
import torch

from builders.kept_tokens import KeptTokensLoss
from diffusion import EDMLoss, EDMPrecond
from routing import Route, Routing
from tests.networks import PAPER, Field, seeded, small_batch, small_dit

SIGMAS = torch.tensor([0.002, 0.1, 0.5, 2.0, 80.0], dtype=torch.float64)


def test_input_target_and_output_have_unit_variance():
    """The identities that define the preconditioning, [EDM] section 5."""
    sigma_data = 0.7
    c_skip, c_out, c_in, c_noise = EDMPrecond(torch.nn.Identity(), sigma_data).coefficients(SIGMAS)
    ones = torch.ones_like(SIGMAS)
    # Input: c_in^2 (sigma_data^2 + sigma^2) = 1.
    torch.testing.assert_close(c_in**2 * (sigma_data**2 + SIGMAS**2), ones)
    # Target: variance of (y - c_skip (y + n)) / c_out = 1.
    torch.testing.assert_close(((1 - c_skip) ** 2 * sigma_data**2 + c_skip**2 * SIGMAS**2) / c_out**2, ones)
    # c_skip minimises c_out^2 = (1 - c_skip)^2 sigma_data^2 + c_skip^2 sigma^2.
    for change in (0.99, 1.01):
        other = c_skip * change
        assert ((1 - other) ** 2 * sigma_data**2 + other**2 * SIGMAS**2 > c_out**2).all()
    torch.testing.assert_close(c_noise, SIGMAS.log() / 4)


def test_the_denoiser_mixes_its_input_with_the_output_of_the_network():
    """[EDM] eq. 7, with a different noise level for each sample."""
    net, (x, logs, labels) = small_dit().eval(), small_batch()
    sigma, std = logs.exp(), (logs.exp() ** 2 + 0.7**2).sqrt()
    s, r = sigma.view(-1, 1, 1, 1), std.view(-1, 1, 1, 1)
    expected = 0.7**2 / r**2 * x + 0.7 * s / r * net(x / r, logs / 4, labels)
    torch.testing.assert_close(EDMPrecond(net, 0.7)(x, sigma, labels), expected, rtol=1e-4, atol=1e-5)
    one = EDMPrecond(net, 0.7)(x.double(), torch.tensor(0.7, dtype=torch.float64), labels)  # for all samples
    torch.testing.assert_close(one, EDMPrecond(net, 0.7)(x, torch.full((4,), 0.7), labels))


@pytest.mark.parametrize("sigma_data", [0.5, 1.3])
def test_the_loss_weight_makes_all_noise_levels_count_equally(sigma_data):
    """A network that outputs zero has expected loss 1 at each noise level: the weight is 1 / c_out^2."""
    x = sigma_data * torch.randn(200_000, 1, 1, 1, generator=seeded())
    precond = EDMPrecond(Field(lambda x, c_noise: torch.zeros_like(x)), sigma_data)
    for P_mean in (-3.0, 0.0, 2.0):
        loss = EDMLoss(P_mean, 1e-6)(precond, x, None, generator=seeded(1))
        assert abs(loss.mean().item() - 1) < 0.02


def test_a_generator_fixes_the_loss_and_precision_is_fp32():
    precond = EDMPrecond(small_dit().train())
    x, _, labels = small_batch()
    with torch.autocast("cpu", torch.bfloat16):
        losses = [EDMLoss()(precond, x, labels, generator=seeded(s)) for s in (5, 5, 6)]
    assert losses[0].dtype == torch.float32
    assert torch.equal(losses[0], losses[1])
    assert not torch.equal(losses[0], losses[2])


def test_masked_loss_weights_each_position_and_stays_a_mean_over_all():
    x = torch.randn(4, 3, 8, 8)
    zero = EDMPrecond(Field(lambda x, c_noise: torch.zeros_like(x)))

    def loss(mask, precond=zero):
        return EDMLoss()(precond, x, None, generator=seeded(), mask=mask)

    whole = loss(None)
    torch.testing.assert_close(loss(torch.ones(4, 8, 8)), whole)
    assert not loss(torch.zeros(4, 8, 8)).any()
    left, right, one = torch.zeros(3, 4, 8, 8)
    left[:, :, :4], right[:, :, 4:], one[:, 2, 5] = 0.25, 1.0, 1.0
    torch.testing.assert_close(4 * loss(left) + loss(right), whole)
    wrong_at_one = EDMPrecond(Field(lambda x, c_noise: x))
    wrong_at_one.denoised = lambda F_x, x_t, t: x + one.unsqueeze(1)
    assert torch.equal(loss(one, wrong_at_one), loss(None, wrong_at_one))
    assert not loss(one.mT, wrong_at_one).any()


def test_routing_reaches_the_network_and_given_times_are_used():
    seen = []
    precond = EDMPrecond(Field(lambda x, c_noise: seen.append(c_noise) or torch.zeros_like(x)))
    routing, t = Routing(0.25), torch.tensor([0.1, 3.0], dtype=torch.float64)
    EDMLoss()(precond, torch.randn(2, 3, 8, 8), None, t=t, routing=routing)
    torch.testing.assert_close(seen[0].flatten(), t.log() / 4)
    assert precond.net.routing is routing


def test_a_variance_in_the_output_is_left_out_of_the_denoised_image():
    x, sigma = torch.randn(2, 3, 8, 8), torch.tensor([0.3, 2.0])
    plain = EDMPrecond(Field(lambda x, c_noise: 2 * x))(x, sigma, None)
    both = EDMPrecond(Field(lambda x, c_noise: torch.cat([2 * x, 5 * x], dim=1)))(x, sigma, None)
    assert torch.equal(plain, both)


@pytest.mark.parametrize("weight", [0, 0.3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("routes", [[PAPER], [Route(0.8, 1, 2), Route(0.8, 3, 4)]], ids=["one", "two"])
def test_the_loss_of_kept_tokens_is_over_pixels_that_every_route_kept(routes, masked, weight):
    """Two routes at 0.8 keep 4 of 16 tokens each. Samples where they keep none in common have no loss.

    The reconstruction error of the other tokens is |D_x - c_in x|^2. Masks weight both errors.
    """
    net, (x, _, labels) = small_dit(routes, class_dropout_prob=0.0).train(), small_batch(32)
    precond, drawn, seen, router = EDMPrecond(net), [], [], net.router
    predict = precond.predict
    net.router = lambda *args, **kwargs: drawn.append(router(*args, **kwargs)) or drawn[-1]
    precond.predict = lambda x, t, *args, **kwargs: (
        seen.append((x, t, predict(x, t, *args, **kwargs))) or seen[-1][-1]
    )
    loss, mask = KeptTokensLoss(EDMLoss(), net, weight), torch.rand(32, 8, 8) if masked else None
    losses = loss(precond, x, labels, routing=Routing(routes[0].selection_ratio), mask=mask)
    ((x_t, t, (F_x, _)),) = seen
    kept = torch.ones(32, 16)
    for ids_keep in drawn:
        kept *= torch.zeros(32, 16).scatter(1, ids_keep, 1.0)
    kept = kept.view(32, 1, 4, 4).repeat_interleave(2, 2).repeat_interleave(2, 3)
    sigma = t.view(-1, 1, 1, 1)
    D_x, c_in = precond.denoised(F_x, x_t, t), 1 / (sigma**2 + 0.25).sqrt()

    def mean(error, chosen):
        error = error * mask.unsqueeze(1) if masked else error
        return (error * chosen).sum(dim=(1, 2, 3)) / (3 * chosen.sum(dim=(1, 2, 3))).clamp(min=1)

    expected = mean((D_x - x) ** 2 * (sigma**2 + 0.25) / (sigma * 0.5) ** 2, kept)
    expected += weight * mean((D_x - c_in * x_t) ** 2, 1 - kept)
    torch.testing.assert_close(losses, expected)


def test_a_dense_evaluation_of_the_loss_of_kept_tokens_is_the_full_loss():
    net, (x, _, labels) = small_dit([PAPER]).eval(), small_batch()
    losses = (KeptTokensLoss(EDMLoss(), net), EDMLoss())
    assert torch.equal(*(loss(EDMPrecond(net), x, labels, generator=seeded()) for loss in losses))
