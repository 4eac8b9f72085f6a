"""Encode images into a latent folder: [ADM]'s centre crop, autoencoder, moments of each image and its flip.

    python -m data.encode source=IMAGES out=latents/NAME
    python -m data.encode source=IMAGES out=latents/NAME encoder=FOLDER resolution=512
    python -m data.encode source=IMAGES out=latents/NAME masks=MASKS conditioning_type=segmentation

IMAGES is a folder of class folders, a zip of one, a WebDataset, or a text file with paths and classes.
data/README.md explains the keys. Afterwards: python -m data.report path=latents/NAME

The ranks share the images in parts. Finished parts are kept in OUT.partial, so that the same command resumes,
on any number of processes. The first rank joins the parts at the end.
"""

import hashlib
import json
import math
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import torch
from joblib import cpu_count
from tqdm import tqdm

from data.captions import BESIDE, SUFFIXES, Captions
from data.encoders import Encoder, load_encoder
from data.features import PatchEncoder
from data.images import IMAGE_ERRORS, ORIENTATION, open_picture, to_pixels
from data.latents import open_latents, split
from data.listing import ImageList, list_images
from data.manifest import (
    FILES,
    MAX_TEXT_TOKENS,
    LatentManifest,
    class_warnings,
    first_classes,
    untrained_classes_of,
)
from data.masks import MaskFiles, pool_mask, read_mask
from data.text import WORDS
from data.writer import LatentWriter, check_out, lock_of, next_steps
from runtime.config import command, run_main
from runtime.errors import as_value_error, check_choice, check_not_negative, check_positive
from runtime.files import write_json
from runtime.launch import Launch
from runtime.lock import Lock
from runtime.machine import PATIENCE, processes_here, start_process
from runtime.parts import RESUME, Arrays, PartCache, check_room
from runtime.provenance import environment

PART_IMAGES, FEATURES_AT_ONCE = 256, 16
MAX_PRINTED = 10
MAX_HELD_OUT = 5000


@dataclass
class EncodeConfig:
    """The keys of `data.encode`."""

    source: str  # a folder of class folders, a zip of one, a WebDataset, or a list
    out: str
    encoder: str = "sd-vae-ft-ema"  # or sd-vae-ft-mse, sdxl, identity, a folder, OWNER/NAME on the hub
    resolution: int = 256
    hflip: bool = True
    masks: str | None = None
    conditioning_type: str = "mask"  # or segmentation: how the masks weight the loss
    num_held_out: int | None = None  # None: 1% of the images, at most 5,000
    mixed_precision: str = "no"
    skip_corrupt: bool = False
    normalise: str = "encoder"  # encoder: its constants; channels: mean and deviation of each channel
    features: str | None = None  # dinov2_b: also store features of the patches, for alignment=repa
    features_weights: str | None = None  # safetensors file of this encoder
    captions: str | None = None  # beside: files next to the images; or annotations of COCO
    text_encoder: str = "words"  # or a language model of transformers: a folder, OWNER/NAME on the hub
    max_text_tokens: int = 77  # of a language model


@command("encode", EncodeConfig, __doc__)
def main(request: EncodeConfig) -> None:
    """Check the request, encode the missing parts, and join all parts."""
    check_request(request)
    paths = {"source": request.source, "masks": request.masks, "captions": request.captions}
    for key, path in paths.items():
        if path not in (None, BESIDE) and not Path(path).exists():
            raise FileNotFoundError(f"{key}={path} not found")
    launch = start_process(timeout=PATIENCE, tf32=False)  # latents are made once for all runs
    featurize = None
    if request.features is not None:
        featurize = PatchEncoder(request.features, str(request.features_weights), launch.device)
    encoder = load_encoder(request.encoder, launch.device, request.mixed_precision == "bf16")
    images = list_images(request.source)
    captions = None
    if request.captions is not None:
        options = request.text_encoder, request.max_text_tokens, launch.device
        captions = Captions(request.captions, images, *options)
    job = plan_job(request, images, encoder, featurize, captions)
    lock = lock_of(Path(request.out))
    try:
        launch.broadcast_from_main(partial(start_job, job, lock, launch))
        job.parts.fill(partial(encode_parts, job), launch, "encode")
        if launch.is_main:
            finish(job, launch)
    finally:
        lock.release()


