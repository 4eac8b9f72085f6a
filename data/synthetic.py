"""Seeded random latents of any shape, for tests and benchmarks."""

import numpy as np

from data.latents import LatentDataset
from data.manifest import drawn_manifest


def synthetic(
    input_size: int, in_channels: int, num_classes: int, num_held_out: int, num_entries: int, seed: int
) -> LatentDataset:
    """Draw Gaussian latents in memory. The mean of a latent depends on its class."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, num_classes, num_entries) if num_classes else None
    stored = 0.5 * rng.standard_normal((num_entries, in_channels, input_size, input_size), dtype=np.float32)
    if labels is not None:
        stored += (labels / num_classes - 0.5).astype(np.float32)[:, None, None, None]
    return LatentDataset(stored, labels, drawn_manifest(stored, num_classes, num_held_out))
