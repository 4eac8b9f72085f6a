"""List images and their classes, from a folder of class folders, a zip of one, or a text file."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from data.images import Files, normalized_name
from data.manifest import MAX_CLASSES
from runtime.arrays import ZIP_ERRORS
from runtime.files import MAX_JSON_BYTES, parse_json, read_bounded

LIST_SUFFIXES = (".txt", ".tsv", ".lst")
# Folders of splits, such as train, val2017 or test_set. train_station and test_tube are classes.
SPLIT = re.compile(r"(train|val|test)(ing|id|idation)?([\W\d_]|px|sets?|splits?|data|images?|imgs?)*", re.I)
LABELS_FILE = "dataset.json"
MAX_LABEL_BYTES = 512  # of dataset.json for each image, in addition to MAX_JSON_BYTES


@dataclass(frozen=True)
class ImageList:
    """Names of images, and their classes."""

    names: list[str]
    open: Callable[[str], BinaryIO]
    labels: np.ndarray | None  # (count,) int64; None for images without classes
    num_classes: int
    class_names: tuple[str, ...] | None  # None: the classes have only numbers
    ignored: tuple[str, ...] = ()  # files that are not images


def list_images(path: str | Path) -> ImageList:
    """List the images of a folder, a zip, a tar or a folder of tars, or a text file.

    In a folder or a zip, each top folder is a class, in alphabetical order, as in torchvision's ImageFolder.
    Each class must have images. Folders that contain all class folders are ignored. Images outside of folders
    have no classes. A dataset.json, as the EDM codebases write it, sets the labels instead. A text file has a
    path, relative to the file, and a class on each line. Images in tars have no classes.

    Raises:
        ValueError: the path does not exist, has no images, or the class of an image is unknown.
    """
    path = Path(path)
    if path.is_file() and path.suffix.lower() in LIST_SUFFIXES:
        return _from_list(path)
    files = Files(path, "source=")
    if not files.images:
        raise ValueError(f"source={path} has no images")
    if LABELS_FILE in files.names:
        labels = read_labels(files, files.images)
        classes = (labels, 0 if labels is None else int(labels.max()) + 1, None)
    else:
        classes = (None, 0, None) if files.in_tars else _classes_of_folders(files)
    ignored = tuple(sorted(set(files.names) - {*files.images, LABELS_FILE}))
    return ImageList(files.images, files.open, *classes, ignored)


def read_labels(files: Files, names: Sequence[str]) -> np.ndarray | None:
    """Read the labels (count,) of dataset.json, {"labels": [[name, label], ...]}. None: it has no labels."""
    file_name = f"{files.path}/{LABELS_FILE}"
    try:
        with files.open(LABELS_FILE) as file:
            entries = parse_json(read_bounded(file, MAX_JSON_BYTES + MAX_LABEL_BYTES * len(names)))["labels"]
        labels = None if entries is None else {normalized_name(name): label for name, label in entries}
    except (*ZIP_ERRORS, TypeError, AttributeError) as error:
        form = "{'labels': [[name, label], ...]}"
        raise ValueError(f"{file_name} must have the form {form}: {error!r}") from error
    if labels is None:
        return None
    if len(labels) < len(entries):
        raise ValueError(f"{file_name} lists a file twice")
    if missing := [name for name in names if not _is_label(labels.get(name))]:
        images = f"{missing[0]} ({len(missing)} of {len(names)})"
        raise ValueError(f"{file_name} must have a label in [0, {MAX_CLASSES - 1}] for {images}")
    return np.array([labels[name] for name in names], dtype=np.int64)


def _classes_of_folders(files: Files) -> tuple[np.ndarray | None, int, tuple[str, ...] | None]:
    names, source = files.images, f"source={files.path}"
    if deeper := [name for name in files.names if name.endswith(f"/{LABELS_FILE}")]:
        raise ValueError(f"{source}: {deeper[0]} is not at the top: set source to the folder with it")
    folders = [name.split("/")[:-1] for name in names]
    common = takewhile(lambda level: len(set(level)) == 1, zip(*folders, strict=False))
    depth = max(0, min(len([*common]), min(map(len, folders)) - 1))  # of folders above all class folders
    outside = [name for name in names if name.count("/") <= depth]
    if len(outside) == len(names):
        return None, 0, None
    if outside:
        raise ValueError(f"{source}: {outside[0]} is not in a class folder, but other images are")
    classes = _numbered([name.split("/")[depth] for name in names], source)
    # Skipping an empty class would change the numbers of all later classes.
    for level in range(depth + 1):
        parent = "".join(f"{folder}/" for folder in folders[0][:level])
        # Other files may be next to the folder that contains all classes.
        inside = names if level == depth else files.names
        filled = {name.removeprefix(parent).partition("/")[0] for name in inside if name.startswith(parent)}
        if empty := files.folders(parent) - filled:
            rule = "add images or remove it, which renumbers later classes"
            raise ValueError(f"{source}: folder {parent}{min(empty)} has no images of a known format: {rule}")
    return classes


def _from_list(path: Path) -> ImageList:
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"source={path} must be a list in UTF-8 ({error})") from error
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    pairs = [[*map(str.strip, line.rsplit("\t" if "\t" in line else None, 1))] for line in lines]
    for line, pair in zip(lines, pairs, strict=True):
        if len(pair) != 2:
            rule = "must be a path and a class, separated by a space or a tab"
            raise ValueError(f"source={path}: line {line!r} {rule}")
    if not pairs:
        raise ValueError(f"source={path} lists no images")
    names, classes = zip(*pairs, strict=True)
    if missing := [name for name in names if not (path.parent / name).is_file()]:
        raise FileNotFoundError(f"source={path}: {missing[0]} not found ({len(missing)} of {len(names)})")
    if all(re.fullmatch(r"-?\d+", c) for c in classes):
        numbers = [int(c) for c in classes]
        if wrong := [number for number in numbers if not _is_label(number)]:
            raise ValueError(f"source={path}: class {wrong[0]} must be in [0, {MAX_CLASSES - 1}]")
        grouped = np.array(numbers, dtype=np.int64), max(numbers) + 1, None
    else:
        grouped = _numbered(classes, f"source={path}")
    return ImageList(list(names), lambda name: (path.parent / name).open("rb"), *grouped)


def _numbered(classes: Sequence[str], source: str) -> tuple[np.ndarray, int, tuple[str, ...]]:
    class_names = tuple(sorted(set(classes)))
    splits = [name for name in class_names if SPLIT.fullmatch(name)]
    if len({SPLIT.fullmatch(name)[1].lower() for name in splits}) > 1:
        raise ValueError(f"{source}: {', '.join(splits)} are splits, not classes: set source to one of them")
    numbers = {name: number for number, name in enumerate(class_names)}
    return np.array([numbers[name] for name in classes], dtype=np.int64), len(class_names), class_names


def _is_label(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_CLASSES
