"""What is reported of a fine-tune with routes."""

import pytest
import torch

from benchmarks import finetuning
from data import digits


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return digits(
        str(tmp_path_factory.mktemp("latents") / "digits"), input_size=8, in_channels=1, num_classes=10
    )


@pytest.fixture(scope="module")
def pretrained(dataset):
    return finetuning.pretrain(dataset, 10)


def test_a_dense_fine_tune_has_nothing_to_recover(pretrained, dataset):
    outcome = finetuning.finetune(pretrained, dataset, "full", 0.0, 0, [1, 2])
    assert (outcome.rise, outcome.recovered_step) == (1.0, 0)
    assert outcome.dense_losses[2] < outcome.dense_losses[1] < outcome.before


def test_a_routed_fine_tune_starts_from_the_same_network_and_is_evaluated_dense(pretrained, dataset):
    dense, routed = (finetuning.finetune(pretrained, dataset, "full", ratio, 0, [1]) for ratio in (0.0, 0.7))
    assert routed.before == dense.before
    assert routed.rise != 1
    assert routed.dense_losses != dense.dense_losses
    assert routed.recovered_step is None  # one step is none of those at which it is looked for


def test_the_digits_are_turned(dataset):
    (upright, labels), (turned, same_labels) = (
        finetuning.Digits(dataset, quarters, 0).batch(0) for quarters in (0, 1)
    )
    assert torch.equal(turned, upright.rot90(1, (-2, -1)))
    assert torch.equal(labels, same_labels)
