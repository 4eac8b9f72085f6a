import pytest
import torch

from evaluation import DenseLoss

MASKS = torch.ones(1, 1)
BATCHES = [(0, torch.ones(3), torch.zeros(3), None), (4, torch.full((1,), 5.0), torch.ones(1), MASKS)]


class Scaled(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(factor))


def test_a_held_out_loss_is_the_mean_over_all_entries_of_all_processes():
    """Of batches that are not equal; the other process has three entries of loss 11."""
    seen = []

    def loss_fn(denoiser, latents, labels, generator, mask):
        seen.append(
            (generator.initial_seed(), labels.tolist(), mask, denoiser.training, torch.is_grad_enabled())
        )
        return latents * denoiser.factor

    denoisers = {"plain": Scaled(1.0), "average": Scaled(2.0).eval()}
    loss = DenseLoss(
        denoisers, loss_fn, lambda: iter(BATCHES), total=lambda sums: sums + torch.tensor([33, 3])
    )
    assert loss(0) == pytest.approx({"plain": (3 + 5 + 33) / 7, "average": (6 + 10 + 33) / 7})
    assert seen == 2 * [(0, [0, 0, 0], None, False, False), (4, [1], MASKS, False, False)]
    assert not any(denoiser.training for denoiser in denoisers.values()), "who trains sets the mode for it"
