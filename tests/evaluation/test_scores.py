"""Scores after FID against transcriptions of their definitions, closed forms, and published values."""

import os

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cdist

from evaluation import Authenticity, Cmmd, DensityCoverage, KernelDistance, LabelAccuracy, VendiScore
from evaluation.detectors.encoders import EncoderDetector
from evaluation.features import FeatureSet
from evaluation.intervals import standard_errors
from evaluation.metrics import FeatureMetric, neighbours
from evaluation.metrics.frechet import FrechetDistance, frechet_distance
from evaluation.metrics.frechet_infinite import InfiniteFrechetDistance
from evaluation.metrics.frechet_ratio import FrechetRatio
from evaluation.metrics.precision_recall import PrecisionRecall
from evaluation.reference import Gaussian
from evaluation.statistics import AllFeatures, FeatureStatistics
from tests.evaluation.test_metrics import features_of


def features(n, size=6, shift=0.0, seed=0):
    return np.random.default_rng(seed).standard_normal((n, size)) + shift


def feature_set(x, name="x", labels=None):
    kinds = (AllFeatures, FeatureStatistics)
    found = {(kind, name): kind(x.shape[-1], "cpu").update(x, 0) for kind in kinds if x.ndim > 1}
    found = found or {(AllFeatures, name): AllFeatures(1).update(x, 0)}
    return FeatureSet(found, labels=labels)


def compare(metric, *sets):
    return metric.compare(*(torch.as_tensor(features) for features in sets))


def vendi_score(x):
    return VendiScore("x")(FeatureSet(), features_of(x))["vendi"]


@pytest.mark.parametrize("sizes", [(40, 30), (30, 1100)])
def test_density_and_coverage_follow_their_definition(sizes, monkeypatch):
    monkeypatch.setattr(neighbours, "MAX_DISTANCES", 1000)  # several blocks of rows
    real, fake = features(sizes[0]), features(sizes[1], shift=0.4, seed=1)
    within, between = cdist(real, real), cdist(real, fake)
    radii = np.sort(within, axis=1)[:, 5]  # [0] is the image itself
    inside = between < radii[:, None]
    expected = inside.sum() / (5 * sizes[1]), inside.any(axis=1).mean()
    assert compare(DensityCoverage("x"), real, fake) == pytest.approx(expected)
    assert 0 < expected[1] < 1 or sizes[1] > sizes[0]


def test_density_and_coverage_of_extremes():
    real = features(50)
    metric = DensityCoverage("x")
    assert compare(metric, real, real) == (1, 1)
    assert compare(metric, real, real + 100) == (0, 0)
    # One sample many times: it covers the balls around it alone.
    _, coverage = compare(metric, real, real[:1].repeat(50, axis=0))
    assert coverage == (cdist(real, real[:1])[:, 0] < np.sort(cdist(real, real), axis=1)[:, 5]).mean() < 0.5
    # On a line, with k = 1: the balls of 0, 1 and 3 have the radii 1, 1 and 2. A border is outside.
    line = np.array([[0.0], [1.0], [3.0]])
    assert compare(DensityCoverage("x", k=1), line, np.array([[1.5], [2.0]])) == (3 / 2, 2 / 3)
    with pytest.raises(ValueError, match=r"metrics: k=0 must be greater"):
        DensityCoverage("x", k=0)


def test_authenticity_follows_its_definition():
    real, fake = features(60), features(40, shift=0.3, seed=1)
    fake[:5] = real[:5]
    between, within = cdist(fake, real), cdist(real, real) + np.diag(np.full(60, np.inf))
    closest = between.argmin(axis=1)
    expected = (between.min(axis=1) > within.min(axis=1)[closest]).mean()
    assert compare(Authenticity("x"), real, fake) == (pytest.approx(expected),)
    assert 0 < expected < 1


def test_copies_of_the_training_set_have_authenticity_0_and_new_images_about_a_half():
    real = features(300, 3) + 1e7  # far from 0, where |a|^2 - 2 a b + |b|^2 would round
    metric = Authenticity("x")
    assert compare(metric, real, real) == (0,)
    assert compare(metric, np.concatenate([real, real]), real) == (0,), "the training set has duplicates"
    assert compare(metric, real, features(300, 3, seed=1) + 1e7) == (pytest.approx(0.5, abs=0.1),)


