import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from routing import end_route, gather_tokens, num_tokens_kept, sample_ids_keep, start_route, token_importance
from routing.tokens import _order

SHAPES = {"num_samples": st.integers(1, 5), "num_tokens": st.integers(1, 40)}
RATIOS = st.decimals(0, "0.99", places=2).map(float)
SEEDS = st.integers(0, 2**32)
WEIGHTS = st.sampled_from([0.0, 0.3, 1.0])


def random_scores(num_samples, num_tokens, seed):
    """Scores with ties, zeros and large values among them."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_samples, num_tokens, generator=generator) * 10 ** torch.randint(
        -3, 4, (), generator=generator
    )
    return torch.where(torch.rand(scores.shape, generator=generator) < 0.2, scores.round(), scores)


def random_mask(num_samples, num_tokens, seed):
    """Masks from empty to full."""
    generator = torch.Generator().manual_seed(seed + 1)
    share = torch.rand(num_samples, 1, generator=generator) * 1.4 - 0.2
    return torch.rand(num_samples, num_tokens, generator=generator) < share


@pytest.mark.parametrize(
    ("num_tokens", "ratio", "kept"),
    [
        (256, 0.3, 180),
        (256, 0.5, 128),
        (256, 0.7, 77),
        (1024, 0.9, 103),
        (100, 0.29, 71),
        (64, 0.0, 64),
        (1, 0.99, 1),
    ],
)
def test_rounding_follows_the_public_rule(num_tokens, ratio, kept):
    assert num_tokens_kept(num_tokens, ratio) == kept


@given(
    **SHAPES,
    ratio=RATIOS,
    weight=st.sampled_from([0.0, 0.3, 1.0]),
    prefix=st.integers(0, 3),
    seed=SEEDS,
    force=st.booleans(),
)
def test_kept_tokens_are_unique_ascending_and_in_range(
    num_samples, num_tokens, ratio, weight, prefix, seed, force
):
    ids = sample_ids_keep(
        num_samples,
        num_tokens,
        ratio,
        importance=random_scores(num_samples, num_tokens, seed),
        importance_weight=weight,
        force_keep=random_mask(num_samples, num_tokens, seed) if force else None,
        num_prefix_tokens=prefix,
    )
    assert ids.dtype == torch.int64
    assert ids.shape == (num_samples, prefix + num_tokens_kept(num_tokens, ratio))
    assert (ids.diff(dim=1) > 0).all()
    assert ids.min() >= 0
    assert ids.max() < prefix + num_tokens
    assert (ids[:, :prefix] == torch.arange(prefix)).all()


@given(**SHAPES, ratio=RATIOS, seed=SEEDS)
def test_importance_one_keeps_exactly_the_most_important(num_samples, num_tokens, ratio, seed):
    scores = random_scores(num_samples, num_tokens, seed)
    ids = sample_ids_keep(num_samples, num_tokens, ratio, importance=scores, importance_weight=1)
    kept = scores.gather(1, ids).sort(dim=1, descending=True).values
    expected = scores.sort(dim=1, descending=True).values[:, : ids.shape[1]]
    assert torch.equal(kept, expected)


def test_importance_weight_goes_from_chance_to_the_most_important():
    """Of 100 tokens of importance 0..99, half stay: the mean importance of those that do rises from 49.5 to
    74.5.
    """
    importance = torch.arange(100.0).expand(2000, -1)

    def mean_kept(weight):
        generator = torch.Generator().manual_seed(0)
        ids = sample_ids_keep(
            2000, 100, 0.5, generator=generator, importance=importance, importance_weight=weight
        )
        return importance.gather(1, ids).mean().item()

    means = [mean_kept(weight) for weight in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert means == sorted(means)
    assert means[0] == pytest.approx(49.5, abs=0.3)
    assert means[-1] == 74.5
    # At equal weights a token stays where noise - score is below the median of a triangular distribution.
    assert means[2] == pytest.approx(66.2, abs=0.3)


@pytest.mark.parametrize("weight", [0.0, 0.5])
def test_importance_is_scaled_for_each_sample(weight):
    """A sample whose tokens are a thousand times as large is drawn like the others; a constant one is drawn
    at random.
    """
    importance = torch.rand(1, 50).expand(3, -1).clone()
    importance[1] = importance[1] * 1000 + 7
    noise = torch.rand(1, 50).expand(3, -1)
    order = _order(noise, importance, weight, None)
    assert (order[0] == order[1]).float().mean() > 0.9  # neighbours may change places by rounding
    constant = _order(noise, torch.ones(3, 50), weight, None)
    assert torch.equal(constant, noise.argsort(dim=1))


def test_importance_is_the_l1_norm_in_fp32_without_a_gradient():
    x = torch.randn(2, 5, 300).bfloat16().requires_grad_()
    importance = token_importance(x)
    assert importance.dtype == torch.float32
    assert not importance.requires_grad
    torch.testing.assert_close(importance, x.detach().float().abs().sum(dim=-1))


@given(**SHAPES, ratio=RATIOS, seed=SEEDS, weight=WEIGHTS)
def test_forced_tokens_stay_wherever_they_fit(num_samples, num_tokens, ratio, seed, weight):
    force_keep, scores = (
        random_mask(num_samples, num_tokens, seed),
        random_scores(num_samples, num_tokens, seed),
    )
    ids = sample_ids_keep(
        num_samples, num_tokens, ratio, importance=scores, importance_weight=weight, force_keep=force_keep
    )
    kept = torch.zeros_like(force_keep).scatter(1, ids, True)
    for sample in range(num_samples):
        forced = force_keep[sample]
        if forced.sum() <= ids.shape[1]:
            assert kept[sample][forced].all()
        else:
            # Exactly the K most important of the forced tokens, and nothing else.
            assert forced[kept[sample]].all()
            stay = scores[sample][kept[sample]].sort(descending=True).values
            assert torch.equal(stay, scores[sample][forced].sort(descending=True).values[: ids.shape[1]])


@given(**SHAPES, ratio=RATIOS, seed=SEEDS)
def test_the_other_tokens_of_a_masked_sample_are_drawn_as_without_a_mask(
    num_samples, num_tokens, ratio, seed
):
    """An empty mask changes nothing, and one full sample leaves the draws of the others alone."""
    draw = {"generator": None, "importance": random_scores(num_samples, num_tokens, seed)}
    plain = sample_ids_keep(
        num_samples, num_tokens, ratio, **{**draw, "generator": torch.Generator().manual_seed(seed)}
    )
    mask = torch.zeros(num_samples, num_tokens, dtype=torch.bool)
    for fill in (False, True):
        mask[0] = fill
        masked = sample_ids_keep(
            num_samples,
            num_tokens,
            ratio,
            **{**draw, "generator": torch.Generator().manual_seed(seed)},
            force_keep=mask,
        )
        assert torch.equal(masked[1:], plain[1:])
        assert fill or torch.equal(masked[0], plain[0])


def test_without_importance_the_forced_tokens_that_stay_are_drawn_at_random():
    force_keep = torch.ones(4000, 8, dtype=torch.bool)
    ids = sample_ids_keep(4000, 8, 0.5, generator=torch.Generator().manual_seed(0), force_keep=force_keep)
    share = torch.bincount(ids.flatten(), minlength=8) / 4000
    assert (share - 0.5).abs().max() < 0.04


@pytest.mark.parametrize("num_kept", [1, 5, 9])
def test_the_number_of_kept_tokens_can_be_given(num_kept):
    assert sample_ids_keep(2, 9, 0.5, num_kept=num_kept).shape == (2, num_kept)


def test_prefix_tokens_do_not_count_in_the_ratio():
    """512 text tokens before 1,024 image tokens: half of the image stays, and all of the text."""
    ids = sample_ids_keep(2, 1024, 0.5, num_prefix_tokens=512)
    assert ids.shape == (2, 512 + 512)
    assert (ids[:, 512:] >= 512).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"importance_weight": 1.5}, r"importance_weight=1\.5 must be in \[0, 1\]"),
        ({"importance_weight": 0.5}, r"importance_weight=0\.5 needs the importance"),
        ({"selection_ratio": 1.0}, r"selection_ratio=1\.0 must be in \[0, 1\)"),
        ({"num_kept": 9}, r"num_kept=9 must be in \[1, 8\]"),
        ({"num_kept": 0}, r"num_kept=0 must be in \[1, 8\]"),
        # What a joint sequence of 3 prefix tokens tempts to: indices would be shifted.
        (
            {"force_keep": torch.ones(2, 11).bool(), "num_prefix_tokens": 3},
            r"force_keep of shape \(2, 11\) must be of shape \(2, 8\)",
        ),
        (
            {"importance": torch.ones(2, 11), "num_prefix_tokens": 3},
            r"importance of shape \(2, 11\) must be .* without the prefix",
        ),
        ({"force_keep": torch.ones(2, 8)}, r"force_keep of torch\.float32 must be of torch\.bool"),
    ],
)
def test_wrong_selection_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        sample_ids_keep(2, 8, **{"selection_ratio": 0.5, **arguments})


def test_noise_is_fp32_whatever_the_autocast():
    """In bf16 at most 256 values lie above one half: of 4,096 tokens most would tie, and low positions would
    win.
    """
    with torch.autocast("cpu", torch.bfloat16):
        ids = sample_ids_keep(64, 4096, 0.5, generator=torch.Generator().manual_seed(0))
    plain = sample_ids_keep(64, 4096, 0.5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ids, plain)
    noise = torch.rand(64, 4096, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    assert torch.equal(ids, noise.argsort(dim=1)[:, :2048].sort(dim=1).values)


def test_every_token_is_kept_equally_often():
    ids = sample_ids_keep(20_000, 10, 0.5, generator=torch.Generator().manual_seed(0))
    share = torch.bincount(ids.flatten(), minlength=10) / 20_000
    # Standard deviation of each share: sqrt(0.25 / 20000) = 0.0035.
    assert (share - 0.5).abs().max() < 0.018


def test_a_generator_fixes_the_draw_and_samples_differ():
    draw = [sample_ids_keep(8, 64, 0.5, generator=torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert torch.equal(draw[0], draw[1])
    assert not torch.equal(draw[0], draw[2])
    assert len({tuple(row.tolist()) for row in draw[0]}) == 8


@given(**SHAPES, ratio=RATIOS)
def test_an_identity_window_changes_nothing(num_samples, num_tokens, ratio):
    x = torch.randn(num_samples, num_tokens, 3)
    ids = sample_ids_keep(num_samples, num_tokens, ratio)
    assert torch.equal(end_route(start_route(x, ids), ids, x), x)


@given(**SHAPES, ratio=RATIOS)
def test_start_and_end_agree_with_a_loop(num_samples, num_tokens, ratio):
    x = torch.randn(num_samples, num_tokens, 3)
    ids = sample_ids_keep(num_samples, num_tokens, ratio)
    routed = start_route(x, ids)
    processed = routed * 2 + 1
    expected = x.clone()
    for sample, row in enumerate(ids.tolist()):
        for position, token in enumerate(row):
            assert torch.equal(routed[sample, position], x[sample, token])
            expected[sample, token] = processed[sample, position]
    assert torch.equal(end_route(processed, ids, x), expected)


@pytest.mark.parametrize("dim", [1, 2, 3, -1, -2])
def test_gather_tokens_works_along_any_dimension(dim):
    shape = [2, 4, 5, 6]
    shape[dim] = 9
    x = torch.randn(shape)
    ids = sample_ids_keep(2, 9, 0.5)
    gathered = gather_tokens(x, ids, dim)
    for sample in range(2):
        assert torch.equal(gathered[sample], x[sample].index_select(dim - (dim > 0), ids[sample]))


def test_a_table_that_all_samples_share_becomes_one_for_each():
    table = torch.randn(1, 9, 4)
    ids = sample_ids_keep(3, 9, 0.5)
    gathered = gather_tokens(table, ids)
    assert gathered.shape == (3, ids.shape[1], 4)
    for sample in range(3):
        assert torch.equal(gathered[sample], table[0, ids[sample]])


def test_the_residual_stream_keeps_its_precision():
    x = torch.randn(2, 8, 3)
    ids = sample_ids_keep(2, 8, 0.5)
    assert end_route(start_route(x, ids).bfloat16(), ids, x).dtype == torch.float32
