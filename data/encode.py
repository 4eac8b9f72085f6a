"""Encode images as a latent folder: centre crop of [ADM], autoencoder, moments of each image and its flip.

    python -m data.encode source=IMAGES out=latents/NAME
    python -m data.encode source=IMAGES out=latents/NAME encoder=FOLDER resolution=512
    python -m data.encode source=IMAGES out=latents/NAME masks=MASKS conditioning_type=segmentation

IMAGES is a folder of class folders, a zip of one, or a text file with a path and a class on each line. Then:
python -m data.report path=latents/NAME. data/README.md explains the keys.

The ranks share the images in parts. Finished parts are kept in OUT.partial, so that the same command resumes
where it was stopped, on any number of processes; the first rank joins them in the end.
"""

import hashlib
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from joblib import cpu_count
from tqdm import tqdm

from data.encoders import Encoder, load_encoder
from data.images import IMAGE_ERRORS, ORIENTATION, open_picture, to_pixels
from data.listing import ImageList, list_images
from data.manifest import FILES, LatentManifest, class_warnings, first_classes, untrained_classes_of
from data.masks import MaskFiles, pool_mask, read_mask
from data.writer import NEXT_STEPS, LatentWriter, check_out, lock_of
from runtime.config import command, run_main
from runtime.errors import check_choice, check_not_negative, check_positive
from runtime.launch import Launch
from runtime.lock import Lock
from runtime.machine import PATIENCE, start_process
from runtime.parts import RESUME, Arrays, PartCache, check_room
from runtime.provenance import environment

PART_IMAGES = 256
CORRUPT_SHOWN = 10
MAX_HELD_OUT = 5000


@dataclass
class EncodeConfig:
    """The keys of `data.encode`."""

    source: str  # a folder of class folders, a zip of one, or a list
    out: str
    encoder: str = "sd-vae-ft-ema"  # or sd-vae-ft-mse, sdxl, identity, a folder, OWNER/NAME on the hub
    resolution: int = 256
    hflip: bool = True
    masks: str | None = None
    conditioning_type: str = "mask"  # or segmentation; of the masks
    num_held_out: int | None = None  # None: one image in a hundred, at most 5,000
    mixed_precision: str = "no"
    skip_corrupt: bool = False


@command("encode", EncodeConfig, __doc__)
def main(request: EncodeConfig) -> None:
    """Check the request, encode the missing parts, and join all of them."""
    check_request(request)
    for key, path in (("source", request.source), ("masks", request.masks)):
        if path is not None and not Path(path).exists():
            raise FileNotFoundError(f"{key}={path} not found")
    launch = start_process(timeout=PATIENCE, tf32=False)  # latents are made once, for all runs
    encoder = load_encoder(request.encoder, launch.device, request.mixed_precision == "bf16")
    job = plan(request, encoder)
    lock = lock_of(Path(request.out))
    try:
        launch.broadcast_from_main(partial(begin, job, lock, launch))
        job.parts.fill(partial(encode_parts, job, encoder), launch, "encode")
        if launch.is_main:
            finish(job, launch)
    finally:
        lock.release()


def check_request(request: EncodeConfig) -> None:
    check_out(request.out)
    check_positive("resolution", request.resolution)
    if request.num_held_out is not None:
        check_not_negative("num_held_out", request.num_held_out)
    check_choice("conditioning_type", request.conditioning_type, ("mask", "segmentation"))
    if request.masks is None and request.conditioning_type != EncodeConfig.conditioning_type:
        raise ValueError(f"conditioning_type={request.conditioning_type} needs masks=FOLDER")
    check_choice("mixed_precision", request.mixed_precision, ("no", "bf16"))


@dataclass(frozen=True)
class Job:
    """What is encoded."""

    request: EncodeConfig
    images: ImageList
    masks: MaskFiles | None
    manifest: LatentManifest  # as it is if no image is corrupt
    parts: PartCache  # arrays as `encode_part` gives them

    def positions(self, part: int) -> range:
        """Positions of the images of a part."""
        return range(part * PART_IMAGES, min((part + 1) * PART_IMAGES, len(self.images.names)))


