import pytest
import torch

from diffusion import EDMLoss
from evaluation import DenseLoss

MASKS = torch.ones(1, 1)
BATCHES = [(0, torch.ones(3), torch.zeros(3), None), (4, torch.full((1,), 5.0), torch.ones(1), MASKS)]
CPU = torch.device("cpu")


class Scaled(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(factor))


class LatentLoss:
    """A loss equal to the latents times the denoiser's factor, at times 0, 1, 2 ... in a batch."""

    def __init__(self):
        self.seen = []

    def draw_t(self, num_samples, generator, device):
        return torch.arange(num_samples, device=device, dtype=torch.float)

    def __call__(self, denoiser, latents, labels, t, generator, mask):
        called = (generator.initial_seed(), labels.tolist(), mask, denoiser.training, torch.is_grad_enabled())
        self.seen.append(called)
        assert torch.equal(t, self.draw_t(len(latents), generator, CPU))
        return latents * denoiser.factor


def test_a_held_out_loss_is_the_mean_over_all_entries_of_all_processes():
    """The batches differ in size; the other process has three entries of loss 11."""
    denoisers, loss_fn = {"plain": Scaled(1.0), "average": Scaled(2.0).eval()}, LatentLoss()
    loss = DenseLoss(
        denoisers, loss_fn, lambda: iter(BATCHES), lambda sums: sums + torch.tensor([33, 3]), CPU
    )
    assert loss(0) == pytest.approx({"plain": (3 + 5 + 33) / 7, "average": (6 + 10 + 33) / 7})
    nothing = DenseLoss(denoisers, loss_fn, lambda: iter(()), loss.total, CPU)
    assert nothing(0) == {"plain": 11, "average": 11}, "a process without entries takes part in the sum"
    assert loss_fn.seen == 2 * [(0, [0, 0, 0], None, False, False), (4, [1], MASKS, False, False)]
    assert not any(denoiser.training for denoiser in denoisers.values()), "denoisers stay in eval mode"


class TimeLoss(EDMLoss):
    """A loss equal to the log of EDM's times."""

    def __call__(self, denoiser, latents, labels, t, generator, mask):
        assert torch.rand((), generator=generator) < 1, "the noise is drawn after the times"
        return t.log() * denoiser.factor


def test_the_loss_is_split_by_equally_likely_noise_levels():
    batches = [(index, torch.ones(1000), None, None) for index in range(10)]
    denoisers = {"first": Scaled(1.0), "second": Scaled(2.0)}
    losses = DenseLoss(denoisers, TimeLoss(), lambda: iter(batches), lambda sums: sums, CPU, ("second",))(0)
    levels = {float(key.removeprefix("second/t=")): losses[key] for key in losses if "/" in key}
    assert len(levels) == 5, "only for the key in by_level"
    assert sum(levels.values()) / 5 == pytest.approx(losses["second"], abs=0.02), (
        "a fifth of the draws in each"
    )
    # ln(sigma) ~ N(-1.2, 1.2^2): its median in the middle, and the means of the outer fifths 1.4 sd away.
    assert list(levels) == sorted(levels) and list(levels)[2] == pytest.approx(0.30, abs=0.01)
    expected = [2 * (-1.2 + 1.2 * z) for z in (-1.3998, -0.5315, 0, 0.5315, 1.3998)]
    assert list(levels.values()) == pytest.approx(expected, abs=0.06)
