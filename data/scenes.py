"""An embedded data set with captions: scenes of coloured shapes, see `runtime.scenes`.

A scene depends only on the seed and its index: a larger set starts with the images of a smaller one, and
other resolutions show the same scenes.
"""

import math

import numpy as np
from tqdm import tqdm

from data.embedded import write_once, write_pixels
from data.latents import LatentDataset, open_latents, split
from data.manifest import MAX_PROMPTS
from data.text import Words
from runtime.scenes import (
    COLOURS,
    KINDS,
    MAX_WORDS,
    MIN_RADIUS,
    RELATIONS,
    SHAPES,
    WORDS,
    Caption,
    Group,
    Thing,
    distance_along,
    render,
)

# In units of the side: radius, gap between two objects (half of it to the edge), distance along a relation.
MAX_RADIUS, MIN_GAP, MIN_DISTANCE = 0.15, 2.5 / 32, 0.25
NUM_PLACEMENTS = 128  # tried at once
SIDES, HELD_OUT_EVERY, NUM_TYPICAL, CHUNK = range(32, 129, 8), 32, 4096, 1024


def scenes(
    path: str,
    input_size: int,
    in_channels: int,
    num_classes: int,
    num_images: int,
    seed: int,
    text: dict[str, int | None] | None = None,
) -> LatentDataset:
    """Open the scenes, written once as a latent folder at `path`. Classes are the kinds of the captions.

    Args:
        input_size: side of the images, 32 to 128 and a multiple of 8.
        num_images: number of images, including the held-out ones.
    """
    if input_size not in SIDES:
        rule = f"a multiple of {SIDES.step} from {SIDES[0]} to {SIDES[-1]}"
        raise ValueError(f"data.input_size={input_size} must be {rule}")
    origin = {"num_images": num_images, "seed": seed}
    write_once(path, origin, lambda: _write(path, origin, input_size))
    return open_latents(path, input_size, in_channels, num_classes, text=text)


def _write(path: str, origin: dict[str, int], side: int) -> None:
    num_images, seed = origin["num_images"], origin["seed"]
    words, num_held_out = Words(WORDS, MAX_WORDS), num_images // HELD_OUT_EVERY

    def batch(first: int) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        indices = range(first, min(first + CHUNK, num_images))
        captions, things = zip(*(draw_scene(seed, index) for index in indices), strict=True)
        images = np.stack([render(each, side) for each in things])
        return images, np.array(indices) % len(KINDS), {"text": words([*map(str, captions)])[:, None]}

    typical = np.stack([render(draw_scene(seed, index)[1], side) for index in range(NUM_TYPICAL)])
    starts = tqdm(range(0, num_images, CHUNK), desc=path, unit_scale=CHUNK, unit="image", leave=False)
    held_out = np.sort(split(num_images, num_held_out)[0])[:MAX_PROMPTS].tolist() or [0]
    prompts = [str(draw_scene(seed, index)[0]) for index in held_out]
    text = words.describe() | {"num_captions": 1, "prompts": prompts}
    batches = map(batch, starts)
    write_pixels(path, batches, typical, num_images, num_held_out, KINDS, origin=origin, text=text)


def draw_scene(seed: int, index: int) -> tuple[Caption, list[Thing]]:
    """Draw a caption, of kind index mod 7, and an image's objects."""
    rng = np.random.default_rng((seed, index))
    caption = _draw_caption(KINDS[index % len(KINDS)], rng)
    groups = [group for group in caption.groups for _ in range(group.number)]
    styles = [(group.colour or str(rng.choice([*COLOURS])), group.shape) for group in groups]
    is_unrelated, first = caption.relation in (None, "and"), caption.groups[0].number
    while True:
        radius = rng.uniform(MIN_RADIUS, MAX_RADIUS, size=(NUM_PLACEMENTS, len(styles)))
        centre = rng.uniform(size=(NUM_PLACEMENTS, len(styles), 2))
        centre = radius[..., None] + MIN_GAP / 2 + centre * (1 - 2 * radius[..., None] - MIN_GAP)
        # Bounding boxes must be apart.
        apart = np.abs(centre[:, :, None] - centre[:, None]).max(-1) - radius[:, :, None] - radius[:, None]
        apart[:, range(len(styles)), range(len(styles))] = math.inf
        for i in np.flatnonzero(apart.min(axis=(1, 2)) > MIN_GAP):
            circles = np.concatenate([centre[i], radius[i, :, None]], axis=1).tolist()
            things = [Thing(*style, *circle) for style, circle in zip(styles, circles, strict=True)]
            members = things[:first], things[first:]
            if is_unrelated or distance_along(members, str(caption.relation)) >= MIN_DISTANCE:
                return caption, things


def _draw_caption(kind: str, rng: np.random.Generator) -> Caption:
    shapes = [str(shape) for shape in rng.choice(SHAPES, 2, replace=False)]
    colours = [str(colour) for colour in rng.choice([*COLOURS], 2, replace=False)]
    relation = str(rng.choice(RELATIONS)) if kind in ("position", "combined") else "and"
    has_colours = kind in ("colours", "colour_binding", "combined")
    numbers = {"counting": rng.integers(2, 5, 1), "combined": rng.integers(1, 3, 2)}.get(kind, (1, 1))
    count = 1 if kind in ("one_object", "counting", "colours") else 2
    specs = [*zip(numbers, colours, shapes, strict=False)][:count]
    groups = tuple(Group(int(n), colour if has_colours else None, shape) for n, colour, shape in specs)
    return Caption(groups, relation if count == 2 else None)
