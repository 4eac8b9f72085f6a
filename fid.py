"""Score samples against a reference.

    accelerate launch fid.py samples=runs/NAME/samples/FILE.npz reference=latents/digits

The table also scores real held-out images and the means of the classes by the same measures, so that the numbers mean
something. The result is kept as JSON beside the samples.
"""

import hashlib
import json
import zipfile
from pathlib import Path

import hydra
import numpy as np
from omegaconf import DictConfig

from data import open_latents, read_manifest, real_images
from training import config as configuration
from training.machine import start_process
from training.provenance import environment

configuration.register()


@hydra.main(version_base="1.3", config_path="configs", config_name="fid")
def main(cfg: DictConfig) -> None:
    """Read, score, print, record."""
    state = start_process()
    if not state.is_main_process:
        return  # these scores take a second; one process computes them
    with configuration.user_mistakes():
        config = configuration.resolve(cfg)
        samples, labels = read_samples(Path(config["samples"]))
        manifest = read_manifest(config["reference"])
        dataset = open_latents(config["reference"], manifest.input_size, manifest.in_channels, manifest.num_classes)
        reference, reference_labels = real_images(dataset, dataset.train_ids)
        if labels is None or reference_labels is None:
            raise ValueError(f"samples={config['samples']} and reference={config['reference']} must both have labels")
        if samples.shape[1:] != reference.shape[1:]:
            raise ValueError(f"samples={config['samples']} are {samples.shape[1:]}, the reference is {reference.shape[1:]}")
        if len(labels) != len(samples):
            raise ValueError(f"samples={config['samples']} holds {len(samples)} images and {len(labels)} labels")
        evaluator = configuration.build(config["evaluation"])((reference, reference_labels), source=None)

    rows = {"samples": (samples, labels), "class means": class_means(reference, reference_labels, len(samples))}
    if len(dataset.held_out_ids) > 1:
        rows["held-out real"] = real_images(dataset, dataset.held_out_ids)
    scores = {name: {"n": len(row[0]), **evaluator.score(*row)} for name, row in rows.items()}
    print(table(scores))
    print("A distance also depends on n: it grows as n falls.")
    result = {
        "scores": scores,
        "samples": config["samples"],
        "samples_sha256": sha256(Path(config["samples"])),
        "reference": config["reference"],
        "data": dataset.describe(),
        "environment": environment("cpu"),
    }
    output = Path(config["output"] or Path(config["samples"]).with_suffix(".scores.json"))
    output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"scores {output}")


def read_samples(file: Path) -> tuple[np.ndarray, np.ndarray | None]:
    """Read images (N, H, W, C) uint8 and, if there are any, labels (N,) from an .npz in the layout of [ADM].

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no .npz, or its arrays are not images and labels.
    """
    if not file.is_file():
        raise FileNotFoundError(f"samples={file} not found: sample.py writes one")
    try:
        with np.load(file, allow_pickle=False) as arrays:
            images, labels = arrays["arr_0"], arrays.get("arr_1")
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"samples={file} can not be read as an .npz with arr_0: {error}") from error
    if images.dtype != np.uint8 or images.ndim != 4 or len(images) < 2:
        raise ValueError(f"samples={file}: arr_0 is {images.dtype} {images.shape}, must be uint8 (N, H, W, C), N >= 2")
    return images, labels


def class_means(images: np.ndarray, labels: np.ndarray, num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean image of each class in turn: what a model that knows the classes and nothing else would draw."""
    classes = np.arange(num_samples) % (labels.max() + 1)
    means = [images[labels == label].mean(axis=0).round().astype(np.uint8) for label in range(labels.max() + 1)]
    return np.stack(means)[classes], classes


def sha256(file: Path) -> str:
    """Return the hash of a file."""
    with file.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def table(scores: dict[str, dict[str, float]]) -> str:
    """Lay scores out in columns."""
    keys = list(next(iter(scores.values())))
    lines = [f"{'':16}" + "".join(f"{key:>16}" for key in keys)]
    for name, row in scores.items():
        lines.append(f"{name:16}" + "".join(f"{v:>16}" if isinstance(v, int) else f"{v:>16.3f}" for v in row.values()))
    return "\n".join(lines)


if __name__ == "__main__":
    configuration.run(main)
