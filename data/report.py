"""Show what a latent folder holds: images of each class, spread of the latents, and a sheet of pictures.

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

CLASSES_SHOWN = 10
SHEET_COLUMNS, SHEET_ROWS = 8, 6
NAME_LENGTH = 18
DARKENED = 0.75


@dataclass
class ReportConfig:
    """The keys of `data.report`."""

    path: str
    encoder: str | None = None  # its folder; None: the manifest's
    out: str | None = None  # the picture; None: PATH_report.png, beside the folder


def describe(dataset: LatentDataset) -> list[str]:
    """Summarize the manifest."""
    m = dataset.manifest
    scale = f"scale {m.scale}, shift {m.shift}"
    size = f"{m.resolution}x{m.resolution} pixels as " if m.resolution else ""
    flips = ", each with its flip" if m.hflip else ""
    return [
        f"entries    {m.count}, of them {m.num_held_out} held out{flips}",
        f"latents    {size}{m.in_channels}x{m.input_size}x{m.input_size}, {m.kind} in {m.dtype}, {scale}",
        f"encoder    {m.encoder}, weights {(m.encoder_hash or 'without a hash')[:16]}",
    ]


def count_classes(dataset: LatentDataset) -> list[str]:
    """Count the entries of each class: of many classes, the largest and the smallest."""
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
    """Mean and standard deviation of what the network sees, beside the promised ones."""
    manifest = dataset.manifest
    means, stds, std = dataset.measure()
    promise = "nothing is promised" if manifest.std is None else f"promised: {manifest.std:g}"
    lines = [
        f"the network sees (measured on at most {MEASURED_ENTRIES} entries):",
        f"    std {std:.4f} over all channels ({promise})",
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
    weights = f"mean weight {masks.mean():.3f}, {empty:.1%} without any weight"
    return f"masks      {dataset.manifest.conditioning_type}, {weights}"


def draw_sheet(
    dataset: LatentDataset, file: Path, device: torch.device, encoder: str | None, title: str
) -> None:
    """Decode entries from all over the data set into one picture, each with its class and flip."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    manifest = dataset.manifest
    decode = image_decoder(manifest, encoder_for(manifest, device, encoder))
    per_entry = 2 if manifest.hflip else 1
    chosen = dataset.spread_ids(SHEET_COLUMNS * SHEET_ROWS // per_entry)
    ids = chosen.repeat(per_entry)
    flipped = np.arange(len(ids)) % 2 if manifest.hflip else None
    stored, labels = dataset.read(ids, flipped)
    images = decode(manifest.to_means(stored))
    masks = None if dataset.masks is None else dataset.read_masks(ids, flipped).numpy()
    rows = -(-len(ids) // SHEET_COLUMNS)
    size = (1.7 * SHEET_COLUMNS, 1.95 * rows)
    figure, axes = plt.subplots(rows, SHEET_COLUMNS, figsize=size, layout="constrained", squeeze=False)
    for axis in axes.flat:
        axis.axis("off")
    for i, (axis, image) in enumerate(zip(axes.flat, images, strict=False)):
        name = "" if labels is None else _class_name(dataset, int(labels[i]))
        caption = "flip" if flipped is not None and flipped[i] else f"{ids[i]}  {name}"
        axis.set_title(caption[:NAME_LENGTH], fontsize=8)
        axis.imshow(image.squeeze(-1) if image.shape[-1] == 1 else image, cmap="gray", vmin=0, vmax=255)
        if masks is not None:  # darken what has little weight
            extent = (-0.5, image.shape[1] - 0.5, image.shape[0] - 0.5, -0.5)
            alpha = DARKENED * (1 - masks[i])
            axis.imshow(np.zeros_like(masks[i]), cmap="gray", vmin=0, vmax=1, alpha=alpha, extent=extent)
    darkened = "; darkened: low weight" if masks is not None else ""
    shown = f"{len(chosen)} of {manifest.count} entries, decoded (entry, class{darkened})"
    figure.suptitle(f"{title}: {shown}", fontsize=10)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _class_name(dataset: LatentDataset, label: int) -> str:
    names = dataset.manifest.class_names
    return f"{label} {names[label]}" if names else f"class {label}"


@command("report", ReportConfig, __doc__)
def main(request: ReportConfig) -> None:
    """Print the numbers, then draw the sheet."""
    path, launch = Path(request.path), start_process(tf32=False)
    name = path.resolve().name
    file = Path(request.out or path.resolve().with_name(f"{name}_report.png"))
    dataset = open_latents(path)
    lines = [f"folder     {path}", *describe(dataset), *count_classes(dataset), describe_masks(dataset)]
    print("\n".join([*lines, *measure(dataset)]))
    draw_sheet(dataset, file, launch.device, request.encoder, name)
    print(f"picture    {file}")


if __name__ == "__main__":
    run_main(main)
