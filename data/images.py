"""Images as people keep them: an .npz with arr_0, or a folder or zip of image files; read in order, never as
a whole.
"""

import lzma
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image

from runtime.arrays import check_size, member_size, read_header
from runtime.files import files_in
from runtime.launch import ALONE, Launch

LOSSLESS = (".png", ".bmp", ".ppm", ".tif", ".tiff")
LOSSY = (".jpg", ".jpeg", ".webp")
# What reading a zip raises where it is damaged, or (RuntimeError) encrypted or packed in a way that is not
# known.
ZIP_ERRORS = (ValueError, OSError, EOFError, RuntimeError, zlib.error, zipfile.BadZipFile)
ZIP_ERRORS += (lzma.LZMAError, struct.error, IndexError, OverflowError)
# What PIL raises beside these where an image is damaged, or absurdly large.
IMAGE_ERRORS = (*ZIP_ERRORS, SyntaxError, Image.DecompressionBombError, TypeError, LookupError, MemoryError)
FORMATS = (
    "PNG",
    "BMP",
    "PPM",
    "TIFF",
    "JPEG",
    "WEBP",
)  # whatever a file is called: PIL runs other programs for some others
LARGEST_MEMBER = 2**30  # of a zip of files, unpacked
SKIPPED_AT_ONCE = 2**20
MAX_CHANNELS = 4
LONGEST = 50  # a line of pixels would become an image of many gigabytes on the way to its square
Batches = Iterator[tuple[int, np.ndarray]]


class NpzImages:
    """The array arr_0 (N, H, W, C) uint8 of an .npz. [ADM]

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is truncated, or holds no such array.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"{self.path} not found")
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open("arr_0.npy") as member:
                shape, fortran_order, dtype = read_header(member)
                size = member_size(archive, "arr_0.npy") - member.tell()
        except (KeyError, *ZIP_ERRORS) as error:
            raise ValueError(f"{self.path} cannot be read as an .npz with arr_0: {error}") from error
        if dtype != np.uint8 or len(shape) != 4 or fortran_order or min(shape) < 1:
            raise ValueError(
                f"{self.path}: arr_0 is {dtype} {shape}, must be uint8 (N, H, W, C): bytes 0 to 255"
            )
        if math.prod(shape[1:3]) > Image.MAX_IMAGE_PIXELS or shape[3] > MAX_CHANNELS:
            raise ValueError(
                f"{self.path}: arr_0 is {shape}: an image has at most {Image.MAX_IMAGE_PIXELS} pixels"
            )
        try:
            check_size("arr_0", shape, dtype, size)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error
        self.count, self.shape = shape[0], shape[1:]

    def batches(self, batch_size: int, launch: Launch = ALONE) -> Batches:
        """Yield (position of the first, images) of this process's batches: every world_size-th one."""
        image_size = int(np.prod(self.shape))
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open("arr_0.npy") as member:
                read_header(member)
                position = 0
                for start in range(launch.rank * batch_size, self.count, launch.world_size * batch_size):
                    _skip(member, (start - position) * image_size)
                    position = min(start + batch_size, self.count)
                    data = member.read((position - start) * image_size)
                    yield (
                        start,
                        np.frombuffer(bytearray(data), np.uint8).reshape(position - start, *self.shape),
                    )
        except ZIP_ERRORS as error:
            raise ValueError(f"{self.path} is damaged: {error}") from error


class ImageFiles:
    """Image files in a folder and its subfolders, or in a zip, sorted by name.

    Args:
        resolution: crop and shrink each image to this size, after [ADM], whatever its format; None: the
            images are RGB, lossless, and of one size, and stay as they are.

    Raises:
        FileNotFoundError: the path is not there.
        ValueError: there are no images, or images of a lossy format, another mode or another size; the file
            is named.
    """

    def __init__(self, path: str | Path, resolution: int | None = None):
        self.path, self.resolution = Path(path), resolution
        try:
            names, self._open, _ = list_files(self.path)
        except ZIP_ERRORS as error:
            raise ValueError(f"{self.path} cannot be read as a folder, a zip or an .npz: {error}") from error
        self._names = images_of(names)
        lossy = [name for name in self._names if name.lower().endswith(LOSSY)]
        if lossy and not resolution:
            lossless = ", ".join(LOSSLESS)
            raise ValueError(
                f"{self.path}/{lossy[0]} is of a lossy format: must be {lossless}, or be cropped "
                "(resolution=N)"
            )
        if not self._names:
            raise ValueError(f"{self.path} holds no images ({', '.join(LOSSLESS)})")
        self.count, self.shape = len(self._names), self._read(0).shape

    def batches(self, batch_size: int, launch: Launch = ALONE) -> Batches:
        """Yield (position of the first, images) of this process's batches: every world_size-th one."""
        starts = range(launch.rank * batch_size, self.count, launch.world_size * batch_size)
        with ThreadPoolExecutor() as pool:
            ahead = None  # the batch that is read while the one before it is used
            for start in starts:
                images = [
                    pool.submit(self._read_checked, i)
                    for i in range(start, min(start + batch_size, self.count))
                ]
                if ahead:
                    yield ahead[0], np.stack([image.result() for image in ahead[1]])
                ahead = start, images
            if ahead:
                yield ahead[0], np.stack([image.result() for image in ahead[1]])

    def _read_checked(self, i: int) -> np.ndarray:
        image = self._read(i)
        if image.shape != self.shape:
            raise ValueError(
                f"{self.path}/{self._names[i]} is {image.shape}, {self._names[0]} is {self.shape}: sizes "
                "must agree"
            )
        return image

    def _read(self, i: int) -> np.ndarray:
        name = self._names[i]
        try:
            with self._open(name) as file:
                return read_image(file, self.resolution)
        except IMAGE_ERRORS as error:
            raise ValueError(f"{self.path}/{name} cannot be used: {error}") from error


