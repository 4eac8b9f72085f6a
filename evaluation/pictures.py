"""Pictures for people: a grid of images as a PNG file, and small images as text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from runtime.files import atomic_write
from runtime.parts import PartCache

PADDING = 2
MIN_TILE = 64
CAPTION_HEIGHT, LETTER_WIDTH = 14, 6
TEXT_COLUMNS = 100
OVER_TIME, MAX_ROWS = "over_time.png", 20
GRID, GRID_ROWS = "grid.png", 10  # of images that are being drawn


def save_grid(
    images: np.ndarray, file: Path, columns: int, captions: Sequence[str] | None = None
) -> np.ndarray:
    """Write images (N, H, W, C) uint8 as one PNG and return it (height, width, C); enlarge small ones.

    Args:
        captions: of each image, written above a row unless they are those of the row before.
    """
    columns = min(columns, len(images))
    zoom = _zoom(images)
    tiles = images.repeat(zoom, axis=1).repeat(zoom, axis=2)
    tiles = np.pad(tiles, ((0, 0), (PADDING, PADDING), (PADDING, PADDING), (0, 0)))
    tiles = np.pad(tiles, ((0, -len(tiles) % columns), (0, 0), (0, 0), (0, 0)))
    _, height, width, channels = tiles.shape
    rows = tiles.reshape(-1, columns, height, width, channels).transpose(0, 2, 1, 3, 4)
    rows = rows.reshape(-1, height, columns * width, channels)
    parts, above = [], None
    for i, row in enumerate(rows):
        said = None if captions is None else [*captions[i * columns : (i + 1) * columns]]
        if said and said != (above or [])[: len(said)]:
            parts.append(_strip(said, width, columns, channels))
            above = said
        parts.append(row)
    grid = np.concatenate(parts)
    _save(grid, file)
    return grid


def save_over_time(folder: Path, height: int) -> None:
    """Write the first rows, of so many pixels, of the pictures `step_N.png` in a folder below each other."""
    files = sorted(folder.glob(f"step_{'[0-9]' * 8}.png"))  # not those of sample.py
    files = [files[i] for i in np.unique(np.linspace(0, len(files) - 1, MAX_ROWS).round().astype(int))]
    rows = []
    for file in files:
        with Image.open(file, formats=["PNG"]) as picture:
            row = np.asarray(picture.convert("RGB"))[:height]
        step = f"step {int(file.stem.removeprefix('step_'))}"
        rows += [_strip([step], row.shape[1], 1, 3), row]
    if len({row.shape[1] for row in rows}) == 1:  # not where an earlier version drew other pictures
        _save(np.concatenate(rows), folder / OVER_TIME)


def row_height(images: np.ndarray, captions: Sequence[str] | None) -> int:
    """Return the height of the first row of a grid, in pixels."""
    return images.shape[1] * _zoom(images) + 2 * PADDING + (CAPTION_HEIGHT if captions else 0)


def _zoom(images: np.ndarray) -> int:
    return max(1, MIN_TILE // images.shape[1])


def _strip(captions: Sequence[str], width: int, columns: int, channels: int) -> np.ndarray:
    """Draw captions side by side, (CAPTION_HEIGHT, columns * width, channels)."""
    strip = Image.new("L", (columns * width, CAPTION_HEIGHT))
    draw = ImageDraw.Draw(strip)
    for i, caption in enumerate(captions):
        draw.text((i * width + PADDING, 1), caption[: width // LETTER_WIDTH], fill=255)
    return np.asarray(strip)[:, :, None].repeat(channels, axis=2)


def _save(picture: np.ndarray, file: Path) -> None:
    file.parent.mkdir(exist_ok=True)  # not its parents: a run folder that was removed stays so
    with atomic_write(file) as partial:
        Image.fromarray(picture.squeeze(-1) if picture.shape[2] == 1 else picture).save(partial)


def in_turn(labels: np.ndarray) -> np.ndarray:
    """Order images with labels (N,) so that the classes take turns; return their indices."""
    turns, by_class = np.empty(len(labels), dtype=int), np.argsort(labels, kind="stable")
    _, first, counts = np.unique(labels[by_class], return_index=True, return_counts=True)
    turns[by_class] = np.arange(len(labels)) - first.repeat(counts)  # images of its class before each
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
    """A picture of the first samples, class by class; those that are not drawn yet are black.

    Args:
        images: draws them, see `builders.drawing.Drawing`.
        cache: of their parts.
    """

    def __init__(self, images: Any, cache: PartCache, columns: int):
        labels = images.labels()
        order = np.arange(images.count) if labels is None else in_turn(labels)
        self.shown = order[: GRID_ROWS * columns]
        self.file: Path = cache.path / GRID
        self._captions = images.captions(None if labels is None else labels[self.shown])
        self._part_size, self._cache, self._columns = images.part_size, cache, columns
        self._images = np.zeros((len(self.shown), *images.shape), np.uint8)
        self._seen: set[int] = set()

    def update(self) -> None:
        """Write the picture again where finished parts have something to show."""
        done, part_of = self._cache.done(), self.shown // self._part_size
        fresh = (done - self._seen) & set(part_of.tolist())
        for part in fresh:
            images = self._cache.read(part)["images"]
            self._images[part_of == part] = images[self.shown[part_of == part] % self._part_size]
        self._seen |= done
        if fresh:
            save_grid(self._images, self.file, self._columns, self._captions)