def test_cmmd_follows_its_definition(monkeypatch):
    monkeypatch.setattr(neighbours, "MAX_DISTANCES", 10_000)
    x, y = features(1200), features(30, shift=0.5, seed=1)
    unit_x, unit_y = (a / np.linalg.norm(a, axis=1, keepdims=True) for a in (x, y))

    def kernel(a, b):
        return np.exp(-cdist(a, b, "sqeuclidean") / 200).mean()  # 2 * 10^2

    expected = 1000 * (kernel(unit_x, unit_x) + kernel(unit_y, unit_y) - 2 * kernel(unit_x, unit_y))
    assert compare(Cmmd("x"), x, y) == (pytest.approx(expected, rel=1e-9),) and expected > 0
    assert compare(Cmmd("x"), x, x) == (pytest.approx(0, abs=1e-9),)
    # Opposite unit vectors: |a - b|^2 = 4
    opposite = compare(Cmmd("x"), [[3.0, 0.0]], [[-0.5, 0.0]])
    assert opposite == (pytest.approx(1000 * (2 - 2 * np.exp(-0.02))),)


def test_the_vendi_score_of_orthogonal_and_equal_features():
    assert vendi_score(np.eye(7) * 3) == pytest.approx(7)
    assert vendi_score(np.ones((9, 4))) == pytest.approx(1)
    assert vendi_score(np.eye(3)[[0, 0, 1, 1, 2, 2]]) == pytest.approx(3)
    for shape in ((20, 50), (50, 20)):
        x = features(*shape)
        unit = x / np.linalg.norm(x, axis=1, keepdims=True)
        values = np.linalg.eigvalsh(unit @ unit.T / len(x))
        values = values[values > 1e-12]
        assert vendi_score(x) == pytest.approx(np.exp(-(values * np.log(values)).sum()))
    for wrong in (np.zeros((3, 2)), np.full((3, 2), np.nan), np.ones((0, 2)), np.ones((2, 2, 2))):
        with pytest.raises(ValueError, match=r"of the Vendi score must be \(number of images,"):
            vendi_score(wrong)


def test_the_infinite_frechet_distance_removes_the_bias_of_few_samples():
    mean, covariance = np.zeros(20), np.eye(20)
    gaussian = FeatureSet({(FeatureStatistics, "x"): Gaussian(mean, covariance)})
    exact = 20 * 0.1**2  # of the Gaussians
    samples = features(3000, 20, shift=0.1, seed=3)
    finite = frechet_distance(samples.mean(0), np.cov(samples.T), mean, covariance)
    small = samples[:300]
    at_300 = frechet_distance(small.mean(0), np.cov(small.T), mean, covariance)
    got = InfiniteFrechetDistance("fd", "x")(gaussian, feature_set(samples))["fd"]
    assert abs(got - exact) < 0.05 < abs(at_300 - exact)
    assert abs(got - exact) < abs(finite - exact)
    # The published rule: 15 counts from min(5000, n / 10) to n, a line in 1 / count.
    counts, rng = np.linspace(300, 3000, 15).astype(int), np.random.default_rng(0)
    parts = [samples[rng.choice(3000, count, replace=False)] for count in counts]
    values = [frechet_distance(part.mean(0), np.cov(part.T), mean, covariance) for part in parts]
    slope_and_intercept = np.linalg.lstsq(np.stack([1 / counts, np.ones(15)], 1), values, rcond=None)[0]
    assert got == pytest.approx(slope_and_intercept[1], rel=1e-6)


def test_the_frechet_ratio_is_the_mean_over_encoders():
    names, sets = ("a", "b"), []
    for shift in (0.0, 0.5):
        parts = [feature_set(features(50, shift=shift, seed=i), name) for i, name in enumerate(names)]
        sets.append(FeatureSet(parts[0].statistics | parts[1].statistics))
    one, other = (FrechetDistance(name, name)(*sets)[name] for name in names)
    metric = FrechetRatio("fdr", {"a": 2.0, "b": 0.5})
    assert metric(*sets) == pytest.approx({"fdr": (one / 2 + other / 0.5) / 2, "fd_a": one, "fd_b": other})
    for wrong, message in (({}, "must have a distance"), ({"a": 0.0}, r"of_validation\.a=0\.0 must be")):
        with pytest.raises(ValueError, match=message):
            FrechetRatio("fdr", wrong)
    assert {*metric.needs} == {(FeatureStatistics, "a"), (FeatureStatistics, "b")}


