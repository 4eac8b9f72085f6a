"""What is said of single steps: skipped ones, spikes, the samples at fault; over processes, log points and
resumes.
"""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from runtime.launch import ALONE, Launch
from training.window import MAX_NAMED, MIN_STEPS, Window

PLACES = ((0, 1, 4, 5), (2, 3, 6, 7))  # of two processes, in micro-batches of two
# Of eight samples by their place; four of these are of the second process, and three are the largest there
# are.
LOSSES = (0.5, 4.0, 9.0, 0.1, 3.0, 0.2, 7.0, 0.3)
LARGEST = [2, 6, 1, 4]


def window(places=range(8), log_every=4, max_skipped_steps=3, launch=ALONE):
    def entries(num_steps):
        return [f"{num_steps}/{place}" for place in range(8)]

    clock = SimpleNamespace(train_time_sec=0.0)
    batches = SimpleNamespace(places=torch.tensor(list(places)), entries=entries, batch_size=8)
    return Window(launch, clock, batches, True, None, log_every, max_skipped_steps)


@dataclass(frozen=True)
class OfTwo(Launch):
    """A rank that gathers from the windows of both."""

    of_both: list = field(default_factory=list)

    def gather(self, tensor):
        return torch.stack([of_one.rows for of_one in self.of_both])


def of_two():
    """Return the windows of two ranks."""
    both = []
    both += [window(places, launch=OfTwo(rank, 2, of_both=both)) for rank, places in enumerate(PLACES)]
    return both


def add(found, loss=1.0, skipped=0, losses=LOSSES):
    own = torch.tensor(losses)[found.places.long()]
    found.add_step(torch.tensor(loss), torch.tensor(1.0), torch.tensor(float(skipped)), (0.5,), own.split(2))


def level(found, num_steps=200):
    """Have losses of mean 1 and standard deviation 0.1."""
    assert not any(found._is_spike(1 + 0.1 * (-1) ** i) for i in range(num_steps))
    return found


def test_a_spike_does_not_hide_the_next_one():
    found = level(window())
    assert [found._is_spike(loss) for loss in (1.7, 100.0, 3.0, 1.7)] == [False, True, True, False]


@pytest.mark.parametrize(("num_steps", "spike"), [(MIN_STEPS - 1, False), (MIN_STEPS, True)])
def test_no_spike_is_reported_in_the_first_steps(num_steps, spike):
    assert level(window(), num_steps)._is_spike(5.0) == spike


def test_mean_and_deviation_forget_old_steps():
    found = level(window(), 300)
    for i in range(100):
        found._is_spike(1.5 + 0.2 * (-1) ** i)
    assert found.mean == pytest.approx(1.5 - 0.5 * 0.99**100, abs=0.01)
    # Of both levels, with their weights, and the distance between them.
    old = 0.99**100
    assert found.variance == pytest.approx(
        0.1**2 * old + 0.2**2 * (1 - old) + 0.5**2 * old * (1 - old), rel=0.05
    )


def test_the_largest_losses_of_all_ranks_are_named_by_step_and_entry():
    one, two = window(), of_two()
    for found in (one, *two):
        add(found)
        add(found, skipped=1)
        add(found)
    expected = {"skipped_steps": [{"step": 10, "entries": [f"9/{place}" for place in LARGEST]}]}
    assert one.report(11) == expected
    assert two[0].report(11) == expected
    assert len(LARGEST) == MAX_NAMED


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_the_largest(value):
    found = window()
    add(found, skipped=1, losses=(*LOSSES[:5], value, *LOSSES[6:]))
    (skipped,) = found.report(1)["skipped_steps"]
    assert skipped["entries"] == [f"0/{place}" for place in (5, 2, 6, 1)]


def test_rows_of_two_ranks_resume_on_one_and_back():
    two, one = of_two(), window()
    for found in two:
        add(found, loss=float(found.places[0]), skipped=1)
    one.load_state_dict(two[0].state_dict())
    assert one.rows[0, 0] == 1.0  # of 0 and 2
    assert one.report(1)["skipped_steps"][0]["entries"] == [f"0/{place}" for place in LARGEST]
    one.start()
    add(one, skipped=1)
    again = of_two()
    for found in again:
        found.load_state_dict(one.state_dict())
        add(found)
    (skipped,) = again[0].report(3)["skipped_steps"]
    assert (skipped["step"], skipped["entries"]) == (2, [f"1/{place}" for place in LARGEST])
