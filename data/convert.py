"""Convert latents of other codebases into a latent folder.

    python -m data.convert format=maskdit_lmdb source=imagenet256_latent_lmdb/train out=latents/NAME
    python -m data.convert format=repa source=vae-sd.zip out=latents/NAME

What the format does not say is assumed, printed, and checked against the numbers of a sample before anything
is written; the keys from stored_as on replace an assumption. data/README.md has the formats. Then: python -m
data.report path=latents/NAME
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from data.encoders import PUBLISHED
from data.importers import (
    FORMATS,
    SD_VAE,
    SD_VAE_MSE,
    STORED_AS,
    Format,
    Source,
    contradiction,
    hflip_contradiction,
)
from data.latents import check_labels, open_latents
from data.manifest import LatentManifest, class_warnings
from data.writer import NEXT_STEPS, LatentWriter, check_out
from runtime.config import command, run_main
from runtime.errors import check_choice, check_not_negative, check_positive

NUM_SAMPLED = 512
ENTRIES_AT_ONCE = 256
TELL_THEIR_SCALE = ("lightningdit",)
ASSUMED = ("stored_as", "scaled", "hflip", "encoder", "scale", "shift", "std")


@dataclass
class ConvertConfig:
    """The keys of `data.convert`; None: as the format is assumed to be."""

    format: str
    source: str
    out: str
    num_classes: int | None = None  # None: the largest label + 1
    num_held_out: int = 0
    stored_as: str | None = None  # samples, mean_logvar or mean_std
    scaled: bool | None = None
    hflip: bool | None = None
    encoder: str | None = None
    scale: float | None = None  # with shift, the network sees (latent - shift) * scale
    shift: float | None = None
    std: float | None = None  # of what the network sees


@command("convert", ConvertConfig, __doc__)
def main(request: ConvertConfig) -> None:
    """Check the request and a sample of the source, then convert."""
    chosen, path = check_request(request), Path(request.source)
    source = chosen.open(path)
    told = {key: value for key, value in source.told.items() if getattr(request, key, None) is None}
    chosen = replace(chosen, **told)
    known = " ".join(f"{key}={value}" for key, value in assumed(chosen).items())
    print(f"format={request.format}, assumed: {known}")
    sampled = check_numbers(chosen, source, path)
    manifest = describe(request, chosen, source, sampled)
    with LatentWriter(request.out, manifest) as writer:
        total = -(-manifest.count // ENTRIES_AT_ONCE)
        for start, stored in tqdm(pieces(chosen, source), total=total, desc="convert", unit="piece"):
            labels = None if source.labels is None else source.labels[start : start + len(stored)]
            writer.append(stored, labels)
    print(f"{request.out}: {manifest.count} entries of {manifest.num_classes} classes")
    for warning in class_warnings(open_latents(request.out).manifest):
        print(f"warning: {warning}")
    print(NEXT_STEPS.format(out=request.out))


def assumed(chosen: Format) -> dict[str, Any]:
    """The assumptions, as the keys that replace them, and the range of pixels."""
    return {key: getattr(chosen, key) for key in (*ASSUMED, "pixel_range")}


def check_request(request: ConvertConfig) -> Format:
    """Check the request, and replace assumptions of its format."""
    check_choice("format", request.format, list(FORMATS))
    if request.stored_as is not None:
        check_choice("stored_as", request.stored_as, STORED_AS)
    given = {key: value for key, value in asdict(request).items() if value is not None}
    for key in ("scale", "std", "num_classes"):
        check_positive(key, given.get(key, 1))
    check_not_negative("num_held_out", request.num_held_out)
    for key, other in (("scale", "shift"), ("shift", "scale")):
        if key in given and other not in given:  # the format's would not belong to it
            raise ValueError(f"{key}={given[key]} needs {other} as well")
    encoder = PUBLISHED.get(request.encoder, request.encoder)
    is_scale_known = request.scale is not None or request.format in TELL_THEIR_SCALE
    if encoder not in (None, SD_VAE, SD_VAE_MSE) and not is_scale_known:
        rule = "may have another scale than the assumed one: give scale=NUMBER shift=NUMBER as well"
        raise ValueError(f"encoder={encoder} {rule}")
    if not Path(request.source).exists():
        raise FileNotFoundError(f"source={request.source} not found")
    check_out(request.out)
    changes = {key: given[key] for key in ASSUMED if key in given}
    return replace(FORMATS[request.format], **{**changes, "encoder": encoder} if encoder else changes)


def check_numbers(chosen: Format, source: Source, path: Path) -> np.ndarray:
    """Check the assumptions against a sample of entries, and return it (N, C', H, W)."""
    if not source.count:
        raise ValueError(f"source={path} holds no entries")
    if chosen.hflip and source.at is None:
        raise ValueError("hflip=true needs a format whose entries can be read in any order, not tars")
    if chosen.hflip and source.count % 2:
        raise ValueError(f"source={path}: {source.count} entries are not images and their flips: hflip=false")
    half = source.count // 2 if chosen.hflip else source.count
    ids = np.unique(np.linspace(0, half - 1, min(NUM_SAMPLED, half)).astype(int))
    entries = _stack([*map(source.at, ids)] if source.at else [*islice(source.entries(), NUM_SAMPLED)])
    found, labels = contradiction(chosen, entries), source.labels
    if chosen.hflip and not found:
        if labels is not None and not np.array_equal(labels[:half], labels[half:]):
            found = "the classes of the second half are not those of the first: hflip=false"
        else:
            others = _stack([source.at(half + i) for i in ids])
            found = hflip_contradiction(chosen.means(entries), chosen.means(others))
    if found:
        raise ValueError(f"source={path}: {len(entries)} entries contradict the assumptions: {found}")
    return entries


def describe(request: ConvertConfig, chosen: Format, source: Source, sampled: np.ndarray) -> LatentManifest:
    num_classes = request.num_classes or (0 if source.labels is None else int(source.labels.max()) + 1)
    if source.labels is not None:
        check_labels(source.labels, num_classes, Path(request.source))
    return LatentManifest(
        count=source.count // 2 if chosen.hflip else source.count,
        shape=sampled.shape[1:],
        dtype="float16",
        kind="samples" if chosen.stored_as == "samples" else "moments",
        num_classes=num_classes,
        hflip=chosen.hflip,
        num_held_out=request.num_held_out,
        origin={"format": request.format, "source": request.source, "assumed": assumed(chosen)},
        **{key: getattr(chosen, key) for key in ("encoder", "scale", "shift", "std", "pixel_range")},
    )


def pieces(chosen: Format, source: Source) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (position, stored latents) of ENTRIES_AT_ONCE entries, flips beside their images."""
    half = source.count // 2
    entries = source.entries()
    if chosen.hflip:
        entries = (np.stack([source.at(i), source.at(half + i)]) for i in range(half))
    start = 0
    while taken := list(islice(entries, ENTRIES_AT_ONCE)):
        piece = _stack(taken)
        yield start, chosen.to_stored(piece.reshape(-1, *piece.shape[-3:])).reshape(piece.shape)
        start += len(taken)


def _stack(entries: list[np.ndarray]) -> np.ndarray:
    shapes = sorted({entry.shape for entry in entries})
    if len(shapes) > 1 or len(shapes[0]) < 3:
        raise ValueError(f"entries must all be of one shape (C, H, W), found {', '.join(map(str, shapes))}")
    return np.stack(entries)


if __name__ == "__main__":
    run_main(main)
