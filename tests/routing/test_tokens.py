import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from routing import end_route, gather_tokens, num_tokens_kept, sample_ids_keep, start_route
from tests.networks import seeded

SHAPES = {"num_samples": st.integers(1, 5), "num_tokens": st.integers(1, 40)}
RATIOS = st.decimals(0, "0.99", places=2).map(float)


@pytest.mark.parametrize(
    ("num_tokens", "ratio", "kept"),
    [
        *[(256, 0.3, 180), (256, 0.5, 128), (256, 0.7, 77), (1024, 0.9, 103)],
        *[(100, 0.29, 71), (64, 0.0, 64), (1, 0.99, 1)],
    ],
)
def test_rounding_follows_the_public_rule(num_tokens, ratio, kept):
    assert num_tokens_kept(num_tokens, ratio) == kept


def test_prefix_tokens_do_not_count_in_the_ratio():
    """With 512 text tokens before 1,024 image tokens, half of the image stays, and all of the text."""
    ids = sample_ids_keep(2, 1024, 0.5, num_prefix_tokens=512)
    assert ids.shape == (2, 512 + 512)
    assert torch.equal(ids[:, :512], torch.arange(512).expand(2, -1))
    assert (ids[:, 512:] >= 512).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"selection_ratio": 1.0}, r"selection_ratio=1\.0 must be in \[0, 1\)"),
        # A likely mistake with 3 prefix tokens: a mask of the joint sequence would be shifted.
        (
            {"force_keep": torch.ones(2, 11).bool(), "num_prefix_tokens": 3},
            r"force_keep=torch.bool \(2, 11\) must be torch.bool \(2, 8\), without the prefix",
        ),
        ({"force_keep": torch.ones(2, 8)}, r"force_keep=torch\.float32 \(2, 8\) must be torch\.bool"),
    ],
)
def test_a_wrong_selection_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        sample_ids_keep(2, 8, **{"selection_ratio": 0.5, **arguments})


def test_a_generator_fixes_the_draw_and_samples_differ():
    """The tokens with the lowest of uniform numbers stay, so that each is kept equally often."""
    ids = sample_ids_keep(8, 64, 0.5, generator=seeded())
    assert torch.equal(ids, torch.rand(8, 64, generator=seeded()).argsort(dim=1)[:, :32].sort(dim=1).values)
    assert not torch.equal(ids, sample_ids_keep(8, 64, 0.5, generator=seeded(1)))
    assert len({tuple(row.tolist()) for row in ids}) == 8


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
@pytest.mark.parametrize("num_tables", [3, 1])
def test_gather_tokens_works_along_any_dimension(dim, num_tables):
    """A table that all samples share becomes one per sample."""
    shape = [num_tables, 4, 5, 6]
    shape[dim] = 9
    x, ids = torch.randn(shape), sample_ids_keep(3, 9, 0.5)
    gathered = gather_tokens(x, ids, dim)
    for of_sample, table, kept in zip(gathered, x.expand(3, -1, -1, -1), ids, strict=True):
        assert torch.equal(of_sample, table.index_select(dim - (dim > 0), kept))


def test_the_residual_stream_keeps_its_precision():
    x = torch.randn(2, 8, 3)
    ids = sample_ids_keep(2, 8, 0.5)
    assert end_route(start_route(x, ids).bfloat16(), ids, x).dtype == torch.float32