def open_images(path: str | Path, resolution: int | None = None) -> NpzImages | ImageFiles:
    """Open images by what the path is: a folder, an .npz, or a zip.

    Raises:
        FileNotFoundError: the path is not there.
        ValueError: it holds no images that can be used; the file and the rule are named.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"{path} not found")
    if Path(path).suffix != ".npz":
        return ImageFiles(path, resolution)
    if resolution:
        raise ValueError(f"resolution={resolution} crops image files, and has no meaning for {path}")
    return NpzImages(path)


def read_image(file: BinaryIO, resolution: int | None = None) -> np.ndarray:
    """Read an image as bytes (H, W, 3).

    Args:
        resolution: convert it to RGB, crop and shrink it to this size, after [ADM]; None: it is RGB and stays
            as it is.

    Raises:
        IMAGE_ERRORS: it is damaged, or not of 8 bits.
    """
    with open_picture(file) as image:
        # PIL cuts 16 bits to 8 without a word.
        if image.mode[0] in "IF" or ";16" in str(image.tile) or (not resolution and image.mode != "RGB"):
            raise ValueError(f"its mode is {image.mode}, must be RGB with 8 bits")
        if resolution:
            if max(image.size) > LONGEST * min(image.size):
                raise ValueError(
                    f"its size is {image.size}: one side must be at most {LONGEST} times the other"
                )
            image = centre_crop(image.convert("RGB"), resolution)
        return np.asarray(image)


def open_picture(file: BinaryIO) -> Image.Image:
    """Open an image of one of the known formats; nothing but its header is read yet.

    Raises:
        IMAGE_ERRORS: it is of another format, damaged, or absurdly large.
    """
    return Image.open(file, formats=FORMATS)


def centre_crop(image: Image.Image, size: int) -> Image.Image:
    """Shrink an image so that its shorter side is `size`, and cut a square out of its middle. [ADM]

    PARITY: by box filter to halves while the shorter side is at least twice the size, then bicubic.
    """
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = size / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((left, top, left + size, top + size))


def _skip(member: BinaryIO, num_bytes: int) -> None:
    # Not by `seek`, which in newer versions of Python gives up the check of the whole.
    while num_bytes and (chunk := member.read(min(num_bytes, SKIPPED_AT_ONCE))):
        num_bytes -= len(chunk)


def list_files(path: Path) -> tuple[list[str], Callable[[str], BinaryIO], Callable[[str], int]]:
    """Return the names of all files in a folder or a zip, sorted, and what opens one of them, and what tells
    its size.

    Hidden ones are left out.
    """
    if path.is_dir():
        names = _visible(name for name in files_in(path))
        return names, lambda name: (path / name).open("rb"), lambda name: (path / name).stat().st_size
    archive = zipfile.ZipFile(path)
    names = _visible(name for name in archive.namelist() if not name.endswith("/"))
    return names, lambda name: _open_member(archive, name), lambda name: _size_of(archive, name)


def _open_member(archive: zipfile.ZipFile, name: str) -> BinaryIO:
    _size_of(archive, name)
    return archive.open(name)


def _size_of(archive: zipfile.ZipFile, name: str) -> int:
    size = archive.getinfo(name).file_size
    if size > LARGEST_MEMBER:
        raise ValueError(f"{name} declares {size} bytes, must have at most {LARGEST_MEMBER}")
    return member_size(archive, name)


def images_of(names: list[str]) -> list[str]:
    """Return the names of images among the names of files."""
    return [name for name in names if name.lower().endswith(LOSSLESS + LOSSY)]


def _visible(names: Iterator[str]) -> list[str]:
    return sorted(
        name for name in names if not any(part.startswith((".", "__MACOSX")) for part in name.split("/"))
    )
