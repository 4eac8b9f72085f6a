"""References for scores: the training images of a latent folder, or statistics of images."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from data import LatentDataset, encoder_for, open_images, open_latents, read_manifest, real_images
from data.images import ORIENTATION
from evaluation import ArrayImages, InceptionDetector, Reference, make_reference
from evaluation.features import new_cache
from evaluation.files import fingerprint
from evaluation.suite import code_of
from runtime.files import sha256, write_json
from runtime.launch import Launch
from runtime.parts import digest_of
from runtime.provenance import environment

if TYPE_CHECKING:
    from builders.scoring import ScoreConfig

MAX_REFERENCE_BYTES = 2**33


def reference_of(dataset: LatentDataset, encoder: Any, name: str) -> Reference:
    """Build a reference of the training images of latents, with the held-out images for comparison."""
    one, _ = real_images(dataset, dataset.train_ids[:1], encoder)
    if one.nbytes * len(dataset.train_ids) > MAX_REFERENCE_BYTES:
        raise ValueError(f"{name} has too many images to decode them all: give a file of statistics instead")
    images, labels = real_images(dataset, dataset.train_ids, encoder)
    ids = dataset.held_out_ids
    held_out = real_images(dataset, ids, encoder) if len(ids) > 1 else None
    described = {"data": dataset.describe(), "held_out_captions": dataset.captions(ids)}
    return Reference(name, images=ArrayImages(images), labels=labels, held_out=held_out, **described)


def latent_reference(path: str) -> Reference:
    """Build a reference of the training images of a latent folder."""
    manifest = read_manifest(path)
    dataset = open_latents(path, manifest.input_size, manifest.in_channels, manifest.num_classes)
    return reference_of(dataset, encoder_for(manifest, torch.device("cpu")), f"reference={path}")


def write_reference(request: "ScoreConfig", suite: dict[str, Any], launch: Launch) -> None:
    """Write a reference of images and its record; the suite's keys choose the Inception network."""
    source, file, resolution = Path(str(request.images)), Path(str(request.out)), request.resolution
    images = open_images(source, resolution)
    if images.count < 2 or images.shape[-1] != 3:
        raise ValueError(f"images={source}: {images.count} of {images.shape}, must be 2 or more of (H, W, 3)")
    json_file = file.with_suffix(".json")
    with launch.exclusive_output(file, [json_file], request.overwrite):
        detector = InceptionDetector(suite["weights"], launch.device, suite["allow_unpublished_weights"])
        key = {"images": fingerprint(source), "resolution": resolution, **code_of(detector)}
        key["batch_size"] = batch_size = suite["batch_size"]
        path = request.features_folder(file) / f"reference-{digest_of(key)}"
        cache = new_cache(images, path, key, batch_size)
        summary = make_reference(detector, images, file, batch_size, launch, cache)
        if launch.is_main:
            origin = {"path": str(source), "sha256": fingerprint(source), "resolution": resolution}
            origin |= {"orientation": None if source.suffix == ".npz" else ORIENTATION}
            record = {**summary, "sha256": sha256(file), "images": origin, "weights": detector.record}
            record |= {"num_processes": launch.world_size, "environment": environment(launch.device)}
            write_json(json_file, record)
            print(f"reference {file}\nrecord {json_file}")
            cache.remove()  # the reference contains their sums
