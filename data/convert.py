"""Convert latents of other codebases into a latent folder.

    python -m data.convert format=maskdit_lmdb source=imagenet256_latent_lmdb/train out=latents/NAME
    python -m data.convert format=repa source=vae-sd.zip out=latents/NAME

Foreign formats do not say how their numbers were scaled or what their channels are. The assumptions about
them are printed, and checked on a sample of entries before anything is written. The keys from stored_as on
replace an assumption. data/README.md lists the formats. Afterwards: python -m data.report path=latents/NAME
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data.encoders import PUBLISHED
from data.importers import FORMATS, STORED_AS, Format, Source, find_contradiction, find_hflip_contradiction
from data.latents import check_labels, open_latents
from data.manifest import LatentManifest, class_warnings
from data.writer import LatentWriter, check_out, next_steps
from runtime.config import command, run_main
from runtime.errors import check_choice, check_not_negative, check_positive

NUM_SAMPLED = 512
ENTRIES_AT_ONCE = 256
FORMATS_WITH_SCALE = ("lightningdit",)  # their files hold the scale
SD_VAES = (PUBLISHED["sd-vae-ft-ema"], PUBLISHED["sd-vae-ft-mse"])  # their latents are equal
ASSUMED = ("stored_as", "scaled", "hflip", "encoder", "scale", "shift", "std")


@dataclass
class ConvertConfig:
    """The keys of `data.convert`. None: the assumption of the format."""

    format: str
    source: str
    out: str
    num_classes: int | None = None  # None: the largest label + 1
    num_held_out: int = 0
    stored_as: str | None = None  # samples, mean_logvar or mean_std
    scaled: bool | None = None
    hflip: bool | None = None
    encoder: str | None = None
    scale: float | None = None  # the network sees (latent - shift) * scale; needs shift
    shift: float | None = None
    std: float | None = None  # standard deviation of the network's input


@command("convert", ConvertConfig, __doc__)
def main(request: ConvertConfig) -> None:
    """Check the request and a sample of the source, then convert."""
    foreign, path = check_request(request), Path(request.source)
    source = foreign.open(path)
    stored = {key: value for key, value in source.stored.items() if getattr(request, key, None) is None}
    foreign = replace(foreign, **stored)
    assumptions = " ".join(f"{key}={value}" for key, value in assumptions_of(foreign).items())
    print(f"format={request.format}, assumed: {assumptions}")
    sampled = check_numbers(foreign, source, path)
    manifest = build_manifest(request, foreign, source, sampled.shape[1:])
    with LatentWriter(request.out, manifest) as writer:
        total = -(-manifest.count // ENTRIES_AT_ONCE)
        for start, stored in tqdm(chunks(foreign, source), total=total, desc="convert", unit="chunk"):
            labels = None if source.labels is None else source.labels[start : start + len(stored)]
            writer.append(stored, labels)
    print(f"{request.out}: {manifest.count} entries of {manifest.num_classes} classes")
    for warning in class_warnings(open_latents(request.out).manifest):
        print(f"warning: {warning}")
    print(next_steps(request.out, manifest))


def assumptions_of(foreign: Format) -> dict[str, Any]:
    """Return the assumptions and the pixel range, by key."""
    return {key: getattr(foreign, key) for key in (*ASSUMED, "pixel_range")}


def check_request(request: ConvertConfig) -> Format:
    """Check the request and return its format, with the assumptions that the request replaces."""
    check_choice("format", request.format, list(FORMATS))
    if request.stored_as is not None:
        check_choice("stored_as", request.stored_as, STORED_AS)
    values = {key: value for key, value in asdict(request).items() if value is not None}
    for key in ("scale", "std", "num_classes"):
        check_positive(key, values.get(key, 1))
    check_not_negative("num_held_out", request.num_held_out)
    if (request.scale is None) != (request.shift is None):  # the format's value belongs to another scale
        raise ValueError("scale and shift must be given together")
    encoder = PUBLISHED.get(request.encoder, request.encoder)
    is_scale_known = request.scale is not None or request.format in FORMATS_WITH_SCALE
    if encoder not in (None, *SD_VAES) and not is_scale_known:
        rule = "may have another scale than the assumed one: also give scale=NUMBER shift=NUMBER"
        raise ValueError(f"encoder={encoder} {rule}")
    if not Path(request.source).exists():
        raise FileNotFoundError(f"source={request.source} not found")
    check_out(request.out)
    changes = {key: values[key] for key in ASSUMED if key in values}
    return replace(FORMATS[request.format], **{**changes, "encoder": encoder} if encoder else changes)


def check_numbers(foreign: Format, source: Source, path: Path) -> np.ndarray:
    """Check the assumptions on a sample of entries, and return the sample (N, C', H, W)."""
    if not source.count:
        raise ValueError(f"source={path} has no entries")
    if foreign.hflip and source.count % 2:
        raise ValueError(f"source={path}: hflip needs pairs, not {source.count} entries: set hflip=false")
    half = source.count // 2 if foreign.hflip else source.count
    ids = np.unique(np.linspace(0, half - 1, min(NUM_SAMPLED, half)).astype(int))
    entries = _stack([*map(source.read, ids)])
    contradiction, labels = find_contradiction(foreign, entries), source.labels
    if foreign.hflip and not contradiction:
        if labels is not None and not np.array_equal(labels[:half], labels[half:]):
            contradiction = "the two halves have different labels: set hflip=false"
        else:
            flips = _stack([source.read(half + i) for i in ids])
            contradiction = find_hflip_contradiction(foreign.means(entries), foreign.means(flips))
    if contradiction:
        raise ValueError(f"source={path}: {len(entries)} entries contradict the assumptions: {contradiction}")
    return entries


def build_manifest(request: ConvertConfig, foreign: Format, source: Source, shape: tuple) -> LatentManifest:
    num_classes = request.num_classes or (0 if source.labels is None else int(source.labels.max()) + 1)
    if source.labels is not None:
        check_labels(source.labels, num_classes, Path(request.source))
    return LatentManifest(
        count=source.count // 2 if foreign.hflip else source.count,
        shape=shape,
        dtype="float16",
        kind="samples" if foreign.stored_as == "samples" else "moments",
        num_classes=num_classes,
        hflip=foreign.hflip,
        num_held_out=request.num_held_out,
        origin={"format": request.format, "source": request.source, "assumed": assumptions_of(foreign)},
        **{key: getattr(foreign, key) for key in ("encoder", "scale", "shift", "std", "pixel_range")},
    )


def chunks(foreign: Format, source: Source) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (position, stored latents) of ENTRIES_AT_ONCE entries, each image with its flip."""
    half = source.count // 2
    entries = map(source.read, range(source.count))
    if foreign.hflip:
        entries = (np.stack([source.read(i), source.read(half + i)]) for i in range(half))
    start = 0
    while chunk := list(islice(entries, ENTRIES_AT_ONCE)):
        stacked = _stack(chunk)
        yield start, foreign.to_stored(stacked.reshape(-1, *stacked.shape[-3:])).reshape(stacked.shape)
        start += len(chunk)


def _stack(entries: list[np.ndarray]) -> np.ndarray:
    shapes = sorted({entry.shape for entry in entries})
    if len(shapes) > 1 or len(shapes[0]) < 3:
        raise ValueError(f"all entries must have one shape (C, H, W), found {', '.join(map(str, shapes))}")
    return np.stack(entries)


if __name__ == "__main__":
    run_main(main)
