"""Test the scores of glyphs; test_digits.py tests the code that both suites share."""

import sys

import numpy as np
import pytest
import torch

from builders import scoring
from data import IdentityEncoder, glyphs, real_images
from evaluation import GlyphClassifier
from tests.evaluation.test_digits import scored, suite_of

SIZES = {"input_size": 32, "in_channels": 1, "num_classes": 62}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["data.glyphs"], "NUM_TYPICAL", 256)
        return glyphs(str(tmp_path_factory.mktemp("data") / "glyphs"), **SIZES, num_images=3200, seed=0)


@pytest.fixture(scope="module")
def reference(dataset):
    return real_images(dataset, dataset.train_ids, IdentityEncoder())


@pytest.fixture(scope="module")
def held_out(dataset):
    return real_images(dataset, dataset.held_out_ids, IdentityEncoder())


@pytest.fixture(scope="module")
def suite(dataset):
    return suite_of("glyphs", dataset)


def test_scores_tell_good_from_bad(suite, held_out):
    images, labels = held_out
    real = scored(suite, images, labels)
    assert real["label_accuracy"] > 0.7
    assert scored(suite, images, (labels + 1) % 62)["label_accuracy"] < 0.05
    means = scoring.comparisons(suite, len(images))["class means"].values
    assert means["fd_classifier"] > real["fd_classifier"] + 10
    noise = np.random.default_rng(0).integers(0, 256, images.shape, dtype=np.uint8)
    assert scored(suite, noise, labels)["fd_classifier"] > real["fd_classifier"] + 50
    same = scored(suite, images[:1].repeat(100, axis=0), labels)
    assert same["fd_classifier"] > real["fd_classifier"] + 50
    assert same["label_accuracy"] < 0.1


def test_invisible_noise_changes_the_distance_little(suite, held_out):
    images, labels = held_out
    rng = np.random.default_rng(0)
    noisy = (images + rng.normal(0, strength, images.shape) for strength in (10, 80))
    pixels = [images, *(x.round().clip(0, 255).astype(np.uint8) for x in noisy)]
    real, invisible, visible = (scored(suite, x, labels) for x in pixels)
    key = "fd_classifier"
    assert abs(invisible[key] - real[key]) < 0.1 * real[key]
    assert visible[key] > 2 * real[key]
    assert abs(invisible["label_accuracy"] - real["label_accuracy"]) < 0.05
    assert real["fd_classifier_held_out"] == pytest.approx(0, abs=1e-6)
    assert invisible["fd_classifier_held_out"] > 0


def test_features_have_a_scale(suite, reference):
    outputs = suite.detector(reference[0])
    features, classes = outputs["hidden"], outputs["classes"]
    assert (features.shape, features.dtype, classes.shape) == ((3100, 128), np.float64, (3100,))
    assert np.abs(features.mean(axis=0)).max() < 0.5
    assert 0.8 < np.median(features.std(axis=0)) < 1.2
    alone = suite.detector(reference[0][700:701])["hidden"]
    assert np.allclose(alone, features[700:701], atol=1e-4), "features do not depend on the batch"


def test_a_classifier_is_reproducible_and_keeps_the_global_random_state(reference, held_out):
    torch.manual_seed(5)
    expected, _ = torch.rand(3), torch.manual_seed(5)
    first, again = GlyphClassifier(), GlyphClassifier()
    first.fit(*(array[:128] for array in reference))
    assert torch.equal(torch.rand(3), expected)
    torch.rand(7)
    again.fit(*(array[:128] for array in reference))
    for name, features in first(held_out[0]).items():
        assert np.array_equal(features, again(held_out[0])[name])
