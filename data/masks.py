"""Masks, which weight the loss by position: found by name, cropped like their images, and pooled."""

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image

from data.images import LOSSLESS, Files, centre_crop, open_picture

WITH_ALPHA = ("LA", "PA", "RGBA")


class MaskFiles:
    """The masks of images, in a folder or zip with the same names except for the suffix."""

    def __init__(self, path: str | Path, names: Sequence[str]):
        self._files, self._by_stem = Files(Path(path), "masks="), {}
        for name in self._files.names:
            if name.lower().endswith(LOSSLESS) and self._by_stem.setdefault(_stem(name), name) != name:
                raise ValueError(f"masks={path} has both {self._by_stem[_stem(name)]} and {name}: remove one")
        missing = [name for name in names if _stem(name) not in self._by_stem]
        if missing:
            rule = f"{_stem(missing[0])}{LOSSLESS[0]}, or another lossless format"
            raise ValueError(f"masks={path} must have {rule} ({len(missing)} of {len(names)} are missing)")

    def open(self, name: str) -> BinaryIO:
        return self._files.open(self._by_stem[_stem(name)])


def read_mask(file: BinaryIO, size: tuple[int, int], resolution: int, is_segmentation: bool) -> np.ndarray:
    """Read a mask and crop it like its image: (R, R) uint8.

    Args:
        size: width and height of the image, after its EXIF orientation is applied.
        is_segmentation: all pixels but 0 have weight 255. False: the pixels are the weights.
    """
    mask = open_picture(file)
    if mask.size != size:
        raise ValueError(f"size {mask.size} must be the image's {size} (EXIF orientation applied)")
    if is_segmentation:  # by the class numbers, not by the colours of a palette
        classes = np.asarray(mask).reshape(size[1], size[0], -1)
        classes = classes[..., :-1] if mask.mode in WITH_ALPHA else classes
        covered = (classes != 0).any(axis=-1).astype(np.uint8) * 255
        return np.asarray(centre_crop(Image.fromarray(covered), resolution))
    if mask.mode not in ("L", "1"):
        rule = "must be grey (L) with 8 bits, or set conditioning_type=segmentation"
        raise ValueError(f"image mode {mask.mode} {rule}")
    return np.asarray(centre_crop(mask.convert("L"), resolution))


def pool_mask(mask: np.ndarray, size: int, is_segmentation: bool) -> np.ndarray:
    """Pool a mask (R, R) uint8 to (size, size): the mean of weights, the maximum of segmentations."""
    cells = mask.reshape(size, len(mask) // size, size, len(mask) // size)
    return cells.max(axis=(1, 3)) if is_segmentation else np.rint(cells.mean(axis=(1, 3))).astype(np.uint8)


def _stem(name: str) -> str:
    return name.rpartition(".")[0]
