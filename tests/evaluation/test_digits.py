import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fid
from builders import references, scoring
from data import IdentityEncoder, digits, real_images
from evaluation import ArrayImages, ScoreSamples, frechet_distance, pictures
from runtime.errors import UserError
from runtime.launch import ALONE
from runtime.pictures import CAPTION_HEIGHT
from tests.runs import TINY, composed, tiny_trainer, validated


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return digits(str(tmp_path_factory.mktemp("data") / "digits"), 8, in_channels=1, num_classes=10)


def suite_of(name, dataset, **options):
    """Build a suite of configs/evaluation/ against the training images."""
    node = validated(f"evaluation={name}").evaluation.changed(options)
    return scoring.build_suite(node, references.reference_of(dataset, IdentityEncoder(), "data"), ALONE)


def scored(suite, images, labels):
    return suite.score(ArrayImages(images), labels).values


def test_scores_tell_good_from_bad(dataset):
    suite = suite_of("digits", dataset)
    images, labels = real_images(dataset, dataset.held_out_ids, IdentityEncoder())
    real = scored(suite, images, labels)
    assert real["label_accuracy"] > 0.98
    assert real["fd_pixel"] < 0.2
    assert scored(suite, images, (labels + 1) % 10)["label_accuracy"] < 0.02
    noise = np.random.default_rng(0).integers(0, 256, images.shape, dtype=np.uint8)
    assert scored(suite, noise, labels)["fd_pixel"] > 3
    assert scored(suite, images[:1].repeat(50, axis=0), labels[:50])["fd_pixel"] > 3


def test_the_reference_is_only_the_training_digits(dataset, tmp_path):
    """In fid.py and during training; held-out digits are for comparison."""
    reference, held_out = (
        real_images(dataset, ids, IdentityEncoder()) for ids in (dataset.train_ids, dataset.held_out_ids)
    )
    images, labels = reference[0][:40], reference[1][:40]
    np.savez(tmp_path / "s.npz", images, labels)
    folder = Path(dataset.stored.filename).parent
    request = ("suite=digits", f"samples={tmp_path / 's.npz'}", f"reference={folder}")
    with pytest.raises(UserError, match="label 50 must be a class of the reference, from 0 to 9"):
        np.savez(tmp_path / "others.npz", images, labels + 50)
        fid.main(composed(request[0], f"samples={tmp_path}/others.npz", request[2], config_name="fid"))
    fid.main(composed(*request, config_name="fid"))
    record = json.loads((tmp_path / "s.scores.json").read_text())
    suite = suite_of("digits", dataset)
    means = [reference[0][reference[1] == i % 10].mean(axis=0).round() for i in range(40)]
    rows = {"class means": (np.stack(means).astype(np.uint8), np.arange(40) % 10), "real held-out": held_out}
    assert record["values"] == scored(suite, images, labels)
    assert record["comparisons"] == {
        name: {"n": len(row[0]), **scored(suite, *row)} for name, row in rows.items()
    }
    options = ("data=digits", *TINY[1:], f"data.path={folder}", "evaluation=digits", "train.eval_every=2")
    trainer, run = tiny_trainer(tmp_path / "run", *options)
    (evaluator,) = (evaluator for _, evaluator in trainer.evaluators if isinstance(evaluator, ScoreSamples))
    assert scored(evaluator.suite, *held_out) == scored(suite, *held_out)
    *_, record = run.manifest()["scores"]
    assert (record["detector"]["name"], record["num_samples"]) == ("DigitClassifier", 500)
    run.unlock()


def test_distances_to_held_out_images_use_only_them(dataset):
    suite = suite_of("digits", dataset)
    images, _ = real_images(dataset, dataset.train_ids, IdentityEncoder())
    held_out, _ = real_images(dataset, dataset.held_out_ids, IdentityEncoder())
    moments = [
        (pixels.mean(axis=0), np.cov(pixels, rowvar=False))
        for pixels in (array.reshape(len(array), -1) / 255 for array in (images, held_out))
    ]
    of_training = scored(suite, images, np.zeros(len(images), int))
    assert of_training["fd_pixel"] == pytest.approx(0, abs=1e-6)
    distance = frechet_distance(*moments[0], *moments[1])
    assert of_training["fd_pixel_held_out"] == pytest.approx(distance) and distance > 0.05
    suite.reference.held_out, suite._reference_features = None, None
    without = suite.score(ArrayImages(images), np.zeros(len(images), int))
    assert without.left_out == {"fd_pixel_held_out": "the reference has no held-out images"}
    assert without.values["fd_pixel"] == of_training["fd_pixel"]


def test_missing_labels_that_a_metric_needs_are_refused(dataset):
    with pytest.raises(ValueError, match="label_accuracy cannot be computed: the samples have no labels"):
        scored(suite_of("digits", dataset), np.zeros((9, 8, 8, 1), np.uint8), None)


