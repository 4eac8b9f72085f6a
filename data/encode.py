"""Encode images as a latent folder.

    accelerate launch -m data.encode source=IMAGES out=latents/NAME
    accelerate launch -m data.encode source=IMAGES out=latents/NAME masks=MASKS conditioning_type=segmentation

The images are shared out in parts. A part that is finished is kept in OUT.partial, so that the same command goes on where it
was stopped, on any number of processes; when all are there, the first process puts them together.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import hydra
import numpy as np
import torch
from accelerate import PartialState
from joblib import cpu_count
from omegaconf import DictConfig
from PIL import Image
from tqdm import tqdm

from data.encoders import Encoder, load_encoder
from data.images import IMAGE_ERRORS, ZIP_ERRORS, centre_crop, read_image
from data.listing import ImageList, MaskFiles, list_images
from data.manifest import LatentManifest
from data.writer import LatentWriter
from training import config as configuration
from training.machine import start_process
from training.provenance import environment
from training.rules import check_choice, check_positive

PART_IMAGES = 256
IMAGES_AT_ONCE = 16
CORRUPT_SHOWN = 10
MOST_HELD_OUT = 5000
PATIENCE = timedelta(days=30)  # processes that are done wait for the others

configuration.register()


@hydra.main(version_base="1.3", config_path="../configs", config_name="encode")
def main(cfg: DictConfig) -> None:
    """Check what is asked, encode what is missing, and put it together."""
    with configuration.user_mistakes():
        request = configuration.resolve(cfg)
        check_request(request)
        state = start_process(timeout=PATIENCE)
        encoder = load_encoder(request["encoder"], state.device, request["mixed_precision"] == "bf16")
        job = Job.plan(request, encoder)
        todo = job.begin(state)
        encode_parts(job, todo, encoder, state)
        state.wait_for_everyone()
        if state.is_main_process:
            finish(job, state)


def check_request(request: dict[str, Any]) -> None:
    """Check what can be checked before anything is loaded.

    Raises:
        FileExistsError: there is something at `out` already.
        ValueError: with the key, the value and the rule.
    """
    if Path(request["out"]).exists():
        raise FileExistsError(f"out={request['out']} exists: move it away to write it anew, or choose another name")
    check_positive("resolution", request["resolution"])
    check_choice("conditioning_type", request["conditioning_type"], ("mask", "segmentation"))
    check_choice("mixed_precision", request["mixed_precision"], ("no", "bf16"))


@dataclass(frozen=True)
class Part:
    """Latents (n, [2,] C, H, W), masks (n, H, W) or None, and the positions of their images; errors by position."""

    latents: np.ndarray
    masks: np.ndarray | None
    positions: np.ndarray
    errors: dict[int, str]


@dataclass(frozen=True)
class Job:
    """What is encoded, into what, and the folder of its finished parts.

    Args:
        about: what must not change while parts of it are there.
    """

    request: dict[str, Any]
    images: ImageList
    masks: MaskFiles | None
    manifest: LatentManifest
    about: dict[str, Any]

    @staticmethod
    def plan(request: dict[str, Any], encoder: Encoder) -> "Job":
        """Look at the source and lay down what its manifest says if no image is corrupt."""
        images = list_images(request["source"])
        masks = MaskFiles(request["masks"], images.names) if request["masks"] else None
        resolution, count = request["resolution"], len(images.names)
        if resolution % encoder.factor:
            raise ValueError(f"resolution={resolution} must be a multiple of {encoder.factor} for encoder={encoder.name}")
        num_held_out = request["num_held_out"]
        manifest = LatentManifest(
            count=count,
            shape=tuple(encoder.encode(torch.zeros(1, 3, resolution, resolution, dtype=torch.uint8)).shape[1:]),
            dtype="float16",
            kind=encoder.kind,
            num_classes=images.num_classes,
            encoder=encoder.name,
            encoder_hash=encoder.weights_hash,
            scale=encoder.scale,
            shift=encoder.shift,
            std=encoder.std,
            mirrors=request["mirrors"],
            resolution=resolution,
            class_names=images.class_names,
            num_held_out=min(MOST_HELD_OUT, count // 100) if num_held_out is None else num_held_out,
            conditioning_type=request["conditioning_type"] if masks else None,
        )
        names = "\n".join([*images.names, *map(str, [] if images.labels is None else images.labels)])
        about = {
            **{key: request[key] for key in ("source", "resolution", "mirrors", "masks", "mixed_precision")},
            "conditioning_type": manifest.conditioning_type,
            "encoder": encoder.name,
            "encoder_hash": encoder.weights_hash,
            "list_of_images": f"{count} images, {hashlib.sha256(names.encode()).hexdigest()[:16]}",
        }
        return Job(request, images, masks, manifest, about)

    @property
    def folder(self) -> Path:
        return Path(f"{Path(self.request['out'])}.partial")

    @property
    def num_parts(self) -> int:
        return -(-len(self.images.names) // PART_IMAGES)

    def positions(self, part: int) -> range:
        """Return the positions of the images of a part."""
        return range(part * PART_IMAGES, min((part + 1) * PART_IMAGES, len(self.images.names)))

    def file(self, part: int) -> Path:
        return self.folder / f"{part:07d}.npz"

    def begin(self, state: PartialState) -> list[int]:
        """Make the folder of parts, or go on with the one that is there; return the parts that are still to do.

        Raises:
            ValueError: the folder was begun with something else, or the disk has no room.
        """
        about = self.folder / "about.json"
        if state.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not about.exists():
                with _replacing(about) as file:
                    file.write(json.dumps(self.about, indent=2).encode())
        state.wait_for_everyone()
        begun = json.loads(about.read_text())
        changes = [f"{key}: {begun.get(key)} -> {value}" for key, value in self.about.items() if begun.get(key) != value]
        if changes:
            raise ValueError(
                f"{self.folder} was begun with something else ({'; '.join(changes)}): go on with that, or remove it"
            )
        todo = [part for part in range(self.num_parts) if not self.file(part).exists() or self.read(part).errors]
        self._check_room(len(todo))
        state.wait_for_everyone()  # all have looked before anybody writes
        return todo

    def _check_room(self, num_todo: int) -> None:
        array = np.dtype(self.manifest.dtype).itemsize * int(np.prod(self.manifest.stored_shape))
        needed = array + array * num_todo // self.num_parts  # the parts, and what is put together from them
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise ValueError(
                f"out={self.request['out']} needs {needed / 2**30:.1f} GiB while it is made, {free / 2**30:.1f} are free"
            )

    def read(self, part: int) -> Part:
        """Read a part.

        Raises:
            ValueError: its file is damaged.
        """
        file = self.file(part)
        try:
            with np.load(file, allow_pickle=False) as arrays:
                errors = dict(zip(arrays["error_positions"].tolist(), arrays["errors"].tolist(), strict=True))
                return Part(arrays["latents"], arrays.get("masks"), arrays["positions"], errors)
        except (KeyError, *ZIP_ERRORS) as error:
            raise ValueError(f"{file} is damaged ({error}): remove it and run the same command again") from error

    def write(self, number: int, part: Part) -> None:
        """Write a part, whole or not at all."""
        errors = {
            "error_positions": np.array([*part.errors], dtype=np.int64),
            "errors": np.array([*part.errors.values()], dtype=str),
        }
        arrays = {"latents": part.latents, "positions": part.positions, **errors}
        if part.masks is not None:
            arrays["masks"] = part.masks
        with _replacing(self.file(number)) as file:
            np.savez(file, **arrays)


def encode_parts(job: Job, todo: list[int], encoder: Encoder, state: PartialState) -> None:
    """Encode this process's share of the parts that are to do; the images of the next part are read meanwhile."""
    mine = todo[state.process_index :: state.num_processes]
    total, left = len(job.images.names), sum(len(job.positions(part)) for part in todo)
    bar = {"total": total, "initial": total - left, "desc": "encode", "unit": "image", "disable": not state.is_main_process}
    threads = max(1, cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    with ThreadPoolExecutor(threads) as pool, tqdm(**bar) as progress:
        try:
            ahead = _submit(pool, job, mine[0]) if mine else []
            for i, number in enumerate(mine):
                images, ahead = ahead, _submit(pool, job, mine[i + 1]) if i + 1 < len(mine) else []
                pieces = []
                for start in range(0, len(images), IMAGES_AT_ONCE):
                    positions = job.positions(number)[start : start + IMAGES_AT_ONCE]
                    pieces.append(encode_images(job, positions, images[start : start + IMAGES_AT_ONCE], encoder))
                    progress.update(min(len(positions) * state.num_processes, total - progress.n))
                job.write(number, join(pieces))
        finally:
            pool.shutdown(cancel_futures=True)


def join(pieces: list[Part]) -> Part:
    """Put pieces of a part together."""
    masks = None if pieces[0].masks is None else np.concatenate([piece.masks for piece in pieces])
    latents, positions = (np.concatenate([getattr(piece, key) for piece in pieces]) for key in ("latents", "positions"))
    return Part(latents, masks, positions, {position: error for piece in pieces for position, error in piece.errors.items()})


def encode_images(job: Job, positions: range, images: list[Future], encoder: Encoder) -> Part:
    """Encode the images that can be read, and note the others."""
    manifest, errors, good = job.manifest, {}, []
    for position, future in zip(positions, images, strict=True):
        try:
            good.append((position, *future.result()))
        except IMAGE_ERRORS as error:
            errors[position] = f"{job.images.names[position]}: {error}"
    found = np.array([position for position, _, _ in good], dtype=np.int64)
    if not good:
        masks = np.empty((0, *manifest.shape[1:]), np.uint8) if job.masks else None
        return Part(np.empty((0, *manifest.stored_shape[1:]), np.float16), masks, found, errors)
    pixels = torch.from_numpy(np.stack([image for _, image, _ in good])).permute(0, 3, 1, 2)
    if manifest.mirrors:  # a latent can not be flipped: the mirror image is encoded for itself
        pixels = torch.stack([pixels, pixels.flip(-1)], dim=1).flatten(0, 1)  # (2n, 3, H, W)
    latents = encoder.encode(pixels).half()
    finite = latents.isfinite().flatten(1).all(dim=1)
    if not finite.all():
        first = int((~finite).int().argmax()) // (2 if manifest.mirrors else 1)
        raise ValueError(f"{job.images.names[found[first]]}: its latents are not finite in float16: wrong encoder or weights?")
    masks = np.stack([mask for _, _, mask in good]) if job.masks else None
    return Part(latents.view(len(good), *manifest.stored_shape[1:]).numpy(), masks, found, errors)


def read_pair(job: Job, position: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Read an image (R, R, 3), and its mask at the size of the latents (H, W), both uint8."""
    name, resolution = job.images.names[position], job.request["resolution"]
    with job.images.open(name) as file:
        image = read_image(file, resolution)
    if job.masks is None:
        return image, None
    try:
        with job.images.open(name) as file, Image.open(file) as header, job.masks.open(name) as mask_file:
            mask = read_mask(mask_file, header.size, resolution, job.manifest.conditioning_type == "segmentation")
    except IMAGE_ERRORS as error:
        raise ValueError(f"its mask: {error}") from error
    return image, pool_mask(mask, job.manifest)


def read_mask(file: BinaryIO, size: tuple[int, int], resolution: int, segmentation: bool) -> np.ndarray:
    """Read the mask of an image of a size, and cut it (R, R) uint8 as the image is cut."""
    with Image.open(file) as mask:
        if mask.size != size:
            raise ValueError(f"it is {mask.size}, the image is {size}: they must agree")
        if segmentation:  # by the numbers in the file, whatever colours a palette gives them
            classes = np.asarray(mask).reshape(size[1], size[0], -1)
            return np.asarray(centre_crop(Image.fromarray((classes != 0).any(axis=-1).astype(np.uint8) * 255), resolution))
        if mask.mode not in ("L", "1"):
            raise ValueError(f"its mode is {mask.mode}, must be grey (L) with 8 bits, or conditioning_type=segmentation")
        return np.asarray(centre_crop(mask.convert("L"), resolution))


def pool_mask(mask: np.ndarray, manifest: LatentManifest) -> np.ndarray:
    """Bring a mask (R, R) uint8 to the size of the latents (H, W).

    A weight becomes the mean of its cell; a segmentation covers a cell that it touches.
    """
    size = manifest.input_size
    cells = mask.reshape(size, len(mask) // size, size, len(mask) // size)
    if manifest.conditioning_type == "segmentation":
        return cells.max(axis=(1, 3))
    return np.rint(cells.mean(axis=(1, 3))).astype(np.uint8)


def finish(job: Job, state: PartialState) -> None:
    """Put the parts together, unless images are corrupt and nobody said that they may be left out."""
    errors = {}
    for number in range(job.num_parts):
        errors |= job.read(number).errors
    if errors:
        report = job.folder / "corrupt.txt"
        report.write_text("".join(f"{error}\n" for error in errors.values()))
        shown = [*errors.values()][:CORRUPT_SHOWN]
        state.print(
            "\n".join([f"{len(errors)} of {len(job.images.names)} images are corrupt (all of them: {report}):", *shown])
        )
        if not job.request["skip_corrupt"]:
            raise ValueError(
                f"{len(errors)} images are corrupt, and nothing was put together: mend them, or leave them out with "
                "skip_corrupt=true, and run the command again: what is encoded is kept"
            )
    manifest = _final_manifest(job, errors, state)
    with LatentWriter(job.request["out"], manifest) as writer:
        for number in tqdm(range(job.num_parts), desc="put together", unit="part"):
            part = job.read(number)
            labels = None if job.images.labels is None else job.images.labels[part.positions]
            writer.append(part.latents, labels, part.masks)
    shutil.rmtree(job.folder)
    out = job.request["out"]
    state.print(f"{out}: {manifest.count} images of {manifest.num_classes} classes, {manifest.num_held_out} of them held out")
    state.print(
        f"Look at it: python -m data.report {out}\nTrain on it: accelerate launch train.py data=latents data.path={out}"
    )


def _final_manifest(job: Job, errors: dict[int, str], state: PartialState) -> LatentManifest:
    count = len(job.images.names) - len(errors)
    if not count:
        raise ValueError(f"source={job.request['source']}: all {len(errors)} images are corrupt")
    origin = {
        **job.about,
        "crop": "shrunk by box filter and bicubic, cut out of the middle, as ADM does",
        "left_out": [job.images.names[position] for position in errors],
        "environment": environment(state.device),
    }
    return replace(job.manifest, count=count, origin=origin, num_held_out=min(job.manifest.num_held_out, count - 1))


@contextmanager
def _replacing(file: Path) -> Iterator[BinaryIO]:
    partial = file.with_suffix(".tmp")
    try:
        with partial.open("wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        partial.replace(file)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, f"{error.strerror}; mend this and run the same command again to go on", str(file)) from error


def _submit(pool: ThreadPoolExecutor, job: Job, part: int) -> list[Future]:
    return [pool.submit(read_pair, job, position) for position in job.positions(part)]


if __name__ == "__main__":
    configuration.run(main)
