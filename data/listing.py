"""Images and their classes: a folder of class folders, a zip of one, or a text file that lists images."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from data.images import LOSSLESS, ZIP_ERRORS, images_of, list_files
from data.manifest import MAX_CLASSES
from runtime.files import MAX_JSON_BYTES, parse_json, read_bounded

LIST_SUFFIXES = (".txt", ".tsv", ".lst")
LABELS_FILE = "dataset.json"
MAX_LABEL_BYTES = (
    512  # of what dataset.json says of a file, beside what it may say of files that are not there
)


@dataclass(frozen=True)
class ImageList:
    """Names of images, what opens one, and their classes.

    Args:
        labels: (count,) int64; None for images without classes.
        class_names: None where the classes have numbers only.
        ignored: files that lie there and are no images.
    """

    names: list[str]
    open: Callable[[str], BinaryIO]
    labels: np.ndarray | None
    num_classes: int
    class_names: tuple[str, ...] | None
    ignored: tuple[str, ...] = ()


def list_images(path: str | Path) -> ImageList:
    """List images by what the path is.

    A folder or a zip: each top folder is a class, in alphabetical order, as in torchvision's ImageFolder;
    folders around all of them do not count; images that lie in no folder have no classes. A file
    dataset.json, as the EDM family of codebases writes it, tells the labels instead. A text file: a path,
    relative to it, and a class on each line.

    Raises:
        FileNotFoundError: the path is not there.
        ValueError: there are no images, or it cannot be told which class one has.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"source={path} not found")
    if path.is_file() and path.suffix.lower() in LIST_SUFFIXES:
        return _from_list(path)
    try:
        files, opener, _ = list_files(path)
    except ZIP_ERRORS as error:
        raise ValueError(
            f"source={path} cannot be read as a folder, a zip or a list ({', '.join(LIST_SUFFIXES)}): {error}"
        ) from error
    names = images_of(files)
    if not names:
        raise ValueError(f"source={path} holds no images")
    if LABELS_FILE in files:
        labels = read_labels(opener, names, path)
        grouped = (labels, 0 if labels is None else int(labels.max()) + 1, None)
        return ImageList(names, opener, *grouped, ignored=_others(files, names))
    deeper = [name for name in files if name.endswith(f"/{LABELS_FILE}")]
    if deeper:
        raise ValueError(
            f"source={path}: {deeper[0]} tells the labels only where it lies at the top: give that folder"
        )
    depth = _depth_of_classes(names)
    outside = [name for name in names if name.count("/") <= depth]
    if outside and len(outside) < len(names):
        raise ValueError(f"source={path}: {outside[0]} lies in no class folder, other images do")
    if outside:
        return ImageList(names, opener, None, 0, None, ignored=_others(files, names))
    grouped = _numbered([name.split("/")[depth] for name in names])
    # Without a class folder whose files are all of unknown formats every later class would have another
    # number.
    outer = names[0].split("/")[:depth]
    inside = [file.split("/") for file in files if file.count("/") > depth]
    empty = {parts[depth] for parts in inside if parts[:depth] == outer} - set(grouped[2])
    if empty:
        raise ValueError(
            f"source={path}: class folder {min(empty)} holds files, but no images of a known format"
        )
    return ImageList(names, opener, *grouped, ignored=_others(files, names))


def read_labels(opener: Callable[[str], BinaryIO], names: Sequence[str], path: Path) -> np.ndarray | None:
    """Return the labels (count,) of files as dataset.json tells them: {"labels": [[name, label], ...]}; None
    where it has none.

    Raises:
        ValueError: it is damaged, or has no label for one of the files.
    """
    try:
        with opener(LABELS_FILE) as file:
            entries = parse_json(read_bounded(file, MAX_JSON_BYTES + MAX_LABEL_BYTES * len(names)))["labels"]
        known = None if entries is None else dict(entries)
    except (*ZIP_ERRORS, KeyError, TypeError) as error:
        raise ValueError(
            f"{path}/{LABELS_FILE} is not of the form {{'labels': [[name, label], ...]}}: {error!r}"
        ) from error
    if known is None:
        return None
    missing = [name for name in names if not _is_label(known.get(name))]
    if missing:
        raise ValueError(
            f"{path}/{LABELS_FILE} has no label 0, 1, ... for {missing[0]} ({len(missing)} of {len(names)} "
            "files are without)"
        )
    return np.array([known[name] for name in names], dtype=np.int64)


class MaskFiles:
    """Masks of images, named as the images are, in a folder or zip of the same order.

    Raises:
        FileNotFoundError: the path is not there.
        ValueError: an image has no mask; the first one is named.
    """

    def __init__(self, path: str | Path, names: Sequence[str]):
        self.path = Path(path)
        if not self.path.exists():
            raise FileNotFoundError(f"masks={path} not found")
        try:
            files, self._open, _ = list_files(self.path)
        except ZIP_ERRORS as error:
            raise ValueError(f"masks={path} cannot be read as a folder or a zip: {error}") from error
        self._files = {_stem(name): name for name in files if name.lower().endswith(LOSSLESS)}
        missing = [name for name in names if _stem(name) not in self._files]
        if missing:
            raise ValueError(
                f"masks={path} has no mask for {missing[0]}: {_stem(missing[0])}{LOSSLESS[0]} must be there, "
                "or the like "
                f"({len(missing)} of {len(names)} images have none)"
            )

    def open(self, name: str) -> BinaryIO:
        """Open the mask of an image."""
        return self._open(self._files[_stem(name)])


def _others(files: list[str], names: list[str]) -> tuple[str, ...]:
    return tuple(sorted(set(files) - {*names, LABELS_FILE}))


def _from_list(path: Path) -> ImageList:
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"source={path} is no list: it is not text in UTF-8 ({error})") from error
    pairs = [line.rsplit("\t" if "\t" in line else None, 1) for line in lines]
    for number, pair in enumerate(pairs, 1):
        if len(pair) != 2:
            raise ValueError(
                f"source={path}: line {number} must hold a path and a class, got {lines[number - 1]!r}"
            )
    if not pairs:
        raise ValueError(f"source={path} lists no images")
    names, classes = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"source={path}: {missing[0]} not found ({len(missing)} of {len(names)} images are not there)"
        )
    are_numbers = all(c.isdecimal() for c in classes)
    too_large = [c for c in classes if are_numbers and int(c) >= MAX_CLASSES]
    if too_large:
        raise ValueError(f"source={path}: class {too_large[0]} must be less than {MAX_CLASSES}")
    numbers = np.array(classes, dtype=np.int64) if are_numbers else None
    grouped = _numbered(classes) if numbers is None else (numbers, int(numbers.max()) + 1, None)
    return ImageList(names, lambda name: (path.parent / name).open("rb"), *grouped)


def _depth_of_classes(names: list[str]) -> int:
    """Return how many folders lie around all images, with folders in them."""
    folders = [name.split("/")[:-1] for name in names]
    depth = 0
    while all(len(parts) > depth + 1 and parts[depth] == folders[0][depth] for parts in folders):
        depth += 1
    return depth


def _numbered(classes: Sequence[str]) -> tuple[np.ndarray, int, tuple[str, ...]]:
    class_names = tuple(sorted(set(classes)))
    numbers = {name: number for number, name in enumerate(class_names)}
    return np.array([numbers[name] for name in classes], dtype=np.int64), len(class_names), class_names


def _is_label(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_CLASSES


def _stem(name: str) -> str:
    return name.rpartition(".")[0]
