import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import sqrtm

from evaluation import FeatureStatistics, KernelDistance, Memorised, PrecisionRecall, frechet_distance
from evaluation.features import FeatureSet
from evaluation.metrics.inception_score import SplitScores
from evaluation.metrics.kernel import _squared_discrepancy
from evaluation.metrics.precision_recall import _squared_distances
from evaluation.statistics import AllFeatures

RNG = np.random.default_rng(0)


def random_covariance(size, rank=None):
    a = RNG.standard_normal((size, rank or 2 * size))
    return a @ a.T / a.shape[1]


def test_frechet_distance_of_gaussians_that_commute():
    mu1, mu2 = np.array([0.0, 1.0, 2.0]), np.array([1.0, 1.0, 0.0])
    s1, s2 = np.array([1.0, 4.0, 0.25]), np.array([9.0, 1.0, 0.25])
    # |mu1 - mu2|^2 + sum (sqrt(s1) - sqrt(s2))^2, in a rotated frame.
    q, _ = np.linalg.qr(RNG.standard_normal((3, 3)))
    expected = ((mu1 - mu2) ** 2).sum() + ((np.sqrt(s1) - np.sqrt(s2)) ** 2).sum()
    got = frechet_distance(q @ mu1, q @ np.diag(s1) @ q.T, q @ mu2, q @ np.diag(s2) @ q.T)
    assert got == pytest.approx(expected)


@pytest.mark.parametrize("ranks", [(30, 30), (30, 4), (4, 30), (4, 4), (1, 30), (60, 60)])
def test_frechet_distance_agrees_with_the_matrix_square_root(ranks):
    s1, s2 = (random_covariance(30, rank) for rank in ranks)
    ridge = 1e-10 * np.eye(30)  # makes the matrix square root of singular matrices defined
    expected = np.trace(s1 + s2 - 2 * sqrtm((s1 + ridge) @ (s2 + ridge)).real)
    one, other = (frechet_distance(np.zeros(30), a, np.ones(30), b) - 30 for a, b in ((s1, s2), (s2, s1)))
    assert one == pytest.approx(expected, abs=2e-3)
    assert one == pytest.approx(other, abs=1e-5)


@pytest.mark.parametrize("rank", [None, 3])
def test_the_distance_of_a_set_from_itself_is_zero(rank):
    for size in (2, 3, 10, 39):
        sigma = random_covariance(size, rank)
        assert 0 <= frechet_distance(np.ones(size), sigma, np.ones(size), sigma) < 1e-5


def test_frechet_distance_takes_tensors_and_refuses_other_shapes():
    identity = torch.eye(3)
    assert frechet_distance(torch.zeros(3), identity, torch.ones(3), identity) == pytest.approx(3)
    with pytest.raises(ValueError, match="cannot be compared"):
        frechet_distance(torch.zeros(3), identity, torch.zeros(4), torch.eye(4))
    with pytest.raises(ValueError, match="must be finite"):
        frechet_distance(torch.zeros(3) / 0, identity, torch.zeros(3), identity)


def inception_score(probs, split_size=5000, device="cpu"):
    return SplitScores(probs.shape[1], device, len(probs), split_size).update(probs, 0).score()


def precision_recall(reference, samples, k=3, exact=False, device="cpu"):
    return PrecisionRecall(exact, k).compare(*(torch.as_tensor(x).to(device) for x in (reference, samples)))


def test_inception_score_closed_forms():
    certain = np.eye(10)[np.arange(1000) % 10]
    assert inception_score(certain) == pytest.approx(10)
    assert inception_score(np.full((1000, 10), 0.1)) == pytest.approx(1)
    # exp(3/4 log(4/3) + 1/4 log(4)): the exponential of the mean, not the mean of exponentials.
    assert inception_score(np.eye(2)[[0, 0, 0, 1]]) == pytest.approx(4 / 3**0.75)
    # Splits are contiguous: a split with one class scores 1. A short last split counts like the others.
    assert inception_score(np.eye(10)[np.repeat(np.arange(10), 100)], split_size=100) == pytest.approx(1)
    assert inception_score(np.eye(2)[[0, 1, 0, 1, 0]], split_size=4) == pytest.approx((2 + 1) / 2)


def plain_distances(a, b, exact=False):
    """|u|^2 - 2 u.v + |v|^2 in fp16 at every step; in fp32 if a distance overflows or with `exact`."""
    with np.errstate(over="ignore", invalid="ignore"):
        u, v = a.astype(np.float16), b.astype(np.float16)
        norm_u, norm_v = (np.square(x).sum(axis=1)[:, None] for x in (u, v))  # numpy sums fp16 in fp32
        product = np.einsum("if,jf->ij", u, v, dtype=np.float32).astype(np.float16)
        d = np.maximum(norm_u - 2 * product + norm_v.T, 0)
        assert d.dtype == np.float16
    if exact or not np.isfinite(d).all():
        d = np.maximum((a**2).sum(1)[:, None] - 2 * (a @ b.T) + (b**2).sum(1)[None], 0)
    return d.astype(np.float32)


