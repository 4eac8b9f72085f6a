"""Read images in batches: an .npz with arr_0, or a folder or zip of image files."""

import math
import posixpath
import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps

from data.tars import index_tars, read_at
from runtime.arrays import ZIP_ERRORS, check_size, member_size, read_header
from runtime.errors import as_value_error
from runtime.files import files_in
from runtime.parts import Part

LOSSLESS = (".png", ".bmp", ".ppm", ".tif", ".tiff")
LOSSY = (".jpg", ".jpeg", ".webp")
# Errors of PIL for damaged and huge images.
IMAGE_ERRORS = (*ZIP_ERRORS, SyntaxError, Image.DecompressionBombError, TypeError, MemoryError)
# Only these, whatever the suffix: PIL runs other programs for some formats.
FORMATS = ("PNG", "BMP", "PPM", "TIFF", "JPEG", "WEBP")
MAX_MEMBER_BYTES = 2**30  # of a file in a zip, unpacked
MAX_CHANNELS = 4
MAX_ASPECT = 50  # resizing a line of pixels to the height of a crop would take gigabytes
# Folders that operating systems and tools add.
HIDDEN = (".", "__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found")
ORIENTATION = "turned as the EXIF orientation says, where it can be read"


class Files:
    """The files of a folder and its subfolders, of a zip, or of tars, sorted by name, without hidden files.

    A backslash in the names of a zip, as Windows tools write it, counts as a slash. A folder of tars without
    images is a WebDataset: its files are those in the tars, see `index_tars`.

    Args:
        key: prefix of the path in error messages, such as `source=`.
    """

    def __init__(self, path: Path, key: str = ""):
        self.path = path
        with as_value_error(f"{key}{path} cannot be read as a folder, zip or tar", *ZIP_ERRORS):
            in_folder = [*files_in(path)] if path.is_dir() else []
            has_images = any(name.lower().endswith(LOSSLESS + LOSSY) for name in in_folder)
            tars = [] if has_images else [path / name for name in in_folder if name.endswith(".tar")]
            self.in_tars = index_tars([path] if path.suffix == ".tar" else tars)
            self._archive = None if path.is_dir() or self.in_tars else zipfile.ZipFile(path)
            stored = self._archive.namelist() if self._archive else []
            names = [*map(normalized_name, stored)] if self._archive else [*self.in_tars] or in_folder
            self._visible = sorted(name for name in names if not _is_hidden(name))
        self._stored = dict(zip(names, stored, strict=True)) if self._archive else {}
        self.names = [name for name in self._visible if not name.endswith("/")]
        if outside := [name for name in names if name.startswith("../")]:
            raise ValueError(f"{key}{path} has {outside[0]}, a path outside of it")
        if duplicates := [name for name, following in pairwise(self.names) if name == following]:
            raise ValueError(f"{key}{path} has {duplicates[0]} twice")
        self.images = [name for name in self.names if name.lower().endswith(LOSSLESS + LOSSY)]

    def open(self, name: str) -> BinaryIO:
        if self.in_tars:
            return read_at(*self.in_tars[name])
        if self._archive is None:
            return (self.path / name).open("rb")
        self.size(name)
        return self._archive.open(self._stored[name])

    def folders(self, parent: str) -> set[str]:
        """List the folders, also empty ones, in a folder ("", or a path that ends with a slash)."""
        if self._archive is None:
            names = {path.name for path in (self.path / parent).iterdir() if path.is_dir()}
            return {name for name in names if not _is_hidden(name)}
        names = (name.removeprefix(parent) for name in self._visible if name.startswith(parent))
        return {name.partition("/")[0] for name in names if "/" in name} - {""}

    def size(self, name: str) -> int:
        """Return the size of a file in bytes. Raise a ValueError if a member of a zip is too large."""
        if self.in_tars:
            return self.in_tars[name][2]
        if self._archive is None:
            return (self.path / name).stat().st_size
        size = self._archive.getinfo(self._stored[name]).file_size
        if size > MAX_MEMBER_BYTES:
            raise ValueError(f"{name} declares {size} bytes, must have at most {MAX_MEMBER_BYTES}")
        return member_size(self._archive, self._stored[name])


class NpzImages:
    """The array arr_0 (N, H, W, C) uint8 of an .npz. [ADM]"""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        with as_value_error(f"{self.path} cannot be read as an .npz with arr_0", *ZIP_ERRORS):
            with zipfile.ZipFile(self.path) as archive:
                size = member_size(archive, "arr_0.npy")  # refuses compression that numpy does not know
                with archive.open("arr_0.npy") as member:
                    shape, fortran_order, dtype = read_header(member)
                    size -= member.tell()
            is_array = dtype == np.uint8 and len(shape) == 4 and min(shape) > 0 and not fortran_order
            if not is_array or shape[3] > MAX_CHANNELS or math.prod(shape[1:3]) > Image.MAX_IMAGE_PIXELS:
                rule = f"must be uint8 (N, H, W, C) in C order, with 1 to {MAX_CHANNELS} channels"
                pixels = f"and at most {Image.MAX_IMAGE_PIXELS} pixels per image"
                raise ValueError(f"arr_0 is {dtype} {shape}, {rule}, {pixels}")
            check_size("arr_0", shape, dtype, size)
        self.count, self.shape, self.part_size = shape[0], shape[1:], None  # the detector's batch size

    def batches(self, batch_size: int, parts: Iterable[int]) -> Iterator[Part]:
        """Yield parts of `batch_size` images, the last one may be smaller. `parts` must be ascending."""
        image_size, position = math.prod(self.shape), 0
        damaged = as_value_error(f"{self.path} is damaged", *ZIP_ERRORS)
        with damaged, zipfile.ZipFile(self.path) as archive, archive.open("arr_0.npy") as member:
            read_header(member)
            for part in parts:
                start = part * batch_size
                for _ in range(position, start):  # `seek` would skip the CRC check in newer Pythons
                    member.read(image_size)
                position = min(start + batch_size, self.count)
                data = bytearray(member.read((position - start) * image_size))
                yield Part(part, np.frombuffer(data, np.uint8).reshape(position - start, *self.shape))


