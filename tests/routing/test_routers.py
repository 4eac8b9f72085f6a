"""Routers: properties that all share, and the selection rule of each."""

import re
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from routing import grid_router, norm_router, random_router, row_router
from tests.networks import seeded

SHAPES = {"num_samples": st.integers(1, 5), "num_tokens": st.integers(1, 40), "seed": st.integers(0, 2**32)}
half_norm = partial(norm_router, weight=0.5)
one_long = partial(row_router, length=1)
every_router = pytest.mark.parametrize("router", [random_router, norm_router, half_norm, one_long])


def random_tokens(num_samples, num_tokens, seed):
    """Return tokens (N, T, 1) whose norms contain ties, zeros and large values."""
    scale = 10.0 ** torch.randint(-3, 4, (), generator=seeded(seed))
    x = torch.rand(num_samples, num_tokens, 1, generator=seeded(seed)) * scale
    return torch.where(torch.rand(x.shape, generator=seeded(seed + 1)) < 0.2, x.round(), x)


def random_mask(num_samples, num_tokens, seed):
    """Return masks that range from empty to full."""
    share = torch.rand(num_samples, 1, generator=seeded(seed + 1)) * 1.4 - 0.2
    return torch.rand(num_samples, num_tokens, generator=seeded(seed + 2)) < share


@every_router
@given(**SHAPES, data=st.data())
def test_every_router_keeps_its_number_and_all_forced_tokens_that_fit(
    router, num_samples, num_tokens, seed, data
):
    num_kept = data.draw(st.integers(1, num_tokens))
    x, force_keep = random_tokens(num_samples, num_tokens, seed), random_mask(num_samples, num_tokens, seed)
    ids_keep = router(x, num_kept, force_keep=force_keep, generator=seeded(seed))
    assert ids_keep.dtype == torch.int64
    assert ids_keep.shape == (num_samples, num_kept)
    assert (ids_keep.diff(dim=1) > 0).all()
    kept = torch.zeros_like(force_keep).scatter(1, ids_keep, True)
    for forced, stays in zip(force_keep, kept, strict=True):
        assert stays[forced].all() if forced.sum() <= num_kept else forced[stays].all()


@every_router
def test_given_noise_takes_the_place_of_the_draw(router):
    """Tokens may be in double precision."""
    x, noise = random_tokens(4, 20, 0).double(), torch.rand(4, 20, generator=seeded())
    force_keep = random_mask(4, 20, 0)
    ids_keep = router(x, 8, force_keep=force_keep, generator=seeded())
    assert torch.equal(router(x, 8, force_keep=force_keep, noise=noise), ids_keep)


def test_the_random_router_draws_fp32_whatever_the_tokens_are():
    """In bf16 at most 256 values lie above one half. Most of 4,096 tokens would tie, and low ids win."""
    noise = torch.rand(64, 4096, generator=seeded())
    with torch.autocast("cpu", torch.bfloat16):
        ids_keep = random_router(torch.zeros(64, 4096, 1, dtype=torch.bfloat16), 2048, generator=seeded())
    assert torch.equal(ids_keep, noise.argsort(dim=1)[:, :2048].sort(dim=1).values)


def test_the_random_router_draws_the_forced_tokens_that_do_not_all_fit():
    force_keep = torch.zeros(4000, 12, dtype=torch.bool)
    force_keep[:, :8] = True
    ids_keep = random_router(torch.zeros(4000, 12, 1), 4, force_keep=force_keep, generator=seeded())
    share = torch.bincount(ids_keep.flatten(), minlength=12) / 4000
    assert (share[:8] - 0.5).abs().max() < 0.04
    assert not share[8:].any()


@given(**SHAPES)
def test_the_norm_router_keeps_exactly_the_largest(num_samples, num_tokens, seed):
    x, num_kept = random_tokens(num_samples, num_tokens, seed), (num_tokens + 1) // 2
    kept = x.squeeze(-1).gather(1, norm_router(x, num_kept)).sort(dim=1, descending=True).values
    assert torch.equal(kept, x.squeeze(-1).sort(dim=1, descending=True).values[:, :num_kept])


def test_the_norm_is_l1_in_fp32_without_a_gradient():
    """For 300 channels in bf16, the L2 norm would keep the other token, and bf16 sums would tie."""
    x = torch.zeros(1, 2, 300, dtype=torch.bfloat16)
    x[0, 0], x[0, 1, 0] = 1.0, 100.0
    assert norm_router(x.requires_grad_(), 1).tolist() == [[0]]
    near = torch.ones(1, 2, 300, dtype=torch.bfloat16)
    near[0, 1, 0] = 1.125
    assert norm_router(near, 1).tolist() == [[1]]


