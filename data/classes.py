"""Numbers and names of classes: the checks, and the lines that programs print about them."""

import re
import unicodedata
from collections.abc import Sequence

import numpy as np

from data.manifest import LatentManifest

NAMES_SHOWN = 10
# Folders of splits, as train, val2017 or test_set; train_station and test_tube are classes.
SPLIT = re.compile(
    r"(train|val|test)(ing|id|idation)?([\W\d_]|px|sets?|splits?|data|images?|imgs?)*", re.IGNORECASE
)


def check_names(names: Sequence[str], what: str) -> None:
    """Raise a ValueError for names of splits, and for two names that look the same."""
    splits = [name for name in names if SPLIT.fullmatch(name)]
    if len({SPLIT.fullmatch(name)[1].lower() for name in splits}) > 1:
        raise ValueError(f"{what}: {', '.join(splits)} are splits, not classes: give one of them as source")
    seen = {}
    for name in names:
        other = seen.setdefault(unicodedata.normalize("NFC", name).strip(), name)
        if other != name:
            raise ValueError(f"{what}: classes {other!a} and {name!a} look the same: rename one of them")


def untrained_classes_of(labels: np.ndarray | None, num_classes: int) -> tuple[int, ...]:
    """The classes without a label in `labels`, ascending."""
    if labels is None:
        return ()
    return tuple(np.flatnonzero(np.bincount(labels, minlength=num_classes) == 0).tolist())


def first_classes(manifest: LatentManifest) -> str:
    """The number of classes, and the first names with their numbers."""
    if not manifest.num_classes:
        return "none"
    names = [f"{i} {name}" for i, name in enumerate(manifest.class_names or ())]
    return str(manifest.num_classes) + (f": {_some(names)}" if names else ", numbers without names")


def class_warnings(manifest: LatentManifest) -> list[str]:
    """A line for numbers that differ from the names, and one for classes without images."""
    found, names = [], manifest.class_names or ()
    moved = [f"class {i} is {name}" for i, name in enumerate(names) if name.isdecimal() and int(name) != i]
    if moved:
        rule = "names are sorted as text, so that 10 comes before 2 (02 does not)"
        found.append(f"{_some(moved)}: {rule}")
    if manifest.untrained_classes:
        count, ranges = len(manifest.untrained_classes), _ranges(manifest.untrained_classes)
        found.append(
            f"{count} of {manifest.num_classes} classes have no images to train on, and are never drawn "
            f"when sampling: {_some(ranges)}"
        )
    return found


def _some(parts: list[str]) -> str:
    return ", ".join(parts[:NAMES_SHOWN]) + (", ..." if parts[NAMES_SHOWN:] else "")


def _ranges(numbers: Sequence[int]) -> list[str]:
    """Ascending numbers as 1, 3-7."""
    breaks = np.flatnonzero(np.diff(numbers) != 1) + 1
    runs = np.split(np.asarray(numbers), breaks)
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
