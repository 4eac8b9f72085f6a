import numpy as np
import pytest
import torch

from evaluation import FeatureStatistics, frechet_distance, inception_score, precision_recall

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


def test_frechet_distance_agrees_with_the_matrix_square_root():
    from scipy.linalg import sqrtm

    s1, s2 = random_covariance(12), random_covariance(12)
    expected = np.trace(s1 + s2 - 2 * sqrtm(s1 @ s2).real)
    assert frechet_distance(np.zeros(12), s1, np.zeros(12), s2) == pytest.approx(expected)


def test_frechet_distance_of_singular_covariances():
    singular = random_covariance(20, rank=5)
    assert frechet_distance(np.zeros(20), singular, np.zeros(20), singular) == pytest.approx(0, abs=1e-5)
    assert frechet_distance(np.zeros(20), np.zeros((20, 20)), np.ones(20), singular) == pytest.approx(20 + np.trace(singular))


def test_frechet_distance_takes_tensors_and_refuses_what_it_can_not_compare():
    identity = torch.eye(3)
    assert frechet_distance(torch.zeros(3), identity, torch.ones(3), identity) == pytest.approx(3)
    with pytest.raises(ValueError, match="can not be compared"):
        frechet_distance(torch.zeros(3), identity, torch.zeros(4), torch.eye(4))
    with pytest.raises(ValueError, match="must be finite"):
        frechet_distance(torch.zeros(3) / 0, identity, torch.zeros(3), identity)


def test_inception_score_closed_forms():
    certain = np.eye(10)[np.arange(1000) % 10]
    assert inception_score(certain) == pytest.approx(10)
    assert inception_score(np.full((1000, 10), 0.1)) == pytest.approx(1)
    # Splits are contiguous and in order: sorted classes score 1 in each split of one class; a short split counts.
    assert inception_score(np.eye(10)[np.repeat(np.arange(10), 100)], split_size=100) == pytest.approx(1)
    assert inception_score(np.eye(2)[[0, 1, 0, 1, 0]], split_size=4) == pytest.approx((2 + 1) / 2)


def brute_force_precision_recall(reference, samples, k):
    def radii(x):
        return np.sort(((x[:, None] - x[None]) ** 2).sum(-1), axis=1)[:, k]

    distances = ((samples[:, None] - reference[None]) ** 2).sum(-1)
    precision = (distances <= radii(reference)[None]).any(axis=1).mean()
    recall = (distances <= radii(samples)[:, None]).any(axis=0).mean()
    return precision, recall


@pytest.mark.parametrize("block_size", [7, 1000])
def test_precision_and_recall_agree_with_brute_force(block_size):
    # Whole numbers: distances are exact in fp16 as well.
    reference = RNG.integers(-5, 6, (60, 4)).astype(np.float32)
    samples = RNG.integers(-3, 8, (45, 4)).astype(np.float32)
    expected = brute_force_precision_recall(reference, samples, k=3)
    for exact in (False, True):
        assert precision_recall(reference, samples, exact=exact, block_size=block_size) == pytest.approx(expected)


def test_precision_and_recall_of_extremes():
    x = RNG.standard_normal((50, 3)).astype(np.float32)
    assert precision_recall(x, x) == (1.0, 1.0)
    assert precision_recall(x, x + 100) == (0.0, 0.0)
    # Distances that overflow fp16 are taken in fp32.
    assert precision_recall(x * 1e4, x * 1e4) == (1.0, 1.0)


def test_precision_and_recall_refuse_small_sets():
    x = np.zeros((3, 2), np.float32)
    with pytest.raises(ValueError, match="3 reference features must be more than k=3"):
        precision_recall(x, np.zeros((9, 2), np.float32))
    with pytest.raises(ValueError, match="feature lengths 2 and 4"):
        precision_recall(x, np.zeros((9, 4), np.float32))


def test_running_statistics_agree_with_numpy():
    features = RNG.standard_normal((101, 5)) * 3 + 1000
    statistics = FeatureStatistics(5)
    for batch in np.array_split(features, [1, 40, 41]):
        statistics.update(batch)
    np.testing.assert_allclose(statistics.mean, features.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(statistics.covariance, np.cov(features.T), rtol=1e-9)