def check_request(request: EncodeConfig) -> None:
    check_out(request.out)
    check_positive("resolution", request.resolution)
    check_not_negative("num_held_out", request.num_held_out or 0)
    check_choice("conditioning_type", request.conditioning_type, ("mask", "segmentation"))
    if request.masks is None and request.conditioning_type != EncodeConfig.conditioning_type:
        raise ValueError(f"conditioning_type={request.conditioning_type} needs masks=FOLDER")
    check_choice("mixed_precision", request.mixed_precision, ("no", "bf16"))
    check_choice("normalise", request.normalise, ("encoder", "channels"))
    if request.captions is None and request.text_encoder != EncodeConfig.text_encoder:
        raise ValueError(f"text_encoder={request.text_encoder} needs captions=beside or FILE")
    check_positive("max_text_tokens", request.max_text_tokens)
    if request.max_text_tokens > MAX_TEXT_TOKENS:
        raise ValueError(f"max_text_tokens={request.max_text_tokens} must be at most {MAX_TEXT_TOKENS}")
    if request.text_encoder == WORDS and request.max_text_tokens != EncodeConfig.max_text_tokens:
        raise ValueError(f"max_text_tokens={request.max_text_tokens} needs a language model as text_encoder")
    if (request.features is None) != (request.features_weights is None):
        raise ValueError("features and features_weights must be given together")


@dataclass(frozen=True)
class Job:
    """The images to encode, and the folder to write."""

    request: EncodeConfig
    images: ImageList
    masks: MaskFiles | None
    encoder: Encoder
    featurize: PatchEncoder | None
    manifest: LatentManifest  # as if no image were corrupt
    parts: PartCache  # the arrays of `encode_part`
    captions: Captions | None

    def positions(self, part: int) -> range:
        return range(part * PART_IMAGES, min((part + 1) * PART_IMAGES, len(self.images.names)))


def plan_job(
    request: EncodeConfig,
    images: ImageList,
    encoder: Encoder,
    featurize: PatchEncoder | None = None,
    captions: Captions | None = None,
) -> Job:
    """Describe the latent folder of images."""
    masks = MaskFiles(request.masks, images.names) if request.masks else None
    resolution, count, num_held_out = request.resolution, len(images.names), request.num_held_out
    if resolution % encoder.factor:
        raise ValueError(f"resolution={resolution} must be a multiple of {encoder.factor} for {encoder.name}")
    if encoder.resolution not in (None, resolution):
        raise ValueError(f"resolution={resolution} must be {encoder.resolution} for {encoder.name}")
    features = None
    if featurize is not None:
        features = {"encoder": featurize.name, "weights_sha256": featurize.weights_hash}
        features["shape"] = featurize.shape(resolution)
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
        features=features,
        text=captions and captions.describe(range(count)),
    )
    listed = "\n".join([*images.names, *map(str, [] if images.labels is None else images.labels)])
    listed += "" if captions is None else json.dumps(captions.texts)
    digest = hashlib.sha256(listed.encode(errors="surrogateescape")).hexdigest()
    key = {
        "resolution": resolution,
        "hflip": request.hflip,
        "mixed_precision": request.mixed_precision,
        "source": str(Path(request.source).resolve()),
        "masks": str(Path(request.masks).resolve()) if masks else None,
        "images_per_part": PART_IMAGES,
        "conditioning_type": manifest.conditioning_type,
        "features": features,
        "text": captions and captions.key(),
        "encoder": encoder.name,
        "encoder_hash": encoder.weights_hash,
        "list_of_images": f"{count} images, {digest[:16]}",
        "orientation": ORIENTATION,  # of images and masks
    }
    parts = PartCache(Path(f"{Path(request.out)}.partial"), key, count, PART_IMAGES)
    return Job(request, images, masks, encoder, featurize, manifest, parts, captions)


