"""Between images and latents: encoders, and the one rule that turns pixels into bytes."""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch

from data.latents import LatentDataset, LatentManifest, LatentWriter


class IdentityEncoder:
    """The pixels themselves, in [-1, 1]."""

    name = "identity"

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """images (N, C, H, W) uint8 -> latents (N, C, H, W) in [-1, 1]."""
        return images.float() / 127.5 - 1

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """latents (N, C, H, W) -> images (N, C, H, W), nominally in [-1, 1]."""
        return latents


def encoder_for(manifest: LatentManifest) -> IdentityEncoder:
    """Return the encoder that made the latents of a manifest.

    Raises:
        ValueError: no encoder of that name is known.
    """
    if manifest.encoder != IdentityEncoder.name:
        raise ValueError(
            f"encoder={manifest.encoder} of the latent manifest must be {IdentityEncoder.name} to draw pictures or scores; "
            "training goes without them: train.sample_every=null evaluation=none"
        )
    return IdentityEncoder()


def to_uint8(images: torch.Tensor) -> torch.Tensor:
    """Turn pixels in [-1, 1] into bytes by the rule of [EDM] and [DiT] (truncation after adding one half)."""
    return (127.5 * images + 128).clamp(0, 255).to(torch.uint8)


def image_decoder(manifest: LatentManifest) -> Callable[[torch.Tensor], np.ndarray]:
    """Return a function from what the network gives, (N, C, H, W), to images (N, H, W, channels) uint8."""
    encoder = encoder_for(manifest)

    def decode(latents: torch.Tensor) -> np.ndarray:
        images = to_uint8(encoder.decode(manifest.to_encoder(latents)))
        return images.permute(0, 2, 3, 1).cpu().numpy()

    return decode


def real_images(dataset: LatentDataset, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the images (N, H, W, channels) uint8 that entries of a data set decode to, and their labels."""
    stored, labels = dataset.read(ids)
    images = image_decoder(dataset.manifest)(dataset.manifest.to_latents(stored))
    return images, None if labels is None else labels.numpy()


def encode_images(
    path: str | Path,
    batches: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray | None]],
    encoder: IdentityEncoder,
    manifest: LatentManifest,
) -> None:
    """Write a latent folder from batches of images (N, C, H, W) uint8, labels (N,), and masks of the latents or None."""
    with LatentWriter(path, manifest) as writer:
        for images, labels, masks in batches:
            latents = encoder.encode(torch.from_numpy(images))
            writer.append(latents.numpy().astype(manifest.dtype), labels, masks)
