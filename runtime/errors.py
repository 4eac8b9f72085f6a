"""Errors of the user, checks of single values, and the nearest key."""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches


def check_not_negative(key: str, value: float) -> None:
    """Raise a ValueError if the value is less than 0."""
    if value < 0:
        raise ValueError(f"{key}={value} must not be negative")


def check_positive(key: str, value: float, otherwise: str = "") -> None:
    """Raise a ValueError unless the value is greater than 0; `otherwise` says what else it may be."""
    if not value > 0:
        raise ValueError(f"{key}={value} must be greater than 0{otherwise}")


def check_choice(key: str, value: str, choices: Sequence[str]) -> None:
    """Raise a ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{key}={value} must be one of {', '.join(choices)}")


def did_you_mean(key: str, keys: Iterable[str]) -> str:
    """Hint at the key nearest to an unknown one; empty if none is near."""
    name = re.split(r"[./]", key)[-1]
    near = get_close_matches(name, sorted(set(keys)), n=1)
    return f": did you mean {key.removesuffix(name)}{near[0]}?" if near and near[0] != name else ""


class UserError(SystemExit):
    """A mistake of the user, shown as one line without a traceback.

    Hydra lets a SystemExit through as it is, and would add its own words to an Exception.
    """