def start_job(job: Job, lock: Lock, launch: Launch) -> None:
    """Print what the source contains, lock `out`, and check the free disk space."""
    images, out = job.images, job.request.out
    launch.print(f"{len(images.names)} images in {job.request.source}")
    launch.print(f"classes: {first_classes(job.manifest)}")
    for warning in class_warnings(job.manifest):
        launch.print(f"warning: {warning}")
    if job.captions is not None and job.request.hflip and job.captions.mentions_sides():
        launch.print("warning: captions name left or right, but images are also flipped: see hflip=false")
    read = SUFFIXES if job.request.captions == BESIDE else ()
    if ignored := [name for name in images.ignored if not name.endswith(read)]:
        names = ", ".join(ignored[:MAX_PRINTED])
        has_texts = job.captions is None and any(name.endswith(SUFFIXES[0]) for name in ignored)
        hint = " (captions=beside would read .txt files)" if has_texts else ""
        launch.print(f"{len(ignored)} files are not images and are ignored{hint}: {names}")
    lock.acquire()
    check_out(out)
    missing = len(job.parts.missing())
    arrays = job.manifest.arrays().values()
    size = sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in arrays)
    check_room(Path(out), size + size * missing // job.parts.num_parts)  # the parts, and the folder


def encode_parts(job: Job, parts: list[int]) -> Iterator[tuple[int, Arrays]]:
    """Encode parts, while threads read the images of the next part."""
    with ThreadPoolExecutor(max(1, cpu_count() // processes_here())) as pool:
        reads = ([pool.submit(read_pair, job, i) for i in job.positions(part)] for part in parts)
        try:
            for part, (images, _) in zip(parts, pairwise(chain(reads, [None])), strict=True):
                yield part, encode_part(job, part, images)
        finally:
            pool.shutdown(cancel_futures=True)


def encode_part(job: Job, part: int, images: list[Future]) -> Arrays:
    """Encode the readable images into the arrays of a latent folder, with positions (n,) and errors."""
    manifest, errors, readable = job.manifest, [], []
    for position, future in zip(job.positions(part), images, strict=True):
        try:
            readable.append((position, *future.result()))
        except IMAGE_ERRORS as error:
            name = job.images.names[position]
            # A missing disk must not look like corrupt images.
            if isinstance(error, OSError) and error.errno is not None:
                raise OSError(error.errno, f"{error.strerror}; {RESUME}", name) from error
            errors.append(f"{name}: {error}".encode(errors="backslashreplace").decode())
    specs = manifest.arrays()
    arrays = {"positions": np.array([position for position, _, _ in readable], dtype=np.int64)}
    arrays["errors"] = np.array(errors, dtype=str)
    if not readable:
        return arrays | {key: np.empty((0, *shape[1:]), dtype) for key, (dtype, shape) in specs.items()}
    if job.captions is not None:
        arrays["text"] = job.captions(arrays["positions"].tolist())
    if job.masks:
        arrays["masks"] = np.stack([mask for _, _, mask in readable])  # (n, H, W)
    stacked = np.stack([image for _, image, _ in readable])
    pixels = torch.from_numpy(stacked).permute(0, 3, 1, 2)  # (n, 3, R, R)
    if manifest.hflip:  # flipping a latent does not flip its image
        pixels = torch.stack([pixels, pixels.flip(-1)], dim=1).flatten(0, 1)  # (2n, 3, R, R)
    if job.featurize is not None:
        features = torch.cat([job.featurize(x).half().cpu() for x in pixels.split(FEATURES_AT_ONCE)])
        arrays["features"] = features.view(-1, *specs["features"][1][1:]).numpy()  # (n, [2,] T, F)
    latents = job.encoder.encode(pixels).half().view(-1, *manifest.stored_shape[1:]).numpy()
    finite = np.isfinite(latents).reshape(len(readable), -1).all(axis=1)
    if not finite.all():
        first = job.images.names[arrays["positions"][finite.argmin()]]
        raise ValueError(f"{first}: latents are not finite in float16: wrong encoder or weights?")
    return {**arrays, "latents": latents}


def read_pair(job: Job, position: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Read an image (R, R, 3) uint8, and its mask (H, W) uint8 at the size of the latents."""
    name, resolution = job.images.names[position], job.request.resolution
    with job.images.open(name) as file:
        picture = open_picture(file)
    image = to_pixels(picture, resolution)
    if job.masks is None:
        return image, None
    is_segmentation = job.manifest.conditioning_type == "segmentation"
    with as_value_error("mask"), job.masks.open(name) as mask_file:
        mask = read_mask(mask_file, picture.size, resolution, is_segmentation)
    return image, pool_mask(mask, job.manifest.input_size, is_segmentation)


def finish(job: Job, launch: Launch) -> None:
    """Join the parts into `out`. Raise if images are corrupt, unless skip_corrupt is true."""
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
    if job.captions is not None:
        numbers = range(job.parts.num_parts)
        positions = np.concatenate([job.parts.read(i, "positions")["positions"] for i in numbers])
        held_out = np.sort(split(count, num_held_out)[0]) if num_held_out else np.arange(count)
        manifest = replace(manifest, text=job.captions.describe(positions[held_out].tolist()))
    joined = job.parts.path / "joined"
    shutil.rmtree(joined, ignore_errors=True)  # of a killed process
    with LatentWriter(joined, manifest) as writer:
        for number in tqdm(range(job.parts.num_parts), desc="join", unit="part"):
            part = job.parts.read(number)
            labels = None if job.images.labels is None else job.images.labels[part["positions"]]
            others = {key: part.get(key) for key in ("masks", "features", "text")}
            writer.append(part["latents"], labels, **others)
    if job.request.normalise == "channels":
        normalise_channels(joined)
    joined.rename(out)
    job.parts.remove()
    if errors:
        print(f"{Path(out) / FILES['manifest']} lists the images left out, with errors (origin.left_out)")
    print(f"{out}: {count} images of {manifest.contents}, {num_held_out} of them held out")
    print(next_steps(out, manifest))


def normalise_channels(folder: Path) -> None:
    """Let a folder's manifest scale each channel of its latents to mean 0 and standard deviation 1."""
    dataset = open_latents(folder)
    dataset.manifest = manifest = replace(dataset.manifest, scale=1.0, shift=0.0)
    means, stds, _ = dataset.measure()
    if constant := (stds == 0).nonzero().flatten().tolist():
        raise ValueError(f"normalise=channels: channel {constant[0]} of the latents is constant")
    scale, shift = tuple((1 / stds).tolist()), tuple(means.tolist())
    write_json(folder / FILES["manifest"], asdict(replace(manifest, scale=scale, shift=shift, std=1.0)))


def corrupt_images(job: Job) -> list[str]:
    """List the images that could not be read. Without skip_corrupt, remove their parts and raise."""
    by_part = [job.parts.read(part, "errors")["errors"].tolist() for part in range(job.parts.num_parts)]
    errors, count = list(chain(*by_part)), len(job.images.names)
    if errors:
        report = job.parts.path / "corrupt.txt"
        report.write_text("".join(f"{error}\n" for error in errors))
        print(f"{len(errors)} of {count} images are corrupt (full list in {report}):")
        print("\n".join(errors[:MAX_PRINTED]))
    if len(errors) == count or (errors and not job.request.skip_corrupt):
        for part in np.flatnonzero([*map(len, by_part)]):
            job.parts.file(part).unlink()
        rule = "fix them or add skip_corrupt=true, and run the command again; finished parts are kept"
        raise ValueError(f"{len(errors)} of {count} images are corrupt: {rule}")
    return errors


if __name__ == "__main__":
    run_main(main)
