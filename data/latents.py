"""Read latent folders: memory-mapped latents or posterior moments, labels and masks, by index.

data/README.md describes the format. A network sees z = (latent - shift) * scale, applied once, with the
manifest's values. Moments (mean and log-variance of a Gaussian posterior) are sampled again at each step.

Shapes: N samples, C channels, H = W.
"""

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.manifest import FILES, LatentManifest, read_manifest, untrained_classes_of
from runtime.arrays import map_array

NUM_FINGERPRINT_ENTRIES = 64
HELD_OUT_SEED = 0
MEASURED_ENTRIES, ENTRIES_AT_ONCE = 4096, 256


class LatentDataset:
    """Latents, labels and masks of a data set, read by index. The same entries are always held out."""

    def __init__(
        self,
        stored: np.ndarray,
        labels: np.ndarray | None,
        manifest: LatentManifest,
        masks: np.ndarray | None = None,
        encoder: str | None = None,  # path; None: the manifest's
        features: np.ndarray | None = None,
        text: np.ndarray | None = None,
    ):
        self.stored, self.labels, self.masks, self.encoder = stored, labels, masks, encoder
        self.features, self.text = features, text
        self.held_out_ids, self.train_ids = map(np.sort, split(manifest.count, manifest.num_held_out))
        trained = None if labels is None else labels[self.train_ids]
        untrained = untrained_classes_of(trained, manifest.num_classes)
        self.manifest = replace(manifest, untrained_classes=untrained)

    def read(
        self, ids: np.ndarray, flipped: np.ndarray | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Read the stored latents (N, C', H, W) and labels (N,) int64 of entries `ids`.

        Args:
            flipped: (N,), 1 reads the flip and 0 the image. None: the images.
        """
        labels = None if self.labels is None else torch.from_numpy(self.labels[ids])
        if self.manifest.hflip and flipped is None:
            flipped = np.zeros(len(ids), dtype=int)
        return torch.from_numpy(_read_in_order(self.stored, ids, flipped)), labels

    def read_masks(self, ids: np.ndarray, flipped: np.ndarray | None = None) -> torch.Tensor:
        """Read the weights of all positions of entries `ids`, (N, H, W) fp32 in [0, 1]."""
        masks = torch.from_numpy(_read_in_order(self.masks, ids))
        if flipped is not None:
            masks = torch.where(torch.from_numpy(flipped).bool()[:, None, None], masks.flip(-1), masks)
        is_segmentation = self.manifest.conditioning_type == "segmentation"
        return (masks > 0).float() if is_segmentation else masks.float() / 255

    def read_features(self, ids: np.ndarray, flipped: np.ndarray | None = None) -> torch.Tensor:
        """Read the features (N, T, F) of the images of entries `ids`."""
        if self.manifest.hflip and flipped is None:
            flipped = np.zeros(len(ids), dtype=int)
        return torch.from_numpy(_read_in_order(self.features, ids, flipped))

    def read_text(self, ids: np.ndarray, choice: np.ndarray | None = None) -> torch.Tensor:
        """Read captions of entries `ids`, (N, M) or (N, M, F), see `models.TextShape`.

        Args:
            choice: (N,), which caption of each entry; None: the first.
        """
        choice = np.zeros(len(ids), dtype=int) if choice is None else choice
        text = torch.from_numpy(_read_in_order(self.text, ids, choice))
        words = (self.manifest.text or {}).get("words")
        if words and not 0 <= text.min() <= text.max() <= len(words):
            raise ValueError(f"{FILES['text']} has ids {text.min()}..{text.max()}, not in [0, {len(words)}]")
        return text

    def captions(self, ids: np.ndarray) -> np.ndarray | None:
        """Return the first caption of entries `ids` as text (N,); None without a vocabulary."""
        if self.text is None or "words" not in (text := self.manifest.text or {}):
            return None
        words = text["words"]
        rows = self.read_text(ids).tolist()
        return np.array([" ".join(words[i - 1] for i in row if i) for row in rows])

    def spread_ids(self, max_count: int) -> np.ndarray:
        """Choose at most `max_count` distinct entries, evenly spread over the data set."""
        return np.unique(np.linspace(0, self.manifest.count - 1, max_count).astype(int))

    def measure(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Measure the network's input on at most MEASURED_ENTRIES entries.

        Returns the mean (C,) and standard deviation (C,) of each channel, and the one over all channels.
        """
        ids, generator = self.spread_ids(MEASURED_ENTRIES), torch.Generator().manual_seed(0)
        total, squares = torch.zeros(2, self.manifest.in_channels).double()
        for part in np.array_split(ids, -(-len(ids) // ENTRIES_AT_ONCE)):
            latents = self.manifest.to_latents(self.read(part)[0], generator).double()
            total += latents.sum(dim=(0, 2, 3))
            squares += latents.square().sum(dim=(0, 2, 3))
        count = len(ids) * self.manifest.input_size**2
        means, powers = total / count, squares / count
        std = (powers.mean() - means.mean().square()).clamp(min=0).sqrt()
        return means, (powers - means.square()).clamp(min=0).sqrt(), std

    def __getstate__(self) -> dict[str, Any]:
        # Pickling would copy a memory map. Worker processes open the file instead.
        maps = {key: value for key, value in self.__dict__.items() if isinstance(value, np.memmap)}
        return {**self.__dict__, **{key: Path(value.filename) for key, value in maps.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        files = {key: value for key, value in state.items() if isinstance(value, Path)}
        opened = {key: np.load(file, mmap_mode="r", allow_pickle=False) for key, file in files.items()}
        self.__dict__.update({**state, **opened})

    def describe(self) -> dict[str, Any]:
        """Return the manifest, and a fingerprint of the manifest, the labels and some entries."""
        manifest = {**asdict(self.manifest), "origin": None}  # the fingerprint does not depend on the origin
        digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode())
        ids = self.spread_ids(NUM_FINGERPRINT_ENTRIES)
        digest.update(b"" if self.labels is None else self.labels.tobytes())
        for array in (self.stored, self.masks, self.features, self.text):
            digest.update(b"" if array is None else array[ids].tobytes())
        return {"fingerprint": digest.hexdigest(), "manifest": {**manifest, "checksums": None}}


def split(count: int, num_held_out: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the held-out and of the training entries, each in a fixed random order."""
    order = np.random.default_rng(HELD_OUT_SEED).permutation(count)
    return order[:num_held_out], order[num_held_out:]


def open_latents(
    path: str | Path,
    input_size: int | None = None,
    in_channels: int | None = None,
    num_classes: int | None = None,
    encoder: str | None = None,
    text: dict[str, int | None] | None = None,
) -> LatentDataset:
    """Open a latent folder, and check that it has the sizes that a run expects (None: any).

    Args:
        encoder: path of the encoder that decodes samples. None: the manifest's.
        text: shape of the captions, see `models.TextShape`.

    Raises:
        FileNotFoundError: the folder has no manifest.
        ValueError: a file is missing or contradicts the manifest, or the run expects other sizes.
    """
    manifest, folder = read_manifest(path), Path(path)
    sizes = {"input_size": input_size, "in_channels": in_channels, "num_classes": num_classes}
    manifest.check_sizes(str(path), sizes, text)
    arrays = {}
    for key, (dtype, shape) in manifest.arrays().items():
        file, array = folder / FILES[key], map_array(folder / FILES[key])
        if array.dtype != np.dtype(dtype) or array.shape != shape:
            rule = f"must be {dtype} {shape} as in the manifest"
            raise ValueError(f"{file} is {array.dtype} {array.shape}, {rule}")
        arrays[key] = array
    stored, labels = arrays.pop("latents"), arrays.pop("labels", None)
    if labels is not None:
        labels = np.array(labels)
        check_labels(labels, manifest.num_classes, folder / FILES["labels"])
    return LatentDataset(stored, labels, manifest, encoder=encoder, **arrays)


def check_labels(labels: np.ndarray, num_classes: int, file: Path, first: int = 0) -> None:
    """Raise a ValueError unless all labels, of entries first, first + 1, ..., are in [0, num_classes)."""
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(wrong):
        label = f"label {labels[wrong[0]]} at position {first + wrong[0]}"
        raise ValueError(f"{file}: {label} must be in [0, {num_classes - 1}]")


def _read_in_order(array: np.ndarray, ids: np.ndarray, flipped: np.ndarray | None = None) -> np.ndarray:
    order = np.argsort(ids)  # read a memory map in the order of the file
    in_order = array[ids[order]] if flipped is None else array[ids[order], flipped[order]]
    entries = np.empty_like(in_order, subok=False)
    entries[order] = in_order
    return entries