def test_the_weight_goes_from_chance_to_the_largest_norm():
    """Half of the tokens with norms 0..99 stay. The mean norm of the kept tokens rises to 74.5."""
    x = torch.arange(100.0).view(1, 100, 1).expand(2000, -1, -1)
    means = [
        norm_router(x, 50, weight=weight, generator=seeded()).float().mean().item()
        for weight in (0.001, 0.25, 0.5, 0.75, 1.0)
    ]
    assert means == sorted(means)
    assert means[0] == pytest.approx(49.5, abs=0.4)
    assert means[-1] == 74.5
    # At equal weights a token stays where noise - score is below the median of a triangular distribution.
    assert means[2] == pytest.approx(66.2, abs=0.3)


def test_norms_are_scaled_for_each_sample():
    """A sample that is 1,000 times as large keeps the same tokens; equal norms are drawn at random."""
    x = torch.rand(3, 50, 1, generator=seeded())
    x[1], x[2] = x[0] * 1000 + 7, 1.0
    noise = torch.rand(1, 50, generator=seeded(1)).expand(3, -1)
    ids_keep = norm_router(x, 25, weight=0.5, noise=noise)
    assert len(set(ids_keep[0].tolist()) & set(ids_keep[1].tolist())) >= 24  # neighbours may swap
    assert torch.equal(ids_keep[2], noise[2].argsort()[:25].sort().values)


@pytest.mark.parametrize("num_kept", [0, 9])
def test_a_number_that_cannot_be_kept_is_refused(num_kept):
    with pytest.raises(ValueError, match=rf"num_kept={num_kept} must be in \[1, 8\]"):
        random_router(torch.zeros(2, 8, 1), num_kept)


@given(side=st.sampled_from([1, 2, 3]), seed=st.integers(0, 2**32), data=st.data())
def test_the_grid_router_takes_from_every_group_before_it_takes_more_of_any(side, seed, data):
    num_kept = data.draw(st.integers(1, 36))
    ids_keep = grid_router(torch.zeros(5, 36, 1), num_kept, side=side, generator=seeded(seed))
    rows, columns = ids_keep // 6 // side, ids_keep % 6 // side
    num_groups = (6 // side) ** 2
    for groups in rows * (6 // side) + columns:
        counts = torch.bincount(groups, minlength=num_groups)
        assert counts.max() - counts.min() <= 1
        assert len(counts) == num_groups


@given(seed=st.integers(0, 2**32), num_kept=st.integers(1, 16))
def test_the_grid_router_keeps_forced_tokens_first(seed, num_kept):
    x, force_keep = torch.zeros(5, 16, 1), random_mask(5, 16, seed)
    ids_keep = grid_router(x, num_kept, force_keep=force_keep, generator=seeded(seed))
    assert (ids_keep.diff(dim=1) > 0).all()
    kept = torch.zeros_like(force_keep).scatter(1, ids_keep, True)
    assert (kept & force_keep).sum(dim=1).tolist() == force_keep.sum(dim=1).clamp(max=num_kept).tolist()
    noise = torch.rand(5, 16, generator=seeded(seed))
    assert torch.equal(grid_router(x, num_kept, force_keep=force_keep, noise=noise), ids_keep)


def test_the_grid_router_keeps_the_lowest_noise_of_each_group():
    noise = torch.rand(3, 16, generator=seeded())
    ids_keep = grid_router(torch.zeros(3, 16, 1), 4, noise=noise)
    lowest = torch.nn.functional.max_pool2d(-noise.view(3, 4, 4), 2).flatten(1)
    assert torch.equal(-noise.gather(1, ids_keep).sort().values, lowest.sort(descending=True).values)


@pytest.mark.parametrize(
    ("router", "num_tokens", "message"),
    [
        (grid_router, 12, "model/router=grid needs a square number of tokens, not 12"),
        (grid_router, 9, "model.router.side=2 must divide the side of the token grid, 3"),
        (partial(grid_router, side=0), 16, "model.router.side=0 must divide the side of the token grid, 4"),
        (partial(norm_router, weight=1.5), 8, "model.router.weight=1.5 must be in (0, 1]"),
        (partial(row_router, length=0), 24, "model.router.length=0 must divide the number of tokens, 24"),
        (partial(row_router, length=5), 24, "model.router.length=5 must divide the number of tokens, 24"),
    ],
)
def test_wrong_options_are_refused(router, num_tokens, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        router(torch.zeros(2, num_tokens, 1), 2)


def test_the_row_router_keeps_whole_rows_and_one_in_part():
    """Here 4 x 6 tokens: rows of a grid, or frames."""
    x = torch.zeros(500, 24, 1)
    ids_keep = row_router(x, 14, length=6, generator=seeded())
    numbers = torch.stack([torch.bincount(ids // 6, minlength=4) for ids in ids_keep])
    assert (numbers.sort(dim=1).values == torch.tensor([0, 2, 6, 6])).all()
    assert ((numbers > 0).float().mean(dim=0) - 0.75).abs().max() < 0.06
    lengths = ({}, {"length": 4})  # by default the side of a square
    assert torch.equal(*(row_router(x[:, :16], 8, generator=seeded(), **length) for length in lengths))
    with pytest.raises(ValueError, match="the row router needs a length"):
        row_router(x, 12)
