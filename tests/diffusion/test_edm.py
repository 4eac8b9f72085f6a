import pytest
import torch

from diffusion import EDMLoss, EDMPrecond
from routing import Route
from tests.networks import PAPER, small_batch, small_dit

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
    """[EDM] eq. 7, each sample at a noise level of its own."""
    net, (x, logs, labels) = small_dit().eval(), small_batch()
    sigma, std = logs.exp(), (logs.exp() ** 2 + 0.7**2).sqrt()
    s, r = sigma.view(-1, 1, 1, 1), std.view(-1, 1, 1, 1)
    expected = 0.7**2 / r**2 * x + 0.7 * s / r * net(x / r, logs / 4, labels)
    torch.testing.assert_close(EDMPrecond(net, 0.7)(x, sigma, labels), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sigma_data", [0.5, 1.3])
def test_loss_weight_gives_every_noise_level_the_same_say(sigma_data):
    """A network that outputs zero has expected loss 1 at each noise level: the weight is 1 / c_out^2."""
    x = sigma_data * torch.randn(200_000, 1, 1, 1, generator=torch.Generator().manual_seed(0))

    class Zero(torch.nn.Module):
        def forward(self, x, c_noise, class_labels, *, selection_ratio=None, force_keep=None, generator=None):
            return torch.zeros_like(x)

    for P_mean in (-3.0, 0.0, 2.0):
        precond, generator = EDMPrecond(Zero(), sigma_data), torch.Generator().manual_seed(1)
        loss = EDMLoss(P_mean, 1e-6, sigma_data)(precond, x, None, generator=generator)
        assert abs(loss.mean().item() - 1) < 0.02


def test_loss_of_the_oracle_denoiser_is_zero():
    x = torch.randn(8, 3, 8, 8)
    loss = EDMLoss()(lambda noisy, sigma, labels, *, selection_ratio, force_keep, generator: x, x, None)
    assert loss.shape == (8,)
    assert not loss.any()


def test_noise_levels_are_log_normal():
    seen = []

    def denoiser(noisy, sigma, labels, *, selection_ratio, force_keep, generator):
        seen.append(sigma)
        return noisy

    EDMLoss(P_mean=-1.2, P_std=1.2)(denoiser, torch.zeros(100_000, 1, 1, 1), None)
    logs = seen[0].log()
    assert abs(logs.mean() + 1.2) < 0.02
    assert abs(logs.std() - 1.2) < 0.02


def test_a_generator_fixes_the_loss_and_precision_is_fp32():
    precond = EDMPrecond(small_dit().train())
    x, _, labels = small_batch()
    with torch.autocast("cpu", torch.bfloat16):
        losses = [
            EDMLoss()(precond, x, labels, generator=torch.Generator().manual_seed(s)) for s in (5, 5, 6)
        ]
    assert losses[0].dtype == torch.float32
    assert torch.equal(losses[0], losses[1])
    assert not torch.equal(losses[0], losses[2])


def test_sigma_may_be_one_number_for_all():
    precond = EDMPrecond(small_dit().eval())
    x, _, labels = small_batch()
    sigma = torch.tensor(0.7, dtype=torch.float64)
    torch.testing.assert_close(precond(x.double(), sigma, labels), precond(x, torch.full((4,), 0.7), labels))


def test_masked_loss_weights_each_position_and_stays_a_mean_over_all():
    x = torch.randn(4, 3, 8, 8)

    def denoiser(noisy, sigma, labels, *, selection_ratio, force_keep, generator):
        return noisy

    def loss(mask, denoiser=denoiser):
        return EDMLoss()(denoiser, x, None, generator=torch.Generator().manual_seed(0), loss_mask=mask)

    whole = loss(None)
    torch.testing.assert_close(loss(torch.ones(4, 8, 8)), whole)
    assert not loss(torch.zeros(4, 8, 8)).any()
    left = torch.zeros(4, 8, 8)
    left[:, :, :4] = 0.25
    right = torch.zeros(4, 8, 8)
    right[:, :, 4:] = 1.0
    torch.testing.assert_close(4 * loss(left) + loss(right), whole)
    one = torch.zeros(4, 8, 8)
    one[:, 2, 5] = 1.0

    def wrong_at_one(noisy, sigma, labels, *, selection_ratio, force_keep, generator):
        return x + one.unsqueeze(1)

    assert torch.equal(loss(one, wrong_at_one), loss(None, wrong_at_one))
    assert not loss(one.mT, wrong_at_one).any()


def test_masks_and_routes_reach_the_network():
    seen = {}

    def denoiser(noisy, sigma, labels, *, selection_ratio, force_keep, generator):
        seen.update(selection_ratio=selection_ratio, force_keep=force_keep)
        return noisy

    force_keep = torch.ones(2, 16, dtype=torch.bool)
    EDMLoss()(
        EDMPrecond(denoiser), torch.randn(2, 3, 8, 8), None, selection_ratio=(0.25,), force_keep=force_keep
    )
    assert seen["selection_ratio"] == (0.25,)
    assert seen["force_keep"] is force_keep


def test_loss_of_kept_tokens_leaves_the_others_out():
    """The mean over kept pixels alone, and no gradient to the output at the others; dense evaluation keeps
    all.
    """
    net = small_dit([PAPER]).train()
    batch, kept_pixels, outputs = small_batch(), [], []
    forward = net.forward

    def remember(*args, **kwargs):
        F_x, kept = forward(*args, **kwargs)
        F_x.retain_grad()
        kept_pixels.append(kept)
        outputs.append(F_x)
        return F_x, kept

    net.forward = remember
    loss_fn = EDMLoss(kept_tokens_only=True)
    losses = loss_fn(EDMPrecond(net), batch[0], batch[2], generator=torch.Generator().manual_seed(0))
    losses.sum().backward()
    (kept,), (F_x,) = kept_pixels, outputs
    assert kept.float().mean() == 0.5
    bypassed = ~kept.expand_as(F_x)
    assert not F_x.grad[bypassed].any()
    assert F_x.grad[~bypassed].all()
    net.forward = forward
    masked = EDMLoss()(
        EDMPrecond(net),
        batch[0],
        batch[2],
        generator=torch.Generator().manual_seed(0),
        loss_mask=kept[:, 0].float(),
    )
    torch.testing.assert_close(losses, 2 * masked)
    net.eval()
    dense = [
        fn(EDMPrecond(net), batch[0], batch[2], generator=torch.Generator().manual_seed(0))
        for fn in (loss_fn, EDMLoss())
    ]
    torch.testing.assert_close(*dense)


def test_a_sample_that_no_two_routes_keep_a_token_of_has_no_loss():
    """Two routes at 0.8 keep 4 of 16 tokens each, and in some samples none in common."""
    routes = [Route(0.8, 1, 2), Route(0.8, 3, 4)]
    net = small_dit(routes).train()
    x, _, labels = small_batch(64)
    losses = EDMLoss(kept_tokens_only=True)(
        EDMPrecond(net), x, labels, generator=torch.Generator().manual_seed(0)
    )
    assert losses.isfinite().all()
    assert 0 < (losses == 0).sum() < 64
