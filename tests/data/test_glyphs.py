import re
import sys

import numpy as np
import pytest

from data import IdentityEncoder, glyphs, real_images
from data.glyphs import CAPITAL, CHARACTERS, FONTS, MASTER_DETAIL, SIZE, _master, draw_glyphs

SIZES = {"input_size": 32, "in_channels": 1, "num_classes": 62}


def rows_and_columns(ink):
    """Find the first and last row, and the first and last column, with ink."""
    return [np.flatnonzero(np.asarray(ink).max(axis=axis) > 127)[[0, -1]] for axis in (1, 0)]


def test_an_image_is_a_function_of_seed_and_index():
    images, labels = draw_glyphs(seed=3, first=0, count=200)
    assert (images.shape, images.dtype) == ((200, 1, 32, 32), np.uint8)
    assert labels.tolist() == [i % 62 for i in range(200)]
    later, of_later = draw_glyphs(seed=3, first=150, count=50)
    assert np.array_equal(later, images[150:])
    assert np.array_equal(of_later, labels[150:])
    assert len({image.tobytes() for image in (*images, *draw_glyphs(seed=4, first=0, count=200)[0])}) == 400


@pytest.fixture
def few_typical(monkeypatch):
    module = sys.modules[draw_glyphs.__module__]
    monkeypatch.setattr(module, "NUM_TYPICAL", 512)
    monkeypatch.setattr(module, "CHUNK", 100)


def test_a_larger_set_starts_with_a_smaller_one(tmp_path, few_typical):
    small, large = (
        glyphs(str(tmp_path / str(count)), **SIZES, num_images=count, seed=0) for count in (320, 512)
    )
    assert np.array_equal(large.stored[:320], small.stored)
    assert np.array_equal(large.labels[:320], small.labels)
    assert (small.manifest.shift, small.manifest.scale) == (large.manifest.shift, large.manifest.scale)
    assert (len(small.held_out_ids), len(large.held_out_ids)) == (10, 16)
    assert "".join(large.manifest.class_names) == CHARACTERS
    latents = large.manifest.to_latents(large.read(large.train_ids)[0])
    assert abs(latents.mean()) < 0.02
    assert abs(latents.std() - 0.5) < 0.02
    images, labels = real_images(large, np.arange(512), IdentityEncoder())
    drawn, of_drawn = draw_glyphs(0, 0, 512)
    assert np.array_equal(images[..., 0], drawn[:, 0])
    assert np.array_equal(labels, of_drawn)


def test_an_existing_folder_must_have_the_requested_settings(tmp_path, few_typical):
    path, settings = str(tmp_path / "glyphs"), {**SIZES, "num_images": 64, "seed": 0}
    glyphs(path, **settings)
    for key, wrong in (("num_images", 65), ("seed", 1), ("input_size", 16), ("num_classes", 10)):
        message = f"data.{key}={wrong} must be {settings[key]}, as in {path}/manifest.json"
        with pytest.raises(ValueError, match=re.escape(message)):
            glyphs(path, **{**settings, key: wrong})


@pytest.mark.parametrize("font", range(0, len(FONTS), 4))
def test_characters_are_uncropped_and_of_one_height(font):
    masters = [np.asarray(_master(font, label)) for label in range(62)]
    assert len({master.tobytes() for master in masters}) == 62
    rim = np.ones(masters[0].shape, bool)
    rim[1:-1, 1:-1] = False
    assert not any(master[rim].any() for master in masters)
    for capital, small in ("Cc", "Oo", "Ss"):
        (top, bottom), (left, right) = rows_and_columns(masters[CHARACTERS.index(capital)])
        (top_of_small, bottom_of_small), _ = rows_and_columns(masters[CHARACTERS.index(small)])
        assert abs(bottom - bottom_of_small) <= 0.05 * (bottom - top), "they stand on one line"
        assert bottom_of_small - top_of_small < 0.8 * (bottom - top)
        assert abs(left + right - SIZE * MASTER_DETAIL) <= 2, "in the middle"
    (top, bottom), _ = rows_and_columns(masters[CHARACTERS.index("H")])
    assert abs(bottom - top + 1 - CAPITAL * MASTER_DETAIL) <= 2


def test_ink_is_brighter_than_ground_in_all_greys():
    images, _ = draw_glyphs(seed=0, first=0, count=620)
    ground, brightest = images[:, 0, 0, 0].astype(int), images.max(axis=(1, 2, 3)).astype(int)
    assert (brightest - ground).min() > 0.4 * 255 * 0.6, "thin strokes do not fill a pixel"
    assert ground.min() < 5
    assert ground.max() > 100
    assert brightest.max() == 255
    assert brightest.min() < 140