class ImageFiles:
    """Image files in a folder and its subfolders, or in a zip, sorted by name.

    Args:
        resolution: crop and resize each image to this size, as [ADM] does. None: the images must be RGB,
            lossless, and all of the same size.
    """

    def __init__(self, path: str | Path, resolution: int | None = None):
        self.path, self.resolution, self.part_size = Path(path), resolution, None  # the detector's batch size
        self._files = Files(self.path)
        self._names, lossless = self._files.images, ", ".join(LOSSLESS)
        if not self._names:
            raise ValueError(f"{self.path} has no images ({lossless})")
        lossy = [name for name in self._names if name.lower().endswith(LOSSY)]
        if lossy and not resolution:
            rule = f"must be {lossless}, or set resolution=N to crop the images"
            raise ValueError(f"{self.path}/{lossy[0]} has a lossy format, {rule}")
        self.count, self.shape = len(self._names), tuple[int, ...]()
        self.shape = self._read(self._names[0]).shape

    def batches(self, batch_size: int, parts: Iterable[int]) -> Iterator[Part]:
        """Yield parts of `batch_size` images, the last one may be smaller."""
        with ThreadPoolExecutor() as pool:

            def read(part: int) -> tuple[int, list[Future]]:
                names = self._names[part * batch_size : (part + 1) * batch_size]
                return part, [pool.submit(self._read, name) for name in names]

            # Threads read the next batch while the caller uses this one.
            for (part, images), _ in pairwise(chain(map(read, parts), [None])):
                yield Part(part, np.stack([image.result() for image in images]))

    def _read(self, name: str) -> np.ndarray:
        unreadable = as_value_error(f"{self.path}/{name} cannot be read", *IMAGE_ERRORS)
        with unreadable, self._files.open(name) as file:
            image = to_pixels(open_picture(file), self.resolution)
        if self.shape not in ((), image.shape):
            first = f"{self._names[0]} is {self.shape}"
            raise ValueError(f"{self.path}/{name} is {image.shape}, {first}: all sizes must be equal")
        return image


def open_images(path: str | Path, resolution: int | None = None) -> NpzImages | ImageFiles:
    """Open the images of a folder, a zip, or an .npz."""
    if not Path(path).exists():
        raise FileNotFoundError(f"{path} not found")
    if Path(path).suffix != ".npz":
        return ImageFiles(path, resolution)
    if resolution:
        raise ValueError(f"resolution={resolution} crops image files: it does not apply to {path}")
    return NpzImages(path)


def to_pixels(image: Image.Image, resolution: int | None = None) -> np.ndarray:
    """Convert an image to an array (H, W, 3) uint8.

    Args:
        resolution: convert to RGB, crop and resize to this size, as [ADM] does. None: the image must be RGB.
    """
    if image.mode[0] in "IF" or (not resolution and image.mode != "RGB"):
        raise ValueError(f"image mode {image.mode} must be RGB with 8 bits")
    if resolution:
        if max(image.size) > MAX_ASPECT * min(image.size):
            rule = f"one side must be at most {MAX_ASPECT} times the other"
            raise ValueError(f"image size {image.size}: {rule}")
        image = centre_crop(image.convert("RGB"), resolution)
    return np.asarray(image)


def open_picture(file: BinaryIO) -> Image.Image:
    """Read an image of one of FORMATS and apply its EXIF orientation, as image viewers do.

    DEVIATION: [ADM] and others ignore the orientation, except for TIFF, where PIL applies it. Their images
    can be rotated.
    """
    image = Image.open(file, formats=FORMATS)
    if ";16" in str(image.tile) and image.mode[0] not in "IF":  # PIL reduces these to 8 bits silently
        raise ValueError(f"image mode {image.mode} with 16 bits must have 8 bits")
    image.load()
    with suppress(*IMAGE_ERRORS):  # damaged EXIF data are ignored, as viewers do
        ImageOps.exif_transpose(image, in_place=True)
    return image


def centre_crop(image: Image.Image, size: int) -> Image.Image:
    """Resize an image to `size` on its shorter side, and crop the square in the centre. [ADM]

    PARITY: halve with a box filter while the shorter side is at least 2 * size, then resize with bicubic.
    """
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = size / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((left, top, left + size, top + size))


def normalized_name(name: str) -> str:
    """Return the name of a zip member with `/` as separator and no leading `./` or `/`."""
    name = name.replace("\\", "/")
    return posixpath.normpath(name).lstrip("/") + ("/" if name.endswith("/") else "")


def _is_hidden(name: str) -> bool:
    return any(part.startswith(HIDDEN) for part in name.split("/"))
