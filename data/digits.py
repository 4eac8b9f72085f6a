"""The embedded data set: 1,797 handwritten digits of 8x8 grey pixels that ship with scikit-learn."""

from pathlib import Path

import numpy as np
import torch

from data.encoders import IdentityEncoder, encode_images
from data.latents import LatentDataset, open_latents
from data.manifest import LatentManifest
from runtime.lock import Lock


def digits(path: str, input_size: int, in_channels: int, num_classes: int, foreground_masks: bool = False) -> LatentDataset:
    """Open the digits, writing them once as a latent folder at `path`.

    Args:
        foreground_masks: give each digit a mask of the pixels that are not black.
    """
    folder = Path(path)
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Of two first starts one waits for the other.
        with Lock(folder.with_name(f".{folder.name}.first"), f"data.path={path}", wait_sec=None):
            if not folder.exists():
                _write(path, foreground_masks)
    return open_latents(path, input_size, in_channels, num_classes)


def _write(path: str, foreground_masks: bool) -> None:
    from sklearn.datasets import load_digits

    source = load_digits()
    # Grey levels 0..16 of the source fill the bytes 0..255.
    images = np.rint(source.images * (255 / 16)).astype(np.uint8)[:, None]  # (1797, 1, 8, 8)
    pixels = IdentityEncoder().encode(torch.from_numpy(images))
    manifest = LatentManifest(
        count=len(images),
        shape=images.shape[1:],
        dtype="float16",
        kind="samples",
        num_classes=len(source.target_names),
        encoder=IdentityEncoder.name,
        # The network sees mean 0 and standard deviation 0.5, the sigma_data that EDM is set up for.
        shift=pixels.mean().item(),
        scale=0.5 / pixels.std().item(),
        std=0.5,
        resolution=images.shape[-1],
        num_held_out=297,
        conditioning_type="segmentation" if foreground_masks else None,
    )
    masks = images[:, 0] if foreground_masks else None
    encode_images(path, [(images, source.target, masks)], IdentityEncoder(), manifest)