def test_a_detector_that_is_fitted_takes_no_batch_size(dataset):
    with pytest.raises(ValueError, match="batch_size=3 must be null for a detector that is fitted"):
        suite_of("digits", dataset, batch_size=3)


class Drawn(ArrayImages):
    """Images in parts, as a network draws them."""

    part_size = 150

    def __init__(self, images, labels):
        super().__init__(images)
        self.labels, self.key = lambda: labels, dict


def test_a_training_scores_the_drawn_samples(dataset, tmp_path):
    images, classes = real_images(dataset, dataset.train_ids, IdentityEncoder())
    suite, drawn = suite_of("digits", dataset), Drawn(images[:200], classes[:200])
    assert ScoreSamples(suite, drawn, tmp_path / "p")(step=1) == scored(suite, images[:200], classes[:200])
    assert not (tmp_path / "p").exists()


def test_a_reference_too_large_for_memory_is_refused(dataset, monkeypatch):
    monkeypatch.setattr("builders.references.MAX_REFERENCE_BYTES", 1000)
    with pytest.raises(ValueError, match="has too many images to decode them all"):
        references.reference_of(dataset, IdentityEncoder(), "data")


def test_classes_alternate_in_a_picture():
    labels = np.array([3, 1, 1, 0, 3, 3, 1, 2])
    order = pictures.interleave_classes(labels)
    assert labels[order].tolist() == [0, 1, 2, 3, 1, 3, 1, 3]
    assert order.tolist() == [3, 1, 7, 0, 2, 4, 6, 5], "images of a class keep their order"


def test_pictures(tmp_path, dataset):
    images, _ = real_images(dataset, np.arange(12), IdentityEncoder())
    pictures.save_grid(images, tmp_path / "new" / "grid.png", columns=10)
    picture = np.asarray(Image.open(tmp_path / "new" / "grid.png"))
    assert picture.shape == (2 * 68, 10 * 68)
    assert np.array_equal(picture[2:66:8, 2:66:8], images[0, :, :, 0])
    assert not picture[68:, 2 * 68 :].any()
    colour = np.random.default_rng(0).integers(0, 256, (4, 64, 64, 3), dtype=np.uint8)
    assert pictures.save_grid(colour[:1], tmp_path / "one.png", columns=10).shape == (68, 68, 3)
    pictures.save_grid(colour, tmp_path / "colour.png", columns=2)
    rows = np.split(np.asarray(Image.open(tmp_path / "colour.png")), 2)
    tiles = [tile for row in rows for tile in np.split(row, 2, axis=1)]
    assert all(np.array_equal(tile[2:66, 2:66], image) for tile, image in zip(tiles, colour, strict=True))
    assert rows[0].shape == (68, 136, 3)


def test_captions_are_above_the_first_row_with_new_ones(tmp_path):
    images = np.full((6, 64, 64, 1), 100, np.uint8)
    plain = pictures.save_grid(images, tmp_path / "plain.png", 2)
    same = pictures.save_grid(images, tmp_path / "same.png", 2, ["a", "b"] * 3)
    other = pictures.save_grid(images, tmp_path / "other.png", 2, ["a", "b", "a", "b", "c", "d"])
    assert [len(grid) - len(plain) for grid in (same, other)] == [CAPTION_HEIGHT, 2 * CAPTION_HEIGHT]
    assert np.array_equal(same[CAPTION_HEIGHT:], plain)
    left, right = np.split(same[:CAPTION_HEIGHT], 2, axis=1)
    assert left.any() and right.any() and not np.array_equal(left, right)


def test_the_first_rows_of_all_steps_are_one_picture(tmp_path):
    (tmp_path / "step_00000250_n9_seed0_2steps.png").write_bytes(b"a picture of sample.py")
    for step, shade in ((250, 50), (500, 200)):
        images = np.full((20, 64, 64, 1), shade, np.uint8)
        pictures.save_grid(images, tmp_path / f"step_{step:08d}.png", 10, [*"abcdefghij"] * 2)
        pictures.save_over_time(tmp_path, pictures.row_height(images, ["a"], 10))
    picture = np.asarray(Image.open(tmp_path / pictures.OVER_TIME))
    height = 2 * CAPTION_HEIGHT + 68
    assert picture.shape == (2 * height, 680, 3)
    assert [picture[i * height + 2 * CAPTION_HEIGHT + 10, 10, 0] for i in range(2)] == [50, 200]
    assert picture[:CAPTION_HEIGHT].any(), "the step"


def test_text_pictures_show_small_grey_images_only():
    image = np.zeros((1, 4, 3, 1), np.uint8)
    image[0, 0, 0] = image[0, 1, 1] = image[0, 2, 2] = image[0, 3, 2] = 255
    assert pictures.text_picture(image) == "▀▄ \n  █"
    assert pictures.text_picture(np.zeros((1, 256, 256, 3), np.uint8)) == ""