def test_features_that_cannot_be_compared_are_refused():
    good, metric = features(9), PrecisionRecall(features="x")
    for wrong in (np.full((9, 6), np.nan), np.ones((9, 6, 2)), features(3)):  # it needs 4
        for name, sets in (("reference", (wrong, good)), ("samples", (good, wrong))):
            with pytest.raises(ValueError, match=rf"of the {name} must be \(.*, and finite"):
                metric(*map(features_of, sets))


METRICS = [
    DensityCoverage("x"),
    Authenticity("x"),
    Cmmd("x"),
    VendiScore("x"),
    FrechetDistance("fd", "x"),
    InfiniteFrechetDistance("fd_inf", "x"),
    KernelDistance("kd", "x", subset_size=50, num_subsets=10),
    PrecisionRecall(features="x", exact=True),
]


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: type(metric).__name__)
def test_standard_errors_are_the_spread_over_new_sets_of_samples(metric):
    """The bounds are wide: each side is a spread of 20 values, with a relative error of 16 %."""
    reference = feature_set(features(200, shift=0.1).astype(np.float32))
    sets = [feature_set(features(200, shift=0.3, seed=i).astype(np.float32)) for i in range(1, 21)]
    spread = {key: np.std([metric(reference, s)[key] for s in sets], ddof=1) for key in metric.keys}
    errors = standard_errors(metric, reference, sets[0], num_halves=20)
    for key in {*metric.keys} - {"kd_std"}:
        assert 0.4 * spread[key] <= errors[key] <= 2.5 * spread[key] + 1e-3, key


def test_the_standard_error_of_a_share_has_a_closed_form():
    labels, classes = np.zeros(1000, int), (np.arange(1000) % 4 == 0).astype(int)
    samples = feature_set(classes, "classes", labels)
    errors = standard_errors(LabelAccuracy(), FeatureSet(), samples, num_halves=400)
    assert errors["label_accuracy"] == pytest.approx(np.sqrt(0.75 * 0.25 / 1000), rel=0.1)


class Mean(FeatureMetric):
    """The mean of the samples."""

    keys = ("mean",)

    def compare(self, reference, samples):
        return (float(samples.mean()),)


@pytest.mark.parametrize("num_used", [None, 1000, 100, 600])
def test_a_metric_of_a_part_of_the_samples_has_the_error_of_this_part(num_used):
    reference, samples = feature_set(features(1000, 1)), feature_set(features(1000, 1, seed=1))
    errors = standard_errors(Mean("x", num_used), reference, samples, num_halves=400)
    assert errors["mean"] == pytest.approx(1 / np.sqrt(num_used or 1000), rel=0.12)


def test_the_published_cmmd_of_three_images():
    """Two sets of three photographs at 512 px, and the weights of CLIP ViT-L/14-336."""
    folders = [os.environ.get(f"CMMD_{name}") for name in ("REFERENCE", "SAMPLES", "WEIGHTS")]
    if not all(folders):
        pytest.skip("set CMMD_REFERENCE, CMMD_SAMPLES (folders of images) and CMMD_WEIGHTS (a folder)")
    from data import open_images

    detector = EncoderDetector("clip_336", folders[2])
    sets = []
    for folder in folders[:2]:
        images = open_images(folder)
        (part,) = images.batches(images.count, [0])
        sets.append(detector(part.images)["clip_336"])
    assert compare(Cmmd("x"), *sets) == (pytest.approx(7.696, abs=0.05),)


def test_the_published_scores_of_cifar10():
    """Features of DINOv2 from torch.hub: 512 images of the training set and 512 of the test set."""
    if not (file := os.environ.get("DGM_EVAL_FEATURES")):
        pytest.skip("set DGM_EVAL_FEATURES to an .npz with `train` and `test` (512, 1024)")
    stored = np.load(file)
    train, test = (torch.from_numpy(stored[name]).double() for name in ("train", "test"))
    moments = [x for part in (test, train) for x in (part.mean(0), torch.cov(part.T))]
    assert frechet_distance(*moments) == pytest.approx(862.53745, rel=1e-4)
    assert DensityCoverage("x").compare(train, test) == pytest.approx((0.97969, 0.94141), abs=1e-4)
