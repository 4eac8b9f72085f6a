import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from routing import Route, RoutePlan, grow_ratio, num_tokens_kept, sample_ids_keep

ROUTES = (Route(0.5, 2, 4), Route(0.2, 5, 6))
RATIOS = st.decimals(0, "0.99", places=2).map(float)


def plan(routes=ROUTES, num_tokens=64, total_steps=100, **options):
    return RoutePlan(routes, num_tokens, total_steps, **options)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", [0.5, 0.3333, 0.1667, 0.0]),
        # Factors (1 + cos(pi i / 3)) / 2: 1, 0.75, 0.25, 0.
        ("cosine", [0.5, 0.375, 0.125, 0.0]),
    ],
)
def test_a_schedule_takes_a_few_levels_of_equal_length(schedule, expected):
    assert {plan().ratios(step) for step in range(100)} == {(0.5, 0.2)}  # constant
    ratios = [plan(schedule=schedule, end_factor=0).ratios(step)[0] for step in range(100)]
    assert [ratios[i] for i in (0, 24, 25, 49, 50, 74, 75, 99)] == [r for r in expected for _ in (0, 1)]
    assert len(set(ratios)) == 4
    before_the_dense = plan(schedule=schedule, end_factor=0.4, off_last_steps=20)
    assert [before_the_dense.ratios(step)[0] for step in (0, 19, 60)] == [0.5, 0.5, 0.2]


def test_a_schedule_may_rise_and_all_routes_follow_it():
    rising = plan(schedule="linear", start_factor=0, end_factor=1.5, num_levels=2)
    assert rising.ratios(0) == (0.0, 0.0)
    assert rising.ratios(99) == (0.75, 0.3)


@given(
    levels=st.integers(2, 6),
    total_steps=st.integers(1, 50),
    off=st.integers(0, 50),
    schedule=st.sampled_from(["linear", "cosine"]),
    end=st.floats(0, 1),
)
def test_levels_bound_the_lengths_and_the_last_steps_are_dense(levels, total_steps, off, schedule, end):
    off = min(off, total_steps) or None
    options = {"schedule": schedule, "num_levels": levels, "end_factor": end, "off_last_steps": off}
    scheduled = plan(total_steps=total_steps, **options)
    ratios = [scheduled.ratios(step) for step in range(total_steps)]
    assert len({r for r, _ in ratios[: total_steps - (off or 0)]}) <= levels
    assert all(r == (0.0, 0.0) for r in ratios[total_steps - (off or 0) :])
    assert [r for r, _ in ratios] == sorted([r for r, _ in ratios], reverse=True)
    lengths = {num_tokens_kept(64, r) for pair in ratios for r in pair}
    assert lengths <= scheduled.lengths(with_force_keep=False)


def test_lengths_are_exactly_the_lengths_of_steps():
    """0.5 and 0.2 keep 32 and 52 of 64 tokens; in steps of a quarter less, 40, 48, 56 and 55, 58, 61."""
    assert plan().lengths(with_force_keep=False) == {32, 52, 64}
    assert plan().lengths(with_force_keep=True) == {32, 40, 48, 56, 52, 55, 58, 61, 64}
    assert plan(force_keep_overflow="bypass").lengths(with_force_keep=True) == {32, 52, 64}
    annealed = plan(schedule="linear", end_factor=0.5, num_levels=2)
    assert annealed.lengths(with_force_keep=False) == {32, 48, 52, 58, 64}


@given(num_tokens=st.integers(1, 300), ratio=RATIOS, forced=st.integers(0, 300))
def test_grow_takes_the_next_of_a_few_sizes(num_tokens, ratio, forced):
    """The smallest of at most five sizes that holds the kept tokens and all forced ones."""
    forced = min(forced, num_tokens)
    sizes = {num_tokens_kept(num_tokens, grow_ratio(ratio, num_tokens, n)) for n in range(num_tokens + 1)}
    assert len(sizes) <= 5
    assert num_tokens in sizes
    size = num_tokens_kept(num_tokens, grow_ratio(ratio, num_tokens, forced))
    assert size == min(s for s in sizes if s >= max(forced, num_tokens_kept(num_tokens, ratio)))


@given(seed=st.integers(0, 2**32), ratio=RATIOS, num_tokens=st.integers(1, 40))
def test_under_grow_no_forced_token_ever_bypasses(seed, ratio, num_tokens):
    generator = torch.Generator().manual_seed(seed)
    force_keep = torch.rand(4, num_tokens, generator=generator) < torch.rand(4, 1, generator=generator) * 1.2
    growing = plan((Route(ratio, 0, 1),), num_tokens)
    ratios = growing.ratios(0, num_forced=int(force_keep.sum(dim=1).max()))
    ids = sample_ids_keep(4, num_tokens, ratios[0], force_keep=force_keep)
    assert torch.zeros_like(force_keep).scatter(1, ids, True)[force_keep].all()
    assert growing.num_forced_bypassed(force_keep, ratios) == 0
    assert ids.shape[1] in growing.lengths(with_force_keep=True)


def test_under_grow_a_full_mask_makes_the_step_dense():
    assert plan().ratios(0, num_forced=64) == (0.0, 0.0)
    assert plan().ratios(0, num_forced=33) == (0.375, 0.2)
    with pytest.raises(ValueError, match="num_forced=17 must be at most num_tokens=16"):
        grow_ratio(0.5, 16, 17)


def test_under_bypass_nothing_grows_and_what_does_not_fit_is_counted():
    bypassing = plan(force_keep_overflow="bypass")
    assert bypassing.ratios(0, num_forced=64) == (0.5, 0.2)
    force_keep = torch.zeros(3, 64, dtype=torch.bool)
    force_keep[0] = True
    force_keep[1, :40] = True
    # Windows of 32 and 52 tokens: 32 + 12 forced tokens of the first sample bypass, and 8 of the second.
    assert bypassing.num_forced_bypassed(force_keep, bypassing.ratios(0)).item() == 32 + 12 + 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"end_factor": 0.5}, r"routing\.end_factor=0\.5 needs routing\.schedule=linear or cosine"),
        ({"schedule": "linear", "start_factor": -1}, r"routing\.start_factor=-1 times"),
        # The ratio rounds up to 1.
        ({"schedule": "linear", "end_factor": 1.9999}, r"end_factor=1\.9999 times selection_ratio=0\.5"),
        ({"off_last_steps": 0}, r"routing\.off_last_steps=0 must be in \[1, 100\]"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        plan(**options)


def test_a_plan_describes_itself():
    assert plan().describe(False) == [
        "32 of 64 tokens bypass blocks 2 to 4 while training",
        "12 of 64 tokens bypass blocks 5 to 6 while training",
    ]
    scheduled = plan((Route(0.5, 2, 4),), schedule="linear", end_factor=0.5, num_levels=2, off_last_steps=10)
    assert scheduled.describe(True) == [
        "32 of 64 tokens bypass blocks 2 to 4 while training, fewer if masks force more to stay",
        "ratio 0.5 -> 0.25 over 90 steps, then 10 dense steps",
    ]
    assert plan(()).describe(False) == []
