"""An embedded data set of any size: digits and letters in matplotlib's fonts, 32x32 grey pixels.

Each character is rotated, sheared, stretched, shifted and inked at random. An image depends only on the seed
and its index, so that a larger set starts with the images of a smaller one. Capitals have the same height in
all fonts, and small letters are smaller, so that c differs from C. I and l look alike in some fonts.
"""

import math
import string
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from tqdm import tqdm

from data.embedded import write_once, write_pixels
from data.latents import LatentDataset, open_latents

CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
# All fonts with these characters, except cmmi10: its old-style figures look like small letters.
STYLES = ("", "-Bold", "-Oblique", "-BoldOblique")
FONTS = (
    *(f"DejaVu{family}{style}" for family in ("Sans", "SansMono") for style in STYLES),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
    *("cmb10", "cmr10", "cmss10", "cmti10", "cmtt10"),
)
SIZE, CAPITAL = 32, 17  # side of an image, height of its capitals
MIDDLE = 0.4  # height above the baseline of the middle of an image, in capitals
MAX_ANGLE, MAX_SHEAR, MAX_SHIFT = math.radians(15), 0.25, 2.0  # in both directions; the shift is in pixels
MAX_STRETCH = (1.2, 1.12)  # of width and height, as a factor or its inverse: a c stays smaller than a C
MIN_CONTRAST = 0.4  # between ink and background, which is darker
# Pixels per pixel of an image, in each direction, for transforming and for rendering.
DETAIL, MASTER_DETAIL = 2, 4
NUM_DRAWS = 9  # random numbers per image
HELD_OUT_EVERY = 32  # one held-out image in this many
NUM_TYPICAL = 4096  # images that set shift and scale, for every size of the set
CHUNK = 1024


def glyphs(
    path: str, input_size: int, in_channels: int, num_classes: int, num_images: int, seed: int
) -> LatentDataset:
    """Open the glyphs, written once as a latent folder at `path`.

    Args:
        num_images: number of images, including the held-out ones.
    """
    origin = {"num_images": num_images, "seed": seed}
    write_once(path, origin, lambda: _write(path, origin))
    return open_latents(path, input_size, in_channels, num_classes)


def draw_glyphs(seed: int, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw images (count, 1, 32, 32) uint8 from index `first` on, and their labels (count,)."""
    indices = range(first, first + count)
    labels = np.array(indices) % len(CHARACTERS)
    draws = np.stack([np.random.default_rng((seed, index)).random(NUM_DRAWS) for index in indices])
    fonts = (draws[:, 0] * len(FONTS)).astype(int)
    moves = 2 * draws[:, 1:7] - 1
    ink = np.stack([_ink(*entry) for entry in zip(fonts, labels, moves, strict=True)]) / 255  # (N, 32, 32)
    contrast = MIN_CONTRAST + (1 - MIN_CONTRAST) * draws[:, 7, None, None]
    background = (1 - contrast) * draws[:, 8, None, None]
    return np.rint(255 * (background + contrast * ink)).astype(np.uint8)[:, None], labels


def _write(path: str, origin: dict[str, int]) -> None:
    num_images, seed = origin["num_images"], origin["seed"]
    typical, _ = draw_glyphs(seed, 0, NUM_TYPICAL)
    starts = tqdm(range(0, num_images, CHUNK), desc=path, unit_scale=CHUNK, unit="image", leave=False)
    batches = ((*draw_glyphs(seed, first, min(CHUNK, num_images - first)), {}) for first in starts)
    num_held_out = num_images // HELD_OUT_EVERY
    write_pixels(path, batches, typical, num_images, num_held_out, tuple(CHARACTERS), origin=origin)


def _ink(font: int, label: int, moves: np.ndarray) -> np.ndarray:
    """Draw the ink in each pixel, (32, 32) uint8, of a character transformed by moves (6,) in [-1, 1]."""
    angle, shear, shift = MAX_ANGLE * moves[0], MAX_SHEAR * moves[1], MAX_SHIFT * moves[4:6]
    cos, sin = math.cos(angle), math.sin(angle)
    # Map a position in the image to one in the master, both relative to their centres.
    matrix = np.diag(MAX_STRETCH ** moves[2:4]) @ [[1, shear], [0, 1]] @ [[cos, sin], [-sin, cos]]
    middle = np.full(2, SIZE / 2)
    offset = MASTER_DETAIL * (middle - matrix @ (middle + shift))
    numbers = np.column_stack([matrix * (MASTER_DETAIL / DETAIL), offset]).ravel()
    affine = Image.Transform.AFFINE, numbers, Image.Resampling.BILINEAR
    return np.asarray(_master(font, label).transform((SIZE * DETAIL,) * 2, *affine).reduce(DETAIL))


@cache
def _master(font: int, label: int) -> Image.Image:
    """Render a character in high resolution, centred, on the baseline of all characters."""
    side = SIZE * MASTER_DETAIL
    image = Image.new("L", (2 * side, side))
    origin = side, side / 2 + MIDDLE * CAPITAL * MASTER_DETAIL
    ImageDraw.Draw(image).text(origin, CHARACTERS[label], fill=255, font=_face(font), anchor="ls")
    left, _, right, _ = image.getbbox()
    start = (left + right - side) // 2
    return image.crop((start, 0, start + side, side))


@cache
def _face(font: int) -> ImageFont.FreeTypeFont:
    import matplotlib

    file = Path(matplotlib.get_data_path()) / "fonts/ttf" / f"{FONTS[font]}.ttf"
    _, top, _, _ = ImageFont.truetype(file, 1000).getbbox("H", anchor="ls")
    return ImageFont.truetype(file, CAPITAL * MASTER_DETAIL * 1000 / -top)
