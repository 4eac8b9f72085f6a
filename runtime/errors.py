"""The error class for mistakes of the user, checks of single values, and suggestions of keys."""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches


def check_not_negative(key: str, value: float) -> None:
    """Raise a ValueError if the value is less than 0."""
    if value < 0:
        raise ValueError(f"{key}={value} must not be negative")


def check_positive(key: str, value: float | None, otherwise: str = "") -> None:
    """Raise a ValueError unless the value is greater than 0, or None; `otherwise` ends the message."""
    if value is not None and not value > 0:
        raise ValueError(f"{key}={value} must be greater than 0{otherwise}")


def check_choice(key: str, value: str, choices: Sequence[str]) -> None:
    """Raise a ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{key}={value} must be one of {', '.join(choices)}")


def check_index(key: str, value: int, count: int) -> None:
    """Raise a ValueError unless the value is in [0, count)."""
    if not 0 <= value < count:
        raise ValueError(f"{key}={value} must be in [0, {count - 1}]")


@contextmanager
def as_value_error(message: object, *kinds: type[BaseException]) -> Iterator[None]:
    """Turn errors of these kinds, by default ValueErrors, into a ValueError that begins with a message."""
    kinds = kinds or (ValueError,)
    try:
        yield
    except kinds as error:
        raise ValueError(f"{message}: {error}") from error


def did_you_mean(key: str, keys: Iterable[str]) -> str:
    """Suggest the key most similar to an unknown one; empty if none is similar."""
    name = re.split(r"[./]", key)[-1]
    near = get_close_matches(name, sorted(set(keys)), n=1)
    return f": did you mean {key.removesuffix(name)}{near[0]}?" if near and near[0] != name else ""


class UserError(SystemExit):
    """A mistake of the user, shown as one line without a traceback.

    A SystemExit, because Hydra adds text to other exceptions.
    """
