"""Pictures of samples: an overview of all steps, a grid that grows, small images as text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from runtime.parts import PartCache
from runtime.pictures import PADDING, save_grid, save_picture, strip_of, zoom_of

TEXT_COLUMNS = 100
OVER_TIME, MAX_ROWS = "over_time.png", 20
GRID, GRID_ROWS = "grid.png", 10  # the picture of unfinished sampling


def save_over_time(folder: Path, height: int) -> None:
    """Stack the first `height` pixels of each picture `step_N.png` of a folder into one picture."""
    files = sorted(folder.glob(f"step_{'[0-9]' * 8}.png"))  # not the pictures of sample.py
    files = [files[i] for i in np.unique(np.linspace(0, len(files) - 1, MAX_ROWS).round().astype(int))]
    rows = []
    for file in files:
        with Image.open(file, formats=["PNG"]) as picture:
            row = np.asarray(picture.convert("RGB"))[:height]
        step = f"step {int(file.stem.removeprefix('step_'))}"
        rows += [strip_of([step], row.shape[1], 1, 3), row]
    if len({row.shape[1] for row in rows}) == 1:  # skipped if earlier pictures have another width
        save_picture(np.concatenate(rows), folder / OVER_TIME)


def row_height(images: np.ndarray, captions: Sequence[str] | None, columns: int) -> int:
    """Return the height of the first row of a grid, in pixels."""
    height, width = (side * zoom_of(images) + 2 * PADDING for side in images.shape[1:3])
    return height + (len(strip_of(captions[:columns], width, columns, 1)) if captions else 0)


def interleave_classes(labels: np.ndarray) -> np.ndarray:
    """Return indices that order images with labels (N,) so that the classes alternate."""
    turns, by_class = np.empty(len(labels), dtype=int), np.argsort(labels, kind="stable")
    _, first, counts = np.unique(labels[by_class], return_index=True, return_counts=True)
    turns[by_class] = np.arange(len(labels)) - first.repeat(counts)  # earlier images of its class
    return np.lexsort((labels, turns))


def text_picture(images: np.ndarray) -> str:
    """Draw small grey images (N, H, W, 1) uint8 with half blocks; return "" for others."""
    count = TEXT_COLUMNS // images.shape[2]
    if count == 0 or images.shape[3] != 1:
        return ""
    row = np.concatenate(list(images[:count, :, :, 0] > 127), axis=1)
    blocks = 2 * row[: 2 * (len(row) // 2) : 2] + row[1::2]
    return "\n".join("".join(" ▄▀█"[block] for block in line) for line in blocks)


class GrowingGrid:
    """A grid of the first samples, redrawn as parts finish. Classes alternate; missing samples are black.

    Args:
        images: draws the samples, see `builders.drawing.Drawing`.
        cache: holds the finished parts of the samples.
    """

    def __init__(self, images: Any, cache: PartCache, columns: int):
        labels = images.labels()
        is_in_order = labels is None or labels.dtype.kind == "U"
        order = np.arange(images.count) if is_in_order else interleave_classes(labels)
        self.sample_ids = order[: GRID_ROWS * columns]
        self.file: Path = cache.path / GRID
        self._captions = images.captions(None if labels is None else labels[self.sample_ids])
        self._part_size, self._cache, self._columns = images.part_size, cache, columns
        self._images = np.zeros((len(self.sample_ids), *images.shape), np.uint8)
        self._seen: set[int] = set()

    def update(self) -> None:
        """Redraw the grid if newly finished parts contain its samples."""
        done, part_of = self._cache.done(), self.sample_ids // self._part_size
        fresh = (done - self._seen) & set(part_of.tolist())
        for part in fresh:
            images = self._cache.read(part)["images"]
            self._images[part_of == part] = images[self.sample_ids[part_of == part] % self._part_size]
        self._seen |= done
        if fresh:
            save_grid(self._images, self.file, self._columns, self._captions)
