"""Reports of single steps: skipped steps, spikes and the samples that caused them."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from runtime.launch import ALONE, Launch
from training.window import MAX_NAMED, MIN_STEPS, Window

INDICES = ((0, 1, 4, 5), (2, 3, 6, 7))  # samples of two processes, in micro-batches of two
# Losses of eight samples by index. The second process has four of them, two of which are the largest.
LOSSES = (0.5, 4.0, 9.0, 0.1, 3.0, 0.2, 7.0, 0.3)
LARGEST = [2, 6, 1, 4]


def window(indices=range(8), log_every=4, max_skipped_steps=3, launch=ALONE):
    def entries(num_steps):
        return [f"{num_steps}/{index}" for index in range(8)]

    clock = SimpleNamespace(train_time_sec=0.0)
    batches = SimpleNamespace(sample_indices=torch.tensor(list(indices)), entries=entries, batch_size=8)
    return Window(launch, clock, batches, True, False, None, log_every, max_skipped_steps)


@dataclass(frozen=True)
class TwoRanks(Launch):
    """A rank that gathers the rows of both windows."""

    windows: list = field(default_factory=list)

    def gather(self, tensor):
        return torch.stack([one.rows for one in self.windows])


def two_windows():
    """Return the windows of two ranks."""
    both = []
    both += [window(indices, launch=TwoRanks(rank, 2, windows=both)) for rank, indices in enumerate(INDICES)]
    return both


def add(steps, loss=1.0, skipped=0, losses=LOSSES):
    rank_losses = torch.tensor(losses)[steps.sample_indices.long()].split(2)
    steps.add_step(torch.tensor(loss), torch.tensor(1.0), torch.tensor(float(skipped)), (0.5,), rank_losses)


def level(steps, num_steps=200):
    """Add losses of mean 1 and standard deviation 0.1."""
    assert not any(steps._is_spike(1 + 0.1 * (-1) ** i) for i in range(num_steps))
    return steps


def test_a_spike_does_not_hide_the_next_one():
    steps = level(window())
    assert [steps._is_spike(loss) for loss in (1.7, 100.0, 3.0, 1.7)] == [False, True, True, False]


@pytest.mark.parametrize(("num_steps", "spike"), [(MIN_STEPS - 1, False), (MIN_STEPS, True)])
def test_no_spike_is_reported_in_the_first_steps(num_steps, spike):
    assert level(window(), num_steps)._is_spike(5.0) == spike


def test_mean_and_deviation_forget_old_steps():
    steps = level(window(), 300)
    for i in range(100):
        steps._is_spike(1.5 + 0.2 * (-1) ** i)
    assert steps.mean == pytest.approx(1.5 - 0.5 * 0.99**100, abs=0.01)
    # The weighted variances of both levels, and the variance between them.
    old = 0.99**100
    assert steps.variance == pytest.approx(
        0.1**2 * old + 0.2**2 * (1 - old) + 0.5**2 * old * (1 - old), rel=0.05
    )


def test_the_largest_losses_of_all_ranks_are_named_by_step_and_entry():
    one, two = window(), two_windows()
    for steps in (one, *two):
        add(steps)
        add(steps, skipped=1)
        add(steps)
    expected = {"skipped_steps": [{"step": 10, "entries": [f"9/{index}" for index in LARGEST]}]}
    assert one.report(11) == expected
    assert two[0].report(11) == expected
    assert len(LARGEST) == MAX_NAMED


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_the_largest(value):
    steps = window()
    add(steps, skipped=1, losses=(*LOSSES[:5], value, *LOSSES[6:]))
    (skipped,) = steps.report(1)["skipped_steps"]
    assert skipped["entries"] == [f"0/{index}" for index in (5, 2, 6, 1)]


def test_rows_of_two_ranks_resume_on_one_and_back():
    two, one = two_windows(), window()
    for steps in two:
        add(steps, loss=float(steps.sample_indices[0]), skipped=1)
    one.load_state_dict(two[0].state_dict())
    assert one.rows[0, 0] == 1.0  # the mean of 0 and 2
    assert one.report(1)["skipped_steps"][0]["entries"] == [f"0/{index}" for index in LARGEST]
    one.start()
    add(one, skipped=1)
    restored = two_windows()
    for steps in restored:
        steps.load_state_dict(one.state_dict())
        add(steps)
    (skipped,) = restored[0].report(3)["skipped_steps"]
    assert (skipped["step"], skipped["entries"]) == (2, [f"1/{index}" for index in LARGEST])
