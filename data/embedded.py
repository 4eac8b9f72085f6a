"""Embedded data sets: small images from installed packages, written once as a latent folder."""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from data.encoders import IdentityEncoder
from data.latents import LatentDataset, open_latents, split
from data.manifest import FILES, LatentManifest, read_manifest
from data.writer import LatentWriter
from runtime.lock import Lock

NUM_DIGITS, NUM_HELD_OUT_DIGITS = 1797, 297
NATIVE_SIZE, MAX_SIZE = 8, 64


def write_once(path: str, origin: dict[str, Any], write: Callable[[], None]) -> None:
    """Write the folder `path` unless it exists; raise a ValueError if it was written with other settings."""
    folder = Path(path)
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        # If two processes start together, one writes and the other waits.
        with Lock(folder.with_name(f".{folder.name}.first"), f"data.path={path}", wait_sec=math.inf):
            if not folder.exists():
                write()
    stored_origin = read_manifest(path).origin or {}
    for key in origin:
        if origin[key] != stored_origin.get(key):
            value, stored = ("null" if x is None else x for x in (origin[key], stored_origin.get(key)))
            rule = f"must be {stored}, as in {path}/{FILES['manifest']}: or set another data.path"
            raise ValueError(f"data.{key}={value} {rule}")


def write_pixels(
    path: str,
    batches: Iterable[tuple[np.ndarray, np.ndarray, Mapping[str, np.ndarray]]],
    typical: np.ndarray,
    count: int,
    num_held_out: int,
    class_names: tuple[str, ...],
    conditioning_type: str | None = None,
    origin: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
) -> None:
    """Write a latent folder of pixels.

    Args:
        batches: images (N, C, H, W) uint8, labels (N,), and masks or captions as `LatentWriter.append` takes.
        typical: images (N, C, H, W) uint8 that set shift and scale: the network sees them with mean 0 and
            standard deviation 0.5, EDM's sigma_data.
    """
    encoder = IdentityEncoder()
    pixels = encoder.encode(torch.from_numpy(typical))
    manifest = LatentManifest(
        count=count,
        shape=typical.shape[1:],
        dtype="float16",
        kind="samples",
        num_classes=len(class_names),
        encoder=encoder.name,
        shift=pixels.mean().item(),
        scale=0.5 / pixels.std().item(),
        std=0.5,
        resolution=typical.shape[-1],
        class_names=class_names,
        num_held_out=num_held_out,
        conditioning_type=conditioning_type,
        origin=origin,
        text=text,
    )
    with LatentWriter(path, manifest) as writer:
        for images, labels, others in batches:
            writer.append(encoder.encode(torch.from_numpy(images)).numpy(), labels, **others)


def digits(
    path: str,
    input_size: int,
    in_channels: int,
    num_classes: int,
    foreground_masks: bool = False,
    num_images: int | None = None,
) -> LatentDataset:
    """Open scikit-learn's 1,797 handwritten digits, 8x8 grey, written once as a latent folder at `path`.

    Args:
        input_size: side of the images; a multiple of 8 enlarges them.
        foreground_masks: give each digit a mask of its pixels that are not black.
        num_images: number of training images; the held-out ones are the same for every number. None: all.
    """
    most = NUM_DIGITS - NUM_HELD_OUT_DIGITS
    if num_images is not None and not 0 < num_images <= most:
        raise ValueError(f"data.num_images={num_images} must be in [1, {most}], or null for all")
    if input_size % NATIVE_SIZE or not NATIVE_SIZE <= input_size <= MAX_SIZE:
        rule = f"must be a multiple of {NATIVE_SIZE}, at most {MAX_SIZE}"
        raise ValueError(f"data.input_size={input_size} {rule}")
    origin = {"num_images": num_images}
    write_once(path, origin, lambda: _write_digits(path, foreground_masks, num_images, input_size))
    return open_latents(path, input_size, in_channels, num_classes)


def _write_digits(path: str, foreground_masks: bool, num_images: int | None, size: int) -> None:
    from sklearn.datasets import load_digits

    source = load_digits()
    # Grey levels 0..16 -> 0..255.
    typical = np.rint(source.images * (255 / 16)).astype(np.uint8)[:, None]  # (1797, 1, 8, 8)
    if size != NATIVE_SIZE:
        bicubic = (Image.fromarray(x).resize((size, size), Image.Resampling.BICUBIC) for x in typical[:, 0])
        typical = np.stack([np.asarray(x) for x in bicubic])[:, None]
    ids = _first_digits(num_images)
    images, labels, classes = typical[ids], source.target[ids], tuple(map(str, source.target_names))
    masks, kind = ({"masks": images[:, 0]}, "segmentation") if foreground_masks else ({}, None)
    origin = None if num_images is None else {"num_images": num_images}
    batches, num_held_out = [(images, labels, masks)], NUM_HELD_OUT_DIGITS
    write_pixels(path, batches, typical, len(images), num_held_out, classes, kind, origin)


def _first_digits(num_images: int | None) -> np.ndarray:
    """Return indices of the digits to write, ordered so that any `num_images` holds out the same digits."""
    held_out, trained = split(NUM_DIGITS, NUM_HELD_OUT_DIGITS)
    trained = trained[:num_images]
    ids = np.empty(len(held_out) + len(trained), dtype=int)
    for digit_ids, indices in zip((held_out, trained), split(len(ids), len(held_out)), strict=True):
        ids[np.sort(indices)] = np.sort(digit_ids)
    return ids