def plain_precision_recall(reference, samples, k, block_size, exact=False):
    """The published definition in plain numpy, one pair of blocks at a time."""

    def blocks(x):
        return [x[i : i + block_size] for i in range(0, len(x), block_size)]

    def distances(x, y):
        return np.vstack([np.hstack([plain_distances(a, b, exact) for b in blocks(y)]) for a in blocks(x)])

    reference_radii, sample_radii = (np.sort(distances(x, x), axis=1)[:, k] for x in (reference, samples))
    d = distances(reference, samples)
    return (d <= reference_radii[:, None]).any(0).mean(), (d <= sample_radii[None]).any(1).mean()


def test_fp16_distances_round_in_the_order_of_the_original():
    rng = np.random.default_rng(5)
    # Eighths: fp32 sums are exact in any order. Keep the values whose squares fp16 rounds down the most.
    values = np.arange(300, dtype=np.float32) / 8
    values = values[np.square(values).astype(np.float16) < (1 - 3e-4) * np.square(values)]
    a, b = (rng.choice(values[values < most], (40, 120)) for most in (12, 30))
    norms, in_half = np.square(a).sum(axis=1).astype(np.float16), np.square(a.astype(np.float16)).sum(axis=1)
    assert (norms != in_half).mean() > 0.3
    got = _squared_distances(torch.from_numpy(a), torch.from_numpy(b), exact=False).numpy()
    np.testing.assert_array_equal(got, plain_distances(a, b))
    # The order matters: rows are reference images, columns are samples.
    assert (got != plain_distances(b, a).T).any()


@pytest.mark.parametrize("block_size", [64, 1000])
@pytest.mark.parametrize("scale", [1, 12, 14])
def test_half_precision_distances_agree_with_numpy(block_size, scale, monkeypatch):
    """Integers: fp32 sums are exact. Scale 1 has many ties, at 12 fp16 rounds, at 14 blocks overflow."""
    monkeypatch.setattr("evaluation.metrics.precision_recall.MAX_BLOCK", block_size)
    rng = np.random.default_rng(1)
    reference = np.rint(np.abs(rng.standard_normal((200, 160)) * scale)).astype(np.float32)
    samples = np.rint(np.abs(rng.standard_normal((300, 160)) * scale * 1.05)).astype(np.float32)
    samples[7] *= 2
    expected = plain_precision_recall(reference, samples, 3, block_size)
    got = precision_recall(reference, samples)
    assert got == pytest.approx(expected, abs=1e-12)
    assert 0 < got[0] < 1
    assert 0 < got[1] < 1
    exact = precision_recall(reference, samples, exact=True)
    assert exact == pytest.approx(plain_precision_recall(reference, samples, 3, block_size, exact=True))
    assert (got == exact) == (scale == 1)


@pytest.mark.parametrize("seed", [12, 35])
def test_rows_of_distances_are_reference_images_and_columns_samples(seed):
    """With these numbers fp16 rounds the two orders differently enough to change recall or precision."""
    rng = np.random.default_rng(seed)
    reference, samples = (rng.integers(8, 13, (30, 40)).astype(np.float32) for _ in range(2))
    got = precision_recall(reference, samples)
    assert got == pytest.approx(plain_precision_recall(reference, samples, 3, 1000), abs=1e-12)
    assert got != precision_recall(samples, reference)[::-1]


def test_ties_count_as_inside():
    # Each point's third neighbour is exactly 1 away, and so is the other set: only <= covers it.
    square = np.array([[0, 0], [1, 0], [0, 1], [1, 1]], np.float32)
    assert precision_recall(square * [1, 0], square * [1, 0] + [2, 0], k=2) == (0.5, 0.5)
    assert precision_recall(square * [1, 0], square * [1, 0] + [2.01, 0], k=2, exact=True) == (0.0, 0.0)


def test_kernel_distance_agrees_with_the_library():
    from torch_fidelity.metric_kid import kid_features_to_metric

    rng = np.random.default_rng(2)
    reference = torch.from_numpy(rng.random((300, 64)))
    samples = torch.from_numpy(rng.random((200, 64)) + 0.1)
    options = {"kid_subsets": 400, "kid_subset_size": 100, "verbose": False, "rng_seed": 0}
    theirs = kid_features_to_metric(reference, samples, **options)
    mean, std = KernelDistance(subset_size=100, num_subsets=400).compare(reference, samples)
    assert mean == pytest.approx(theirs["kernel_inception_distance_mean"], rel=0.05)
    assert std == pytest.approx(theirs["kernel_inception_distance_std"], rel=0.2)
    # Compute the whole sets in plain loops, without the terms of a point with itself.
    x, y = reference[:6], samples[:6]
    k = [[((a @ b) / 64 + 1) ** 3 for b in np.vstack([x, y])] for a in np.vstack([x, y])]
    within = sum(k[i][j] + k[6 + i][6 + j] for i in range(6) for j in range(6) if i != j) / 30
    across = sum(k[i][6 + j] for i in range(6) for j in range(6)) / 36
    assert _squared_discrepancy(x, y) == pytest.approx(float(within - 2 * across), abs=1e-12)


