"""The language and the pictures of scenes: coloured shapes on black, whose attributes are read back exactly.

A caption has one of GenEval's six kinds [GenEval], or combines them: "two red squares left of a blue circle".

Shapes: R is the side of an image.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

COLOURS = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1)}
COLOURS |= {"yellow": (1, 1, 0), "cyan": (0, 1, 1), "magenta": (1, 0, 1)}
AREAS = {"circle": math.pi, "square": 4.0, "triangle": 2.0, "diamond": 2.0}  # of shapes of radius 1
SHAPES = (*AREAS,)
NUMBERS = ("a", "two", "three", "four")
RELATIONS = ("left of", "right of", "above", "below")
KINDS = ("one_object", "two_objects", "counting", "colours", "position", "colour_binding", "combined")
WORDS = (*NUMBERS, *COLOURS, *SHAPES, *(f"{shape}s" for shape in SHAPES))
WORDS += ("and", "left", "right", "of", "above", "below")
MAX_WORDS = 8  # of a caption: two red squares left of two blue circles
GROUP = re.compile(rf"({'|'.join(NUMBERS)}) (?:({'|'.join(COLOURS)}) )?({'|'.join(SHAPES)})")
# Relation (`at`: a position), True if all numbers are 1, True if colours are named -> kind
KIND_OF: dict[tuple[str | None, bool, bool], str] = {
    (None, True, False): "one_object",
    (None, True, True): "colours",
    (None, False, False): "counting",
    ("and", True, False): "two_objects",
    ("and", True, True): "colour_binding",
    ("at", True, False): "position",
}
MIN_RADIUS, MIN_DISTANCE = 0.11, 0.125  # of objects, and along the axis of a relation, in units of the side
MIN_AREA, MIN_OVERLAP = 0.25, 0.7  # of the smallest object; of an object with its shape


@dataclass(frozen=True)
class Group:
    """Equal objects of a caption; colour None: any."""

    number: int
    colour: str | None
    shape: str

    def __str__(self) -> str:
        colour = f"{self.colour} " if self.colour else ""
        return f"{NUMBERS[self.number - 1]} {colour}{self.shape}{'s' if self.number > 1 else ''}"


@dataclass(frozen=True)
class Caption:
    """One or two groups, and the relation between them: `and`, one of RELATIONS, or None for one group."""

    groups: tuple[Group, ...]
    relation: str | None = None

    def __str__(self) -> str:
        return f" {self.relation} ".join(map(str, self.groups))

    @property
    def kind(self) -> str:
        """One of KINDS."""
        coloured = {group.colour is not None for group in self.groups}
        relation = "at" if self.relation in RELATIONS else self.relation
        key = relation, all(group.number == 1 for group in self.groups), True in coloured
        return "combined" if len(coloured) == 2 else KIND_OF.get(key, "combined")


@dataclass(frozen=True)
class Thing:
    """An object in an image; its centre and radius are in units of the side."""

    colour: str
    shape: str
    x: float
    y: float
    radius: float = 0.0


def parse(text: str) -> Caption:
    """Parse a caption; capitals and punctuation do not count.

    Raises:
        ValueError: it is not a caption of this data set, or an object could belong to two groups.
    """
    words = " ".join(re.findall("[a-z]+", text.lower()))
    relation = re.search("|".join(("and ", *RELATIONS)), words)
    groups = tuple(Group(NUMBERS.index(n) + 1, colour or None, s) for n, colour, s in GROUP.findall(words))
    caption = Caption(groups, relation[0].strip() if relation else None)
    if len(groups) in (1, 2) and str(caption) == words and not _overlap(groups):
        return caption
    example = "'two red squares left of a blue circle'"
    raise ValueError(f"'{text}' must be like {example}, with one or two groups of different objects")


def _overlap(groups: Sequence[Group]) -> bool:
    """True if an object could belong to two groups."""
    same_shape = len(groups) == 2 and groups[0].shape == groups[1].shape
    colours = {group.colour for group in groups}
    return same_shape and (None in colours or len(colours) == 1)


def is_shown(caption: Caption, things: Sequence[Thing]) -> bool:
    """True if an image shows the objects of a caption, no others, and their relation."""
    groups = caption.groups
    members = [[t for t in things if t.shape == g.shape and g.colour in (None, t.colour)] for g in groups]
    numbers = [len(each) for each in members]
    if numbers != [group.number for group in groups] or sum(numbers) != len(things):
        return False
    return caption.relation in (None, "and") or distance_along(members, caption.relation) >= MIN_DISTANCE


def distance_along(members: Sequence[Sequence[Thing]], relation: str) -> float:
    """Return the smallest distance of two groups along the axis of a relation."""
    before, after = members if relation in ("left of", "above") else reversed(members)
    axis = "x" if relation in ("left of", "right of") else "y"
    return min(getattr(t, axis) for t in after) - max(getattr(t, axis) for t in before)


def render(things: Sequence[Thing], side: int) -> np.ndarray:
    """Draw objects as an image (3, R, R) uint8, with smooth edges."""
    image = np.zeros((3, side, side))
    for thing in things:
        ink = _ink(thing.shape, side, thing.x, thing.y, thing.radius)
        image = np.maximum(image, np.array(COLOURS[thing.colour])[:, None, None] * ink)
    return np.rint(255 * image).astype(np.uint8)


def _ink(shape: str, side: int, x: float, y: float, radius: float) -> np.ndarray:
    """Return the share of each pixel (R, R) that a shape covers."""
    pixels = (np.arange(side) + 0.5) / side
    u, v = (pixels[None] - x) / radius, (pixels[:, None] - y) / radius  # in [-1, 1] inside; v points down
    match shape:
        case "circle":
            outside = np.hypot(u, v) - 1
        case "square":
            outside = np.maximum(np.abs(u), np.abs(v)) - 1
        case "diamond":
            outside = (np.abs(u) + np.abs(v) - 1) / math.sqrt(2)
        case _:  # a triangle with its base below
            outside = np.maximum((2 * np.abs(u) - v - 1) / math.sqrt(5), v - 1)
    return np.clip(0.5 - outside * radius * side, 0, 1)


def read_scene(image: np.ndarray) -> list[Thing]:
    """Read the objects of an image (R, R, 3) uint8. An object of an unclear shape or colour is named `?`."""
    from scipy.ndimage import binary_dilation, label

    side, brightest = len(image), image.max(axis=2)
    bits = (2 * image.astype(int) >= np.maximum(brightest, 128)[..., None]) & (brightest >= 128)[..., None]
    code = bits @ (1, 2, 4)  # of the colour of each pixel, 0: black
    names = {int(np.dot(colour, (1, 2, 4))): name for name, colour in COLOURS.items()}
    smallest, things = MIN_AREA * AREAS["diamond"] * (MIN_RADIUS * side) ** 2, []
    for value in np.unique(code[code > 0]).tolist():
        labelled: Any = label(code == value, np.ones((3, 3)))
        parts, sizes = labelled[0], np.bincount(labelled[0].ravel())
        for i in 1 + np.flatnonzero(sizes[1:] >= smallest):
            ink = np.where(binary_dilation(parts == i, np.ones((3, 3))), brightest / 255, 0)
            things.append(_read_thing(names.get(value, "?"), ink))
    return things


def _read_thing(colour: str, ink: np.ndarray) -> Thing:
    """Fit each shape to the area and the centre of mass of ink (R, R); choose the one that overlaps most."""
    side, area = len(ink), ink.sum()
    pixels = (np.arange(side) + 0.5) / side
    y, x = (float(pixels @ ink.sum(axis=axis) / area) for axis in (1, 0))
    best, most = Thing(colour, "?", x, y), MIN_OVERLAP
    for shape, unit_area in AREAS.items():
        radius = math.sqrt(area / unit_area) / side
        middle = y - radius / 3 if shape == "triangle" else y
        fitted = _ink(shape, side, x, middle, radius)
        overlap = np.minimum(fitted, ink).sum() / np.maximum(fitted, ink).sum()
        if overlap > most:
            best, most = Thing(colour, shape, x, middle, radius), overlap
    return best
