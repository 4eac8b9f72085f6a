import numpy as np
import pytest
from PIL import Image

from data import IdentityEncoder, digits, real_images
from evaluation import DigitsEvaluator
from evaluation.pictures import save_grid, text_picture


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return digits(str(tmp_path_factory.mktemp("data") / "digits"), input_size=8, in_channels=1, num_classes=10)


def test_scores_tell_good_from_bad(dataset):
    evaluator = DigitsEvaluator(real_images(dataset, dataset.train_ids, IdentityEncoder()), source=None, num_samples=100)
    images, labels = real_images(dataset, dataset.held_out_ids, IdentityEncoder())
    real = evaluator.score(images, labels)
    assert real["label_accuracy"] > 0.98
    assert real["fd_pixel"] < 0.2
    assert evaluator.score(images, (labels + 1) % 10)["label_accuracy"] < 0.02
    noise = np.random.default_rng(0).integers(0, 256, images.shape, dtype=np.uint8)
    assert evaluator.score(noise, labels)["fd_pixel"] > 3
    assert evaluator.score(images[:1].repeat(50, axis=0), labels[:50])["fd_pixel"] > 3


def test_run_scores_what_the_source_gives(dataset):
    reference = real_images(dataset, dataset.train_ids, IdentityEncoder())
    evaluator = DigitsEvaluator(reference, lambda n: (reference[0][:n], reference[1][:n]), num_samples=200)
    assert dict(evaluator.run(step=1)) == evaluator.score(reference[0][:200], reference[1][:200])


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
