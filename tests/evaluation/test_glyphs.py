"""Scores of glyphs; what they share with those of digits is tested there."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import fid
from data import IdentityEncoder, glyphs, real_images
from evaluation import GlyphJudge, GlyphsEvaluator
from tests.runs import TINY, composed, metrics, tiny_trainer

SIZES = {"input_size": 32, "in_channels": 1, "num_classes": 62}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return glyphs(str(tmp_path_factory.mktemp("data") / "glyphs"), **SIZES, num_images=3200, seed=0)


@pytest.fixture(scope="module")
def reference(dataset):
    return real_images(dataset, dataset.train_ids, IdentityEncoder())


@pytest.fixture(scope="module")
def held_out(dataset):
    return real_images(dataset, dataset.held_out_ids, IdentityEncoder())


@pytest.fixture(scope="module")
def evaluator(reference):
    return GlyphsEvaluator(reference)


def test_scores_tell_good_from_bad(evaluator, held_out):
    images, labels = held_out
    real = evaluator.score(images, labels)
    assert real["label_accuracy"] > 0.7
    assert evaluator.score(images, (labels + 1) % 62)["label_accuracy"] < 0.05
    means, of_means = evaluator.class_means(len(images))
    assert evaluator.score(means, of_means)["fd_classifier"] > real["fd_classifier"] + 10
    noise = np.random.default_rng(0).integers(0, 256, images.shape, dtype=np.uint8)
    assert evaluator.score(noise, labels)["fd_classifier"] > real["fd_classifier"] + 50
    same = evaluator.score(images[:1].repeat(100, axis=0), labels)
    assert same["fd_classifier"] > real["fd_classifier"] + 50
    assert same["label_accuracy"] < 0.1


def test_features_have_a_scale(evaluator, reference):
    features, classes = evaluator._judge(reference[0])
    assert (features.shape, features.dtype, classes.shape) == ((3100, 128), np.float64, (3100,))
    assert np.abs(features.mean(axis=0)).max() < 0.5
    assert 0.8 < np.median(features.std(axis=0)) < 1.2
    alone, _ = evaluator._judge(reference[0][700:701])
    assert np.allclose(alone, features[700:701], atol=1e-4), "an image does not depend on those beside it"


def test_a_judge_is_the_same_every_time_and_leaves_the_draws_of_others_alone(reference, held_out):
    images, labels = (array[:512] for array in reference)
    torch.manual_seed(5)
    expected, _ = torch.rand(3), torch.manual_seed(5)
    first = GlyphJudge(images, labels)(held_out[0])
    assert torch.equal(torch.rand(3), expected)
    torch.rand(7)
    again = GlyphJudge(images, labels)(held_out[0])
    assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))


def test_training_and_fid_score_alike_against_the_training_images(tmp_path):
    folder = tmp_path / "glyphs"
    dataset = glyphs(str(folder), **SIZES, num_images=640, seed=0)
    reference, held_out = (
        real_images(dataset, ids, IdentityEncoder()) for ids in (dataset.train_ids, dataset.held_out_ids)
    )
    expected = GlyphsEvaluator(reference)
    np.savez(tmp_path / "s.npz", *held_out)
    fid.main(
        composed("suite=glyphs", f"samples={tmp_path / 's.npz'}", f"reference={folder}", config_name="fid")
    )
    found = json.loads((tmp_path / "s.scores.json").read_text())["scores"]
    assert found == expected.compare(*held_out, held_out)
    assert list(found) == ["samples", "class means", "held-out real"]
    options = (
        "data=glyphs",
        "model/size=tiny",
        *TINY[1:],
        "model.patch_size=8",
        f"data.path={folder}",
        "data.num_images=640",
    )
    options += ("evaluation=glyphs", "evaluation.num_samples=8", "train.total_steps=2", "train.eval_every=2")
    trainer, run = tiny_trainer(tmp_path / "run", *options, "train.sample_every=null", "sampler.num_steps=2")
    (of_run,) = (each for _, each in trainer.evaluators if isinstance(each, GlyphsEvaluator))
    assert of_run.score(*held_out) == expected.score(*held_out)
    trainer.fit()
    run.unlock()
    (scored,) = (line for line in metrics(Path(run.path)) if "fd_classifier" in line)
    assert 0 <= scored["label_accuracy"] <= 1
    assert np.isfinite(scored["fd_classifier"])
