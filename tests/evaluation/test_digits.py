import numpy as np
import pytest
from PIL import Image

from data import IdentityEncoder, digits, real_images
from evaluation import DigitsEvaluator
from evaluation.pictures import in_turn, save_grid, text_picture


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return digits(str(tmp_path_factory.mktemp("data") / "digits"), input_size=8, in_channels=1, num_classes=10)


def test_scores_tell_good_from_bad(dataset):
    evaluator = DigitsEvaluator(real_images(dataset, dataset.train_ids, IdentityEncoder()))
    images, labels = real_images(dataset, dataset.held_out_ids, IdentityEncoder())
    real = evaluator.score(images, labels)
    assert real["label_accuracy"] > 0.98
    assert real["fd_pixel"] < 0.2
    assert evaluator.score(images, (labels + 1) % 10)["label_accuracy"] < 0.02
    noise = np.random.default_rng(0).integers(0, 256, images.shape, dtype=np.uint8)
    assert evaluator.score(noise, labels)["fd_pixel"] > 3
    assert evaluator.score(images[:1].repeat(50, axis=0), labels[:50])["fd_pixel"] > 3


class Source:
    """The first of some images; it remembers which labels were asked for."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def with_labels(self, labels):
        self.asked = labels
        return self

    def __call__(self, num_samples):
        return self.images[:num_samples], self.labels[:num_samples]


@pytest.mark.parametrize("labels", ["random", "balanced"])
def test_run_scores_what_the_source_gives(dataset, labels):
    reference = real_images(dataset, dataset.train_ids, IdentityEncoder())
    evaluator = DigitsEvaluator(reference, source := Source(*reference), num_samples=200, labels=labels)
    assert dict(evaluator.run(step=1)) == evaluator.score(reference[0][:200], reference[1][:200])
    assert source.asked == labels


def test_classes_take_turns_in_a_picture():
    labels = np.array([3, 1, 1, 0, 3, 3, 1, 2])
    order = in_turn(labels)
    assert labels[order].tolist() == [0, 1, 2, 3, 1, 3, 1, 3]
    assert order.tolist() == [3, 1, 7, 0, 2, 4, 6, 5], "the first of a class first"


def test_pictures(tmp_path, dataset):
    images, _ = real_images(dataset, np.arange(12), IdentityEncoder())
    save_grid(images, tmp_path / "new" / "grid.png", columns=10)
    picture = np.asarray(Image.open(tmp_path / "new" / "grid.png"))
    assert picture.shape == (2 * 36, 10 * 36)
    assert np.array_equal(picture[2:34:4, 2:34:4], images[0, :, :, 0])
    assert not picture[36:, 2 * 36 :].any()
    colour = np.random.default_rng(0).integers(0, 256, (4, 64, 64, 3), dtype=np.uint8)
    save_grid(colour[:1], tmp_path / "one.png", columns=10)
    with Image.open(tmp_path / "one.png") as one, Image.open(tmp_path / "new" / "grid.png") as grid:
        assert one.width < grid.width / 5, "no more columns than images"
    save_grid(colour, tmp_path / "colour.png", columns=2)
    assert np.asarray(Image.open(tmp_path / "colour.png")).shape == (136, 136, 3)


def test_text_pictures_show_small_grey_images_only():
    image = np.zeros((1, 4, 3, 1), np.uint8)
    image[0, 0, 0] = image[0, 1, 1] = image[0, 2, 2] = image[0, 3, 2] = 255
    assert text_picture(image) == "▀▄ \n  █"
    assert text_picture(np.zeros((1, 256, 256, 3), np.uint8)) == ""
