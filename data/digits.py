"""An embedded data set: the 1,797 handwritten digits of scikit-learn, 8x8 grey pixels."""

import numpy as np

from data.embedded import write_once, write_pixels
from data.latents import LatentDataset, open_latents


def digits(
    path: str, input_size: int, in_channels: int, num_classes: int, foreground_masks: bool = False
) -> LatentDataset:
    """Open the digits, writing them once as a latent folder at `path`.

    Args:
        foreground_masks: give each digit a mask of the pixels that are not black.
    """
    write_once(path, lambda: _write(path, foreground_masks))
    return open_latents(path, input_size, in_channels, num_classes)


def _write(path: str, foreground_masks: bool) -> None:
    from sklearn.datasets import load_digits

    source = load_digits()
    # Grey levels 0..16 -> 0..255.
    images = np.rint(source.images * (255 / 16)).astype(np.uint8)[:, None]  # (1797, 1, 8, 8)
    masks, kind = (images[:, 0], "segmentation") if foreground_masks else (None, None)
    batches, classes = [(images, source.target, masks)], tuple(map(str, source.target_names))
    write_pixels(path, batches, images, len(images), 297, classes, kind)
