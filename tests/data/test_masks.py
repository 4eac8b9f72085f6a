import io

import numpy as np
import pytest
from PIL import Image

from data.masks import MaskFiles, read_mask


def file_of(image):
    buffer = io.BytesIO()
    image.save(buffer, "png")
    buffer.seek(0)
    return buffer


def test_masks_are_found_by_name_whatever_their_format(tmp_path):
    for name in ("a/1.png", "a/deep/er/0.bmp", "b/2.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4), len(name), np.uint8)).save(tmp_path / name)
    masks = MaskFiles(tmp_path, ["b/2.jpg", "a/deep/er/0.png"])
    with masks.open("a/deep/er/0.png") as file:
        assert np.asarray(Image.open(file))[0, 0] == len("a/deep/er/0.bmp")
    with pytest.raises(ValueError, match=r"must have c/3.png, or another lossless format \(1 of 2 are"):
        MaskFiles(tmp_path, ["b/2.jpg", "c/3.jpg"])
    (tmp_path / "b/2.bmp").write_bytes((tmp_path / "b/2.png").read_bytes())
    with pytest.raises(ValueError, match=r"has both b/2.bmp and b/2.png: remove one"):
        MaskFiles(tmp_path, ["b/2.jpg"])


def test_a_segmentation_counts_by_its_numbers_not_by_colours_or_alpha():
    classes = np.zeros((32, 32), np.uint8)
    classes[4:6, 8:10] = 3
    black = Image.fromarray(classes)
    black.putpalette([0, 0, 0] * 256)
    clear = np.zeros((32, 32, 4), np.uint8)
    clear[..., 1], clear[..., 3] = classes, 255
    for image in (black, Image.fromarray(clear)):
        mask = read_mask(file_of(image), (32, 32), 32, is_segmentation=True)
        assert np.array_equal(mask, np.where(classes, 255, 0))


def test_a_mask_is_grey_and_of_the_size_of_its_image():
    grey = Image.fromarray(np.zeros((7, 9), np.uint8))
    with pytest.raises(ValueError, match=r"size \(9, 7\) must be the image's \(32, 32\)"):
        read_mask(file_of(grey), (32, 32), 32, is_segmentation=False)
    with pytest.raises(ValueError, match="image mode RGB must be grey"):
        read_mask(file_of(grey.convert("RGB")), (9, 7), 4, is_segmentation=False)
