"""A grid of images as a PNG file, with captions above its rows."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

import numpy as np
from PIL import Image, ImageDraw

from runtime.files import atomic_write

PADDING = 2
MIN_TILE = 64
CAPTION_HEIGHT, LETTER_WIDTH = 14, 6


def save_grid(
    images: np.ndarray, file: Path, columns: int, captions: Sequence[str] | None = None
) -> np.ndarray:
    """Write images (N, H, W, C) uint8 as one PNG, small ones enlarged; return the grid (height, width, C).

    Args:
        captions: one per image, written above a row unless the row before has the same.
    """
    columns = min(columns, len(images))
    zoom = zoom_of(images)
    tiles = images.repeat(zoom, axis=1).repeat(zoom, axis=2)
    tiles = np.pad(tiles, ((0, 0), (PADDING, PADDING), (PADDING, PADDING), (0, 0)))
    tiles = np.pad(tiles, ((0, -len(tiles) % columns), (0, 0), (0, 0), (0, 0)))
    _, height, width, channels = tiles.shape
    rows = tiles.reshape(-1, columns, height, width, channels).transpose(0, 2, 1, 3, 4)
    rows = rows.reshape(-1, height, columns * width, channels)
    parts, above = [], None
    for i, row in enumerate(rows):
        texts = None if captions is None else [*captions[i * columns : (i + 1) * columns]]
        if texts and texts != (above or [])[: len(texts)]:
            parts.append(strip_of(texts, width, columns, channels))
            above = texts
        parts.append(row)
    grid = np.concatenate(parts)
    save_picture(grid, file)
    return grid


def zoom_of(images: np.ndarray) -> int:
    return max(1, MIN_TILE // images.shape[1])


def strip_of(captions: Sequence[str], width: int, columns: int, channels: int) -> np.ndarray:
    """Draw captions side by side, (lines * CAPTION_HEIGHT, columns * width, channels)."""
    lines = [wrap(caption, max(1, width // LETTER_WIDTH)) for caption in captions]
    strip = Image.new("L", (columns * width, CAPTION_HEIGHT * max([1, *map(len, lines)])))
    draw = ImageDraw.Draw(strip)
    for column, row in ((column, row) for column, each in enumerate(lines) for row in range(len(each))):
        draw.text((column * width + PADDING, row * CAPTION_HEIGHT + 1), lines[column][row], fill=255)
    return np.asarray(strip)[:, :, None].repeat(channels, axis=2)


def save_picture(picture: np.ndarray, file: Path) -> None:
    file.parent.mkdir(exist_ok=True)  # without parents: a removed run folder is not created again
    with atomic_write(file) as partial:
        Image.fromarray(picture.squeeze(-1) if picture.shape[2] == 1 else picture).save(partial)
