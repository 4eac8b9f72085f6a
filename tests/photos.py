"""Photographs that ship with scikit-learn, and a tiny AutoencoderKL."""

from functools import lru_cache

import numpy as np
import torch
from PIL import Image

# Tall and wide, larger and smaller than twice the resolution that the tests ask for.
SIZES = ((64, 48), (48, 80), (150, 130), (40, 40), (33, 70), (90, 200), (32, 32))
BLOCKS = {"block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1}
BLOCKS |= {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}


@lru_cache
def photographs():
    """Return the two photographs by name, (427, 640, 3) uint8."""
    from sklearn.datasets import load_sample_images

    return dict(zip(("china", "flower"), load_sample_images().images, strict=True))


def write_photographs(folder, per_class=5, seed=0):
    """Write crops of the photographs into class folders, and return their names in order."""
    rng = np.random.default_rng(seed)
    names = []
    for class_name, photograph in photographs().items():
        (folder / class_name).mkdir(parents=True)
        for i in range(per_class):
            height, width = SIZES[i % len(SIZES)]
            top, left = rng.integers(427 - height), rng.integers(640 - width)
            names.append(f"{class_name}/{i:03}.{'jpg' if i % 2 else 'png'}")
            Image.fromarray(photograph[top : top + height, left : left + width]).save(folder / names[-1])
    return names


def write_autoencoder(folder, seed=0, **changes):
    """Save a small AutoencoderKL of random weights: images of 32 pixels have latents of 4x16x16."""
    from diffusers import AutoencoderKL

    torch.manual_seed(seed)
    AutoencoderKL(**BLOCKS | {"latent_channels": 4, "scaling_factor": 1.1} | changes).save_pretrained(folder)
    return str(folder)
