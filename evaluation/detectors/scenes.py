"""The objects of scenes as features, and their pixels."""

from typing import ClassVar

import numpy as np

from runtime.scenes import COLOURS, SHAPES, Thing, read_scene

CELLS, MAX_THINGS = 8, 9  # cells along a side; objects that are stored: one more than captions can have
NAMES = [*COLOURS, "?"], [*SHAPES, "?"]


class SceneReader:
    """The mean colours of 8x8 cells, and the objects of scenes."""

    num_features: ClassVar = {"cells": 3 * CELLS**2, "things": 4 * MAX_THINGS}

    def __call__(self, images: np.ndarray) -> dict[str, np.ndarray]:
        """images (N, R, R, 3) uint8 -> cells (N, 192) in [0, 1]; things (N, 36): see `things_of`."""
        N, R, size = len(images), images.shape[1], images.shape[1] // CELLS
        if images.shape[1:] != (R, R, 3) or R % CELLS:
            rule = f"must be (R, R, 3) with R a multiple of {CELLS}"
            raise ValueError(f"images of scenes are {images.shape[1:]}, {rule}")
        cells = images.reshape(N, CELLS, size, CELLS, size, 3).mean(axis=(2, 4)) / 255
        things = np.full((N, MAX_THINGS, 4), -1.0)
        for row, image in zip(things, images, strict=True):
            for i, thing in enumerate(read_scene(image)[:MAX_THINGS]):
                row[i] = NAMES[0].index(thing.colour), NAMES[1].index(thing.shape), thing.x, thing.y
        return {"cells": cells.reshape(N, -1), "things": things.reshape(N, -1)}


def things_of(row: np.ndarray) -> list[Thing]:
    """Return the objects of an image from `things` (36,): colour, shape, x and y of each, or -1."""
    rows = row.reshape(MAX_THINGS, 4)
    return [
        Thing(NAMES[0][int(colour)], NAMES[1][int(shape)], x, y)
        for colour, shape, x, y in rows[rows[:, 0] >= 0].tolist()
    ]
