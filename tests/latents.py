"""Latent folders for tests."""

import numpy as np

from data import LatentManifest, LatentWriter, open_latents


def write_latents(path, stored, labels=None, masks=None, **fields):
    """Write stored latents (N, [2,] C', H, W), labels (N,) and masks as a folder, and open it.

    Args:
        fields: of the manifest, beside or in place of what the arrays say.
    """
    told = {"count": len(stored), "shape": stored.shape[-3:], "hflip": stored.ndim == 5}
    told |= {"dtype": "float16", "kind": "samples", "encoder": "identity"}
    told |= {"num_classes": 0 if labels is None else int(labels.max()) + 1}
    told |= {} if masks is None else {"conditioning_type": "mask"}
    with LatentWriter(path, LatentManifest(**told | fields)) as writer:
        writer.append(stored, labels, masks)
    return open_latents(path)


def growing_masks(count):
    """Masks (count, 8, 8) that touch 0 to 16 of 16 tokens."""
    masks = np.zeros((count, 8, 8), np.uint8)
    masks[:, ::2, ::2] = 200 * (np.arange(16) < np.arange(count)[:, None] % 17).reshape(count, 4, 4)
    return masks