def test_the_seed_determines_the_subsets_of_a_kernel_distance():
    rng = np.random.default_rng(3)
    sets = [torch.from_numpy(rng.random((count, 8))) for count in (30, 20)]

    def distance(num_subsets, seed):
        return KernelDistance("kd", "x", 9, num_subsets, seed).compare(*sets)

    assert distance(5, 0) == distance(5, 0) != distance(5, 1)
    assert distance(1, 0)[0] != distance(5, 0)[0], "the subsets differ"


@settings(max_examples=30, deadline=None)
@given(batches=st.integers(1, 9), offset=st.sampled_from([0.0, 1000.0]))
def test_statistics_of_parts_add_up(batches, offset):
    rng = np.random.default_rng(batches)
    features = rng.standard_normal((37, 5)) * 3 + offset
    probs = rng.dirichlet(np.ones(6), 37)
    whole, scores, start = FeatureStatistics(5), SplitScores(6, "cpu", 37, split_size=10), 0
    for part in np.array_split(np.arange(37), batches):
        whole.update(features[part])
        scores.update(probs[part], start)
        start += len(part)
    assert whole.count == 37
    np.testing.assert_allclose(whole.mean, features.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(whole.covariance, np.cov(features.T), rtol=1e-9)
    assert scores.score() == pytest.approx(inception_score(probs, split_size=10), rel=1e-12)


def test_statistics_need_two_features():
    with pytest.raises(ValueError, match=r"covariance of 1 feature\(s\) is not defined"):
        _ = FeatureStatistics(3).update(np.zeros((1, 3))).covariance


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_statistics_and_scores_agree_between_gpu_and_cpu():
    rng = np.random.default_rng(6)
    reference, samples = (
        np.rint(np.abs(rng.standard_normal((n, 160)) * 12)).astype(np.float32) for n in (200, 300)
    )
    assert precision_recall(reference, samples, device="cuda") == precision_recall(reference, samples)
    torch.backends.cuda.matmul.allow_tf32 = True  # as in training and sampling
    a, b = (torch.from_numpy(rng.standard_normal((40, 160)).astype(np.float32)) for _ in range(2))
    exact = _squared_distances(a.cuda(), b.cuda(), exact=True).cpu()
    torch.testing.assert_close(exact, _squared_distances(a, b, exact=True), rtol=1e-5, atol=1e-5)
    on_gpu, on_cpu = (
        FeatureStatistics(160, device).update(torch.from_numpy(samples)) for device in ("cuda", "cpu")
    )
    torch.testing.assert_close(on_gpu.covariance.cpu(), on_cpu.covariance)
    probs = torch.from_numpy(rng.dirichlet(np.ones(6), 37))
    expected = inception_score(probs, split_size=10)
    assert inception_score(probs, split_size=10, device="cuda") == pytest.approx(expected)


def features_of(array):
    return FeatureSet({(AllFeatures, "x"): AllFeatures(array.shape[1]).update(array, 0)})


def test_precision_and_recall_of_equal_sizes_use_a_random_part_of_the_larger_set():
    rng = np.random.default_rng(0)
    few, many = (rng.standard_normal((size, 8)) for size in (200, 2000))
    part = many[np.sort(np.random.default_rng(0).permutation(2000)[:200])]
    options = {"exact": True, "features": "x"}
    plain, equal = PrecisionRecall(**options), PrecisionRecall(**options, max_images=10_000)
    for pair, expected in (((many, few), (part, few)), ((few, many), (few, part))):
        scores = equal(*map(features_of, pair))
        assert scores == plain(*map(features_of, expected)) != plain(*map(features_of, pair))
    assert equal(*map(features_of, (few, part))) == plain(*map(features_of, (few, part)))


def test_a_copy_is_three_times_nearer_to_one_training_image_than_to_the_others():
    training = np.array([[0.0, 0], [4, 0], [0, 100], [0, 100]])
    samples = {(0, 0): 1, (0.9, 0): 1, (1.1, 0): 0, (2, 0): 0, (3.2, 0): 1, (0, 100): 1, (0, 99): 0}
    for sample, expected in samples.items():
        drawn = np.array([sample, (2, 0)], float)
        share = Memorised("x")(features_of(training), features_of(drawn))
        assert share == {"memorised": expected / 2}, sample
    assert not Memorised("x").higher_is_better