def plan(request: EncodeConfig, encoder: Encoder) -> Job:
    """List the source and describe the folder to make of it."""
    images = list_images(request.source)
    masks = MaskFiles(request.masks, images.names) if request.masks else None
    resolution, count, num_held_out = request.resolution, len(images.names), request.num_held_out
    if resolution % encoder.factor:
        raise ValueError(f"resolution={resolution} must be a multiple of {encoder.factor} for {encoder.name}")
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
        hflip=request.hflip,
        resolution=resolution,
        class_names=images.class_names,
        untrained_classes=untrained_classes_of(images.labels, images.num_classes),
        num_held_out=min(MAX_HELD_OUT, -(-count // 100), count - 1) if num_held_out is None else num_held_out,
        conditioning_type=request.conditioning_type if masks else None,
    )
    listed = "\n".join([*images.names, *map(str, [] if images.labels is None else images.labels)])
    digest = hashlib.sha256(listed.encode(errors="surrogateescape")).hexdigest()
    about = {
        "resolution": resolution,
        "hflip": request.hflip,
        "mixed_precision": request.mixed_precision,
        "source": str(Path(request.source).resolve()),
        "masks": str(Path(request.masks).resolve()) if masks else None,
        "images_per_part": PART_IMAGES,
        "conditioning_type": manifest.conditioning_type,
        "encoder": encoder.name,
        "encoder_hash": encoder.weights_hash,
        "list_of_images": f"{count} images, {digest[:16]}",
        "orientation": ORIENTATION,  # of masks, too
    }
    parts = PartCache(Path(f"{Path(request.out)}.partial"), about, count, PART_IMAGES)
    return Job(request, images, masks, manifest, parts)


def begin(job: Job, lock: Lock, launch: Launch) -> None:
    """Take the lock of `out`, print what the source holds, and check that it has room."""
    images, out = job.images, job.request.out
    launch.print(f"{len(images.names)} images in {job.request.source}")
    launch.print(f"classes: {first_classes(job.manifest)}")
    for warning in class_warnings(job.manifest):
        launch.print(f"warning: {warning}")
    if images.ignored:
        some = ", ".join(images.ignored[:CORRUPT_SHOWN])
        launch.print(f"{len(images.ignored)} files are not images and are ignored: {some}")
    lock.acquire()
    check_out(out)
    missing = len(job.parts.missing())
    size = np.dtype(job.manifest.dtype).itemsize * int(np.prod(job.manifest.stored_shape))
    check_room(Path(out), size + size * missing // job.parts.num_parts)  # the parts, and the folder


def encode_parts(job: Job, encoder: Encoder, parts: list[int]) -> Iterator[tuple[int, Arrays]]:
    """Encode parts; the images of the next part are read meanwhile."""
    threads = max(1, cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    with ThreadPoolExecutor(threads) as pool:
        reads = (
            [pool.submit(read_pair, job, position) for position in job.positions(part)] for part in parts
        )
        try:
            ahead = next(reads, [])
            for part in parts:
                images, ahead = ahead, next(reads, [])
                yield part, encode_part(job, job.positions(part), images, encoder)
        finally:
            pool.shutdown(cancel_futures=True)


def encode_part(job: Job, positions: range, images: list[Future], encoder: Encoder) -> Arrays:
    """Encode the images that can be read: latents (n, [2,] C', H, W), positions (n,), masks, and errors."""
    manifest, errors, good = job.manifest, [], []
    for position, future in zip(positions, images, strict=True):
        try:
            good.append((position, *future.result()))
        except IMAGE_ERRORS as error:
            name = job.images.names[position]
            # A disk that is gone must not look like corrupt images.
            if isinstance(error, OSError) and error.errno is not None:
                raise OSError(error.errno, f"{error.strerror}; {RESUME}", name) from error
            errors.append(f"{name}: {error}".encode(errors="backslashreplace").decode())
    shape = len(good), *manifest.stored_shape[1:]
    arrays = {"positions": np.array([position for position, _, _ in good], dtype=np.int64)}
    arrays["errors"] = np.array(errors, dtype=str)
    if job.masks:
        masks = np.array([mask for _, _, mask in good], dtype=np.uint8)
        arrays["masks"] = masks.reshape(-1, *manifest.shape[1:])
    if not good:
        return {**arrays, "latents": np.empty(shape, np.float16)}
    pixels = torch.from_numpy(np.stack([image for _, image, _ in good])).permute(0, 3, 1, 2)  # (n, 3, H, W)
    if manifest.hflip:  # a latent cannot be flipped
        pixels = torch.stack([pixels, pixels.flip(-1)], dim=1).flatten(0, 1)  # (2n, 3, H, W)
    latents = encoder.encode(pixels).half().view(shape).numpy()
    finite = np.isfinite(latents).reshape(len(good), -1).all(axis=1)
    if not finite.all():
        first = job.images.names[arrays["positions"][finite.argmin()]]
        raise ValueError(f"{first}: its latents are not finite in float16: wrong encoder or weights?")
    return {**arrays, "latents": latents}


def read_pair(job: Job, position: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Read an image (R, R, 3), and its mask at the size of the latents (H, W), both uint8."""
    name, resolution = job.images.names[position], job.request.resolution
    with job.images.open(name) as file:
        picture = open_picture(file)
    image = to_pixels(picture, resolution)
    if job.masks is None:
        return image, None
    segmentation = job.manifest.conditioning_type == "segmentation"
    try:
        with job.masks.open(name) as mask_file:
            mask = read_mask(mask_file, picture.size, resolution, segmentation)
    except ValueError as error:
        raise ValueError(f"its mask: {error}") from error
    return image, pool_mask(mask, job.manifest.input_size, segmentation)


def finish(job: Job, launch: Launch) -> None:
    """Join the parts, unless images are corrupt and skip_corrupt is false."""
    errors = corrupt_images(job)
    out, count = job.request.out, len(job.images.names) - len(errors)
    origin = {
        **job.parts.key,
        "crop": "resized by box filter and bicubic, center-cropped, as ADM does",
        "left_out": errors,
        "environment": environment(launch.device),
    }
    num_held_out = min(job.manifest.num_held_out, count - 1)
    manifest = replace(job.manifest, count=count, origin=origin, num_held_out=num_held_out)
    joined = job.parts.path / "joined"
    shutil.rmtree(joined, ignore_errors=True)  # of a process that was killed before it moved it
    with LatentWriter(joined, manifest) as writer:
        for number in tqdm(range(job.parts.num_parts), desc="join", unit="part"):
            part = job.parts.read(number)
            labels = None if job.images.labels is None else job.images.labels[part["positions"]]
            writer.append(part["latents"], labels, part.get("masks"))
    joined.rename(out)
    job.parts.remove()
    if errors:
        print(f"The images left out, and why, are in {Path(out) / FILES['manifest']} (origin.left_out)")
    print(f"{out}: {count} images of {manifest.num_classes} classes, {num_held_out} of them held out")
    print(NEXT_STEPS.format(out=out))


def corrupt_images(job: Job) -> list[str]:
    """List the images that could not be read; unless they are left out, their parts are to be done again."""
    by_part = [job.parts.read(part, "errors")["errors"].tolist() for part in range(job.parts.num_parts)]
    errors, count = list(chain(*by_part)), len(job.images.names)
    if errors:
        report = job.parts.path / "corrupt.txt"
        report.write_text("".join(f"{error}\n" for error in errors))
        print(f"{len(errors)} of {count} images are corrupt, all of them in {report}:")
        print("\n".join(errors[:CORRUPT_SHOWN]))
    if len(errors) == count or (errors and not job.request.skip_corrupt):
        for part in np.flatnonzero([*map(len, by_part)]):
            job.parts.file(part).unlink()
        rule = "fix them, or leave them out with skip_corrupt=true, and run the same command again"
        raise ValueError(f"{len(errors)} of {count} images are corrupt: {rule}: what is encoded is kept")
    return errors


if __name__ == "__main__":
    run_main(main)
