import re
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.ft2font import FT2Font

from data import IdentityEncoder, digits, glyphs, real_images
from data.glyphs import CAPITAL, CHARACTERS, FONTS, MASTER_DETAIL, SIZE, _ink, _master, draw_glyphs

SIZES = {"input_size": 32, "in_channels": 1, "num_classes": 62}
NO_MOVES = np.zeros(6)


def rows_and_columns(ink):
    """Return the first and last row, and the first and last column, that hold ink."""
    return [np.flatnonzero(np.asarray(ink).max(axis=axis) > 127)[[0, -1]] for axis in (1, 0)]


def test_an_image_is_a_function_of_seed_and_index():
    images, labels = draw_glyphs(seed=3, first=0, count=200)
    assert (images.shape, images.dtype) == ((200, 1, 32, 32), np.uint8)
    assert labels.tolist() == [i % 62 for i in range(200)]
    later, of_later = draw_glyphs(seed=3, first=150, count=50)
    assert np.array_equal(later, images[150:])
    assert np.array_equal(of_later, labels[150:])
    assert len({image.tobytes() for image in (*images, *draw_glyphs(seed=4, first=0, count=200)[0])}) == 400


def test_a_larger_set_starts_with_a_smaller_one(tmp_path):
    small, large = (
        glyphs(str(tmp_path / str(count)), **SIZES, num_images=count, seed=0) for count in (320, 2048)
    )
    assert np.array_equal(large.stored[:320], small.stored)
    assert np.array_equal(large.labels[:320], small.labels)
    assert (small.manifest.shift, small.manifest.scale) == (large.manifest.shift, large.manifest.scale)
    assert (len(small.held_out_ids), len(large.held_out_ids)) == (10, 64)
    assert "".join(large.manifest.class_names) == CHARACTERS
    latents = large.manifest.to_latents(large.read(large.train_ids)[0])
    assert abs(latents.mean()) < 0.02
    assert abs(latents.std() - 0.5) < 0.02
    images, labels = real_images(large, np.arange(2048), IdentityEncoder())
    drawn, of_drawn = draw_glyphs(0, 0, 2048)
    assert np.array_equal(images[..., 0], drawn[:, 0])
    assert np.array_equal(labels, of_drawn)


def test_an_existing_folder_must_have_the_requested_settings(tmp_path):
    path = str(tmp_path / "glyphs")
    glyphs(path, **SIZES, num_images=64, seed=0)
    for wrong, message in (
        ({"num_images": 65}, f"data.num_images=65 must be 64, as in {path}/manifest.json"),
        ({"seed": 1}, f"data.seed=1 must be 0, as in {path}/manifest.json"),
        ({"input_size": 16}, f"data.input_size=16 must be 32, as in {path}/manifest.json"),
        ({"num_classes": 10}, "data.num_classes=10 must be 62"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            glyphs(**{"path": path, **SIZES, "num_images": 64, "seed": 0, **wrong})
    digits(str(tmp_path / "digits"), 8, 1, 10)
    with pytest.raises(ValueError, match=r"data\.num_images=64 must be None"):
        glyphs(str(tmp_path / "digits"), 8, 1, 10, num_images=64, seed=0)


def test_the_fonts_are_all_that_have_the_characters():
    files = {file.stem: file for file in (Path(matplotlib.get_data_path()) / "fonts/ttf").glob("*.ttf")}
    needed = set(map(ord, CHARACTERS))
    whole = {name for name, file in files.items() if needed <= FT2Font(str(file)).get_charmap().keys()}
    others = {"cmex10", "cmsy10", "LastResortHE-Regular"}  # show something else under these codes
    assert set(FONTS) == whole - others - {"cmmi10"}
    assert len(FONTS) == len(set(FONTS)) == 21


@pytest.mark.parametrize("font", range(len(FONTS)), ids=FONTS)
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


def test_each_move_does_what_its_name_says():
    """Of an E: none, turned, slanted, wider, higher, shifted."""
    label = CHARACTERS.index("E")
    still = _ink(0, label, NO_MOVES)
    assert np.abs(still.astype(int) - np.asarray(_master(0, label).reduce(MASTER_DETAIL))).max() < 40
    (top, bottom), (left, right) = rows_and_columns(still)

    def moved(which, by=1.0):
        return rows_and_columns(_ink(0, label, NO_MOVES + by * np.eye(6)[which]))

    for which, right_and_down in ((4, (0, 2)), (5, (2, 0))):
        (new_top, new_bottom), (new_left, new_right) = moved(which)
        assert (new_top - top, new_left - left) == (new_bottom - bottom, new_right - right) == right_and_down
    for which, axis in ((2, 1), (3, 0)):  # width, height
        large, small = (np.ptp(moved(which, by)[axis]) for by in (-1, 1))
        assert large >= np.ptp(((top, bottom), (left, right))[axis]) >= small
        assert large - small >= 2
        assert [np.ptp(moved(which, by)[1 - axis]) for by in (-1, 1)] == [
            np.ptp(((top, bottom), (left, right))[1 - axis])
        ] * 2
    for which in (0, 1):  # the upper corner of its stem goes one way, the lower one the other
        images = [_ink(0, label, NO_MOVES + by * np.eye(6)[which]) for by in (-1, 1)]
        upper, lower = (
            [rows_and_columns(image[rows])[1][0] for image in images] for rows in (slice(16), slice(16, 32))
        )
        assert upper != lower
        assert np.sign(upper[1] - upper[0]) == -np.sign(lower[1] - lower[0])


def test_ink_is_brighter_than_ground_in_all_greys():
    images, _ = draw_glyphs(seed=0, first=0, count=620)
    ground, brightest = images[:, 0, 0, 0].astype(int), images.max(axis=(1, 2, 3)).astype(int)
    assert (brightest - ground).min() > 0.4 * 255 * 0.6, "thin strokes do not fill a pixel"
    assert ground.min() < 5
    assert ground.max() > 100
    assert brightest.max() == 255
    assert brightest.min() < 140
