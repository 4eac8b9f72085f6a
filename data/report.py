"""Summarize a latent folder: entries of each class, statistics of the latents, and a sheet of decoded images.

python -m data.report path=latents/NAME
python -m data.report path=latents/NAME encoder=FOLDER out=sheet.png
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from data.encoders import encoder_for, image_decoder
from data.latents import MEASURED_ENTRIES, LatentDataset, open_latents
from data.manifest import class_warnings
from runtime.config import command, run_main
from runtime.machine import start_process
from runtime.pictures import save_grid

CLASSES_SHOWN = 10
SHEET_COLUMNS, SHEET_ROWS = 8, 6
DARKENED = 0.75


@dataclass
class ReportConfig:
    """The keys of `data.report`."""

    path: str
    encoder: str | None = None  # name or folder; None: the manifest's
    out: str | None = None  # file of the sheet; None: PATH_report.png


def summarize(dataset: LatentDataset) -> list[str]:
    m = dataset.manifest
    scale = f"scale {m.scale}, shift {m.shift}"
    size = f"{m.resolution}x{m.resolution} pixels as " if m.resolution else ""
    flips = ", each with its flip" if m.hflip else ""
    return [
        f"entries    {m.count} ({m.num_held_out} held out){flips}",
        f"latents    {size}{m.in_channels}x{m.input_size}x{m.input_size}, {m.kind} in {m.dtype}, {scale}",
        f"encoder    {m.encoder} (hash of the weights: {(m.encoder_hash or 'none')[:16]})",
    ]


def count_classes(dataset: LatentDataset) -> list[str]:
    """Count the entries of each class. With many classes, only the largest and the smallest are listed."""
    if dataset.labels is None:
        return ["classes    none"]
    counts = np.bincount(dataset.labels, minlength=dataset.manifest.num_classes)
    spread = f"with {counts.min()} to {counts.max()} entries, median {np.median(counts):g}"
    rows = [f"{counts[i]:12}  {_class_name(dataset, i)}" for i in np.argsort(-counts, kind="stable")]
    if len(rows) > 2 * CLASSES_SHOWN:
        rows[CLASSES_SHOWN:-CLASSES_SHOWN] = ["             ..."]
    warnings = [f"warning: {line}" for line in class_warnings(dataset.manifest)]
    return [f"classes    {len(counts)}, {spread}", *rows, *warnings]


def measure(dataset: LatentDataset) -> list[str]:
    """Compare mean and standard deviation of the network's input with the expected ones."""
    manifest = dataset.manifest
    means, stds, std = dataset.measure()
    expected = "unknown" if manifest.std is None else f"{manifest.std:g}"
    lines = [
        f"input of the network (measured on at most {MEASURED_ENTRIES} entries):",
        f"    std {std:.4f} over all channels (expected: {expected})",
    ]
    for channel, (mean, channel_std) in enumerate(zip(means.tolist(), stds.tolist(), strict=True)):
        lines.append(f"    channel {channel}: mean {mean:+.4f}, std {channel_std:.4f}")
    warning = manifest.std_warning(std)
    return [*lines, warning] if warning else lines


def describe_masks(dataset: LatentDataset) -> str:
    if dataset.masks is None:
        return "masks      none"
    masks = dataset.read_masks(dataset.spread_ids(MEASURED_ENTRIES))
    empty = float((masks.flatten(1).max(dim=1).values == 0).float().mean())
    weights = f"mean weight {masks.mean():.3f}, {empty:.1%} are empty"
    return f"masks      {dataset.manifest.conditioning_type}, {weights}"


def draw_sheet(dataset: LatentDataset, file: Path, device: torch.device, encoder: str | None) -> None:
    """Draw decoded entries with their classes or captions and flips, evenly spread over the data set."""
    manifest = dataset.manifest
    decode = image_decoder(manifest, encoder_for(manifest, device, encoder))
    per_entry = 2 if manifest.hflip else 1
    ids = dataset.spread_ids(SHEET_COLUMNS * SHEET_ROWS // per_entry).repeat(per_entry)
    flipped = np.arange(len(ids)) % 2 if manifest.hflip else None
    stored, labels = dataset.read(ids, flipped)
    images = decode(manifest.to_means(stored))
    if dataset.masks is not None:  # darken positions with low weight
        weights = dataset.read_masks(ids, flipped).numpy()  # (N, h, w)
        side = images.shape[1] // weights.shape[1]
        brightness = 1 - DARKENED * (1 - weights.repeat(side, axis=1).repeat(side, axis=2))
        images = (images * brightness[..., None]).astype(np.uint8)
    names = [""] * len(ids) if labels is None else [_class_name(dataset, i) for i in labels.tolist()]
    texts = dataset.captions(ids)
    captions = [f"{i}: {text}" for i, text in zip(ids, names if texts is None else texts, strict=True)]
    if manifest.hflip:
        captions[1::2] = ["flip"] * (len(ids) // 2)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_grid(images, file, SHEET_COLUMNS, captions)


def _class_name(dataset: LatentDataset, label: int) -> str:
    names = dataset.manifest.class_names
    return f"{label} {names[label]}" if names and names[label] != str(label) else f"class {label}"


@command("report", ReportConfig, __doc__)
def main(request: ReportConfig) -> None:
    """Print the statistics and draw the sheet."""
    path, launch = Path(request.path), start_process(tf32=False)
    file = Path(request.out or path.resolve().with_name(f"{path.resolve().name}_report.png"))
    dataset = open_latents(path)
    lines = [f"folder     {path}", *summarize(dataset), *count_classes(dataset), describe_masks(dataset)]
    print("\n".join([*lines, *measure(dataset)]))
    draw_sheet(dataset, file, launch.device, request.encoder)
    print(f"sheet      {file}: decoded entries, their classes or captions, dark where masks have low weight")


if __name__ == "__main__":
    run_main(main)
