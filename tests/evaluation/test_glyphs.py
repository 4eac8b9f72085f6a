"""Scores of glyphs; what they share with those of digits is tested there."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fid
from builders import scoring
from data import IdentityEncoder, glyphs, real_images
from evaluation import GlyphClassifier, ScoreSamples
from tests.evaluation.test_digits import scored, suite_of
from tests.runs import TINY, composed, metrics, tiny_trainer

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


def test_features_have_a_scale(suite, reference):
    found = suite.detector(reference[0])
    features, classes = found["hidden"], found["classes"]
    assert (features.shape, features.dtype, classes.shape) == ((3100, 128), np.float64, (3100,))
    assert np.abs(features.mean(axis=0)).max() < 0.5
    assert 0.8 < np.median(features.std(axis=0)) < 1.2
    alone = suite.detector(reference[0][700:701])["hidden"]
    assert np.allclose(alone, features[700:701], atol=1e-4), "an image does not depend on those beside it"


def test_a_classifier_is_the_same_every_time_and_leaves_other_draws_alone(reference, held_out):
    torch.manual_seed(5)
    expected, _ = torch.rand(3), torch.manual_seed(5)
    first, again = GlyphClassifier(), GlyphClassifier()
    first.fit(*(array[:128] for array in reference))
    assert torch.equal(torch.rand(3), expected)
    torch.rand(7)
    again.fit(*(array[:128] for array in reference))
    for name, features in first(held_out[0]).items():
        assert np.array_equal(features, again(held_out[0])[name])


@pytest.mark.slow  # that of digits holds the same
def test_training_and_fid_score_alike_against_the_training_images(tmp_path):
    folder = tmp_path / "glyphs"
    dataset = glyphs(str(folder), **SIZES, num_images=640, seed=0)
    held_out = real_images(dataset, dataset.held_out_ids, IdentityEncoder())
    expected = scored(suite_of("glyphs", dataset), *held_out)
    np.savez(tmp_path / "s.npz", *held_out)
    asked = ("suite=glyphs", f"samples={tmp_path / 's.npz'}", f"reference={folder}")
    fid.main(composed(*asked, config_name="fid"))
    found = json.loads((tmp_path / "s.scores.json").read_text())
    assert found["values"] == expected
    assert list(found["comparisons"]) == ["class means", "held-out real"]
    options = ("data=glyphs", "model/size=tiny", *TINY[1:], "model.patch_size=8")
    options += (f"data.path={folder}", "data.num_images=640", "train.sample_every=null")
    options += ("evaluation=glyphs", "evaluation.num_samples=8", "train.total_steps=2", "train.eval_every=2")
    options += ("sampler.num_steps=2",)
    trainer, run = tiny_trainer(tmp_path / "run", *options)
    (of_run,) = (each for _, each in trainer.evaluators if isinstance(each, ScoreSamples))
    assert scored(of_run.suite, *held_out) == expected
    trainer.fit()
    run.unlock()
    (line,) = (line for line in metrics(Path(run.path)) if "fd_classifier" in line)
    assert 0 <= line["label_accuracy"] <= 1
    assert np.isfinite(line["fd_classifier"])
