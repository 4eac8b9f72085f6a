"""What embedded data sets share: small images of installed packages, written once as a latent folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.encoders import IdentityEncoder
from data.manifest import LatentManifest
from runtime.lock import Lock


def write_once(path: str, write: Callable[[], None]) -> None:
    """Write the folder `path` unless it is there."""
    folder = Path(path)
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Of two processes that start at once one waits.
        with Lock(folder.with_name(f".{folder.name}.first"), f"data.path={path}", wait_sec=None):
            if not folder.exists():
                write()


def pixel_manifest(
    images: np.ndarray,
    count: int,
    num_held_out: int,
    class_names: tuple[str, ...],
    conditioning_type: str | None = None,
    origin: dict[str, Any] | None = None,
) -> LatentManifest:
    """Return the manifest of images like these, (N, C, H, W) uint8, stored as pixels.

    The network sees mean 0 and standard deviation 0.5, EDM's sigma_data.
    """
    pixels = IdentityEncoder().encode(torch.from_numpy(images))
    return LatentManifest(
        count=count,
        shape=images.shape[1:],
        dtype="float16",
        kind="samples",
        num_classes=len(class_names),
        encoder=IdentityEncoder.name,
        shift=pixels.mean().item(),
        scale=0.5 / pixels.std().item(),
        std=0.5,
        resolution=images.shape[-1],
        class_names=class_names,
        num_held_out=num_held_out,
        conditioning_type=conditioning_type,
        origin=origin,
    )
