"""Pictures for people: a grid of images as a PNG file, and small images as text."""

from pathlib import Path

import numpy as np
from PIL import Image

from runtime.files import atomic_write

PADDING = 2
MIN_TILE = 32
TEXT_COLUMNS = 100


def save_grid(images: np.ndarray, file: Path, columns: int) -> np.ndarray:
    """Write images (N, H, W, C) uint8 as one PNG and return it (height, width, C); enlarge small ones."""
    columns = min(columns, len(images))
    zoom = max(1, MIN_TILE // images.shape[1])
    tiles = images.repeat(zoom, axis=1).repeat(zoom, axis=2)
    tiles = np.pad(tiles, ((0, 0), (PADDING, PADDING), (PADDING, PADDING), (0, 0)))
    tiles = np.pad(tiles, ((0, -len(tiles) % columns), (0, 0), (0, 0), (0, 0)))
    _, height, width, channels = tiles.shape
    rows = tiles.reshape(-1, columns, height, width, channels).transpose(0, 2, 1, 3, 4)
    grid = rows.reshape(-1, columns * width, channels)
    file.parent.mkdir(exist_ok=True)  # not its parents: a run folder that was removed stays so
    with atomic_write(file) as partial:
        Image.fromarray(grid.squeeze(-1) if channels == 1 else grid).save(partial)
    return grid


def in_turn(labels: np.ndarray) -> np.ndarray:
    """Return the positions of images with labels (N,) in an order in which the classes take turns."""
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
