import torch

from diffusion import EDMLoss, EDMPrecond
from tests.networks import small_batch, small_dit

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


def test_loss_weight_gives_every_noise_level_the_same_say():
    """A network that outputs zero has expected loss 1 at each noise level: the weight is 1 / c_out^2."""
    x = 0.5 * torch.randn(200_000, 1, 1, 1, generator=torch.Generator().manual_seed(0))

    class Zero(torch.nn.Module):
        def forward(self, x, c_noise, class_labels, *, selection_ratio=None, generator=None):
            return torch.zeros_like(x)

    for P_mean in (-3.0, 0.0, 2.0):
        loss = EDMLoss(P_mean, P_std=1e-6)(EDMPrecond(Zero()), x, None, generator=torch.Generator().manual_seed(1))
        assert abs(loss.mean().item() - 1) < 0.02


def test_loss_of_the_oracle_denoiser_is_zero():
    x = torch.randn(8, 3, 8, 8)
    loss = EDMLoss()(lambda noisy, sigma, labels, *, selection_ratio, generator: x, x, None)
    assert loss.shape == (8,)
    assert not loss.any()


def test_noise_levels_are_log_normal():
    seen = []

    def denoiser(noisy, sigma, labels, *, selection_ratio, generator):
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
        losses = [EDMLoss()(precond, x, labels, generator=torch.Generator().manual_seed(s)) for s in (5, 5, 6)]
    assert losses[0].dtype == torch.float32
    assert torch.equal(losses[0], losses[1])
    assert not torch.equal(losses[0], losses[2])


def test_sigma_may_be_one_number_for_all():
    precond = EDMPrecond(small_dit().eval())
    x, _, labels = small_batch()
    sigma = torch.tensor(0.7, dtype=torch.float64)
    torch.testing.assert_close(precond(x.double(), sigma, labels), precond(x, torch.full((4,), 0.7), labels))
