"""What the suite makes of features: order, splits, what is kept; of features that are there at once."""

import numpy as np
import pytest
import torch

from data import NpzImages, open_images
from evaluation import inception_score, kernel_distance, make_reference, open_reference, precision_recall
from evaluation.features import add_up, look
from evaluation.metrics.inception_score import SplitScores
from evaluation.reference import evenly_spaced
from evaluation.statistics import AllFeatures, FeatureStatistics
from runtime.launch import ALONE
from tests.inception import Projections, adm_suite

RNG = np.random.default_rng(0)
# Of one colour each: in three dimensions some lie near each other, and some do not.
SAMPLES, REFERENCE = (
    RNG.integers(0, most, (count, 1, 1, 3), dtype=np.uint8).repeat(4, axis=1).repeat(4, axis=2)
    for most, count in ((200, 22), (256, 17))
)
DETECTOR = Projections()
CPU = torch.device("cpu")


class InAnyOrder(NpzImages):
    """Whose batches come as from several processes."""

    def batches(self, *arguments):
        return [*super().batches(*arguments)][::-1]


@pytest.fixture
def folder(tmp_path):
    np.savez(tmp_path / "samples.npz", SAMPLES)
    np.savez(tmp_path / "images.npz", REFERENCE)
    return tmp_path


def scores(folder, reference, **options):
    suite = adm_suite(DETECTOR, open_reference(folder / reference, open_images), **options)
    return suite.score(InAnyOrder(folder / "samples.npz")).values


def test_features_are_kept_and_split_by_the_positions_of_their_images(folder, monkeypatch):
    monkeypatch.setattr("evaluation.metrics.inception_score.SPLIT_SIZE", 9)
    images = InAnyOrder(folder / "samples.npz")
    needs = [(AllFeatures, "pool"), (FeatureStatistics, "spatial"), (SplitScores, "probs")]
    found, _ = add_up(look(DETECTOR, images, batch_size=3, launch=ALONE, description=""), needs, 22, CPU)
    features, (kept, spatial, splits) = DETECTOR(SAMPLES), (found[need] for need in needs)
    np.testing.assert_allclose(kept.features, features["pool"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(spatial.mean, features["spatial"].double().mean(dim=0), rtol=1e-5, atol=1e-5)
    assert splits.score() == pytest.approx(inception_score(features["probs"], split_size=9), rel=1e-6)


def test_a_reference_keeps_images_evenly_spaced_and_the_statistics_of_all(folder, monkeypatch):
    monkeypatch.setattr("evaluation.reference.NUM_KEPT", 6)
    make_reference(DETECTOR, InAnyOrder(folder / "images.npz"), folder / "made.npz", 3, ALONE)
    with np.load(folder / "made.npz") as made:
        assert (made["arr_0"] == REFERENCE[[0, 2, 5, 8, 11, 14]]).all()
    assert evenly_spaced(3, 6).tolist() == [0, 1, 2]
    of_all, of_kept = (scores(folder, name) for name in ("images.npz", "made.npz"))
    for metric in ("fid22", "sfid22"):
        assert of_kept[metric] == pytest.approx(of_all[metric], rel=1e-6)
    kept, samples = DETECTOR(REFERENCE[[0, 2, 5, 8, 11, 14]])["pool"], DETECTOR(SAMPLES)["pool"]
    assert (of_kept["precision22"], of_kept["recall22"]) == precision_recall(kept, samples)


def test_precision_recall_and_kernel_distance_follow_the_protocol(folder):
    reference, samples = (DETECTOR(images)["pool"] for images in (REFERENCE, SAMPLES))
    for exact in (False, True):
        found = scores(folder, "images.npz", exact_distances=exact)
        assert (found["precision22"], found["recall22"]) == precision_recall(
            reference, samples, k=3, exact=exact
        )
        expected = kernel_distance(reference, samples, subset_size=8, num_subsets=100, seed=0)
        assert (found["kid22"], found["kid_std22"]) == pytest.approx(expected, rel=1e-4)
    assert found["precision22"] != found["recall22"]
