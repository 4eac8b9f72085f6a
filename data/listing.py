"""Images and their classes: a folder of class folders, a zip of one, or a text file that lists images."""

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
# Folders of splits, as train, val2017 or test_set; train_station and test_tube are classes.
SPLIT = re.compile(
    r"(train|val|test)(ing|id|idation)?([\W\d_]|px|sets?|splits?|data|images?|imgs?)*", re.IGNORECASE
)
LABELS_FILE = "dataset.json"
MAX_LABEL_BYTES = 512  # of what dataset.json says of a file, beside what it says of files that are not there


@dataclass(frozen=True)
class ImageList:
    """Names of images, and their classes."""

    names: list[str]
    open: Callable[[str], BinaryIO]
    labels: np.ndarray | None  # (count,) int64; None for images without classes
    num_classes: int
    class_names: tuple[str, ...] | None  # None where the classes have numbers only
    ignored: tuple[str, ...] = ()  # files that are not images


def list_images(path: str | Path) -> ImageList:
    """List the images of a folder, a zip, or a text file.

    In a folder or a zip, each top folder is a class, in alphabetical order, as in torchvision's ImageFolder,
    and must have images; folders around all of them do not count; images in no folder have no classes. A file
    dataset.json, as the EDM family of codebases writes it, gives the labels instead. A text file has a path,
    relative to it, and a class on each line.

    Raises:
        ValueError: the path is not there, has no images, or the class of one is not known.
    """
    path = Path(path)
    if path.is_file() and path.suffix.lower() in LIST_SUFFIXES:
        return _from_list(path)
    files = Files(path, "source=")
    if not files.images:
        raise ValueError(f"source={path} holds no images")
    if LABELS_FILE in files.names:
        labels = read_labels(files, files.images)
        classes = (labels, 0 if labels is None else int(labels.max()) + 1, None)
    else:
        classes = _classes_of_folders(files)
    ignored = tuple(sorted(set(files.names) - {*files.images, LABELS_FILE}))
    return ImageList(files.images, files.open, *classes, ignored)


def read_labels(files: Files, names: Sequence[str]) -> np.ndarray | None:
    """Read the labels (count,) of dataset.json, {"labels": [[name, label], ...]}; None: it has none."""
    what = f"{files.path}/{LABELS_FILE}"
    try:
        with files.open(LABELS_FILE) as file:
            entries = parse_json(read_bounded(file, MAX_JSON_BYTES + MAX_LABEL_BYTES * len(names)))["labels"]
        known = None if entries is None else {normalized_name(name): label for name, label in entries}
    except (*ZIP_ERRORS, TypeError, AttributeError) as error:
        form = "{'labels': [[name, label], ...]}"
        raise ValueError(f"{what} is not of the form {form}: {error!r}") from error
    if known is None:
        return None
    if len(known) < len(entries):
        raise ValueError(f"{what} names a file twice")
    missing = [name for name in names if not _is_label(known.get(name))]
    if missing:
        raise ValueError(f"{what} has no label 0, 1, ... for {missing[0]} ({len(missing)} of {len(names)})")
    return np.array([known[name] for name in names], dtype=np.int64)


def _classes_of_folders(files: Files) -> tuple[np.ndarray | None, int, tuple[str, ...] | None]:
    names, what = files.images, f"source={files.path}"
    deeper = [name for name in files.names if name.endswith(f"/{LABELS_FILE}")]
    if deeper:
        raise ValueError(f"{what}: {deeper[0]} gives the labels at the top alone: give its folder as source")
    folders = [name.split("/")[:-1] for name in names]
    common = takewhile(lambda level: len(set(level)) == 1, zip(*folders, strict=False))
    depth = max(0, min(len([*common]), min(map(len, folders)) - 1))  # of folders around all class folders
    outside = [name for name in names if name.count("/") <= depth]
    if len(outside) == len(names):
        return None, 0, None
    if outside:
        raise ValueError(f"{what}: {outside[0]} is not in a class folder, other images are")
    classes = _numbered([name.split("/")[depth] for name in names], what)
    # Without a class that has no images every later class would have another number.
    for level in range(depth + 1):
        parent = "".join(f"{folder}/" for folder in folders[0][:level])
        # Beside the folder of all classes there may be other files.
        inside = names if level == depth else files.names
        filled = {name.removeprefix(parent).partition("/")[0] for name in inside if name.startswith(parent)}
        if empty := files.folders(parent) - filled:
            rule = "remove it, or the classes change their numbers"
            raise ValueError(f"{what}: folder {parent}{min(empty)} holds no images of a known format: {rule}")
    return classes


def _from_list(path: Path) -> ImageList:
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"source={path} is not a list: it is not text in UTF-8 ({error})") from error
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    pairs = [[*map(str.strip, line.rsplit("\t" if "\t" in line else None, 1))] for line in lines]
    for line, pair in zip(lines, pairs, strict=True):
        if len(pair) != 2:
            rule = "must be a path and a class, with a space or a tab between"
            raise ValueError(f"source={path}: the line {line!r} {rule}")
    if not pairs:
        raise ValueError(f"source={path} lists no images")
    names, classes = zip(*pairs, strict=True)
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise FileNotFoundError(f"source={path}: {missing[0]} not found ({len(missing)} of {len(names)})")
    if all(re.fullmatch(r"-?\d+", c) for c in classes):
        numbers = [int(c) for c in classes]
        if wrong := [number for number in numbers if not _is_label(number)]:
            raise ValueError(
                f"source={path}: class {wrong[0]} must be 0, 1, ..., and less than {MAX_CLASSES}"
            )
        grouped = np.array(numbers, dtype=np.int64), max(numbers) + 1, None
    else:
        grouped = _numbered(classes, f"source={path}")
    return ImageList(list(names), lambda name: (path.parent / name).open("rb"), *grouped)


def _numbered(classes: Sequence[str], what: str) -> tuple[np.ndarray, int, tuple[str, ...]]:
    class_names = tuple(sorted(set(classes)))
    splits = [name for name in class_names if SPLIT.fullmatch(name)]
    if len({SPLIT.fullmatch(name)[1].lower() for name in splits}) > 1:
        raise ValueError(f"{what}: {', '.join(splits)} are splits, not classes: give one of them as source")
    numbers = {name: number for number, name in enumerate(class_names)}
    return np.array([numbers[name] for name in classes], dtype=np.int64), len(class_names), class_names


def _is_label(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_CLASSES
