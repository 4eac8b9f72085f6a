"""Groups of a configuration that name a `_target_`: checked against its signature, and bound to it."""

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, make_dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runtime.errors import did_you_mean
from runtime.targets import CONFIGS, allowed_targets, check_targets, load_target


@dataclass(frozen=True)
class Node:
    """A class or function with arguments, as a group of a configuration names it; made by `read_nodes`.

    Args:
        key: the place of the group.
        arguments: plain types, and nodes, which may be in dictionaries.
        written: the group as plain types, with `_target_`, as config.yaml has it.
    """

    key: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    written: dict[str, Any]

    @property
    def target(self) -> str:
        """The dotted name of the function."""
        return self.written["_target_"]

    def bind(self) -> Callable[..., Any]:
        """The function with its arguments, bound in turn; the function itself if it has none."""
        bound = {
            name: value.bind() if isinstance(value, Node) else value for name, value in self.arguments.items()
        }
        return partial(self.function, **bound) if bound else self.function

    @cached_property
    def on_meta(self) -> Any:
        """The object that it builds, on the meta device; built once."""
        with torch.device("meta"):
            return self.bind()()

    def changed(self, changes: Mapping[str, Any]) -> "Node":
        """The node with other arguments, checked as well."""
        return read_nodes({**self.written, **changes}, self.key)


def read_nodes(group: Any, key: str = "", beside: Mapping[str, tuple[str, ...]] | None = None) -> Any:
    """Make a node of every dictionary that names a `_target_`; converted arguments are put in their places.

    Args:
        key: the dotted key of the group.
        beside: names that a group has beside the arguments of its target, by its key.

    Raises:
        ValueError: a target is not allowed at its key, or an argument is unknown, missing or of another type.
    """
    check_targets(group, allowed_targets(config_folders()), key)
    return _read(group, key, beside or {})


def config_folders() -> tuple[Path, ...]:
    """Folders whose files say what may be built: our own, and those of the command line."""
    sources = HydraConfig.get().runtime.config_sources if HydraConfig.initialized() else []
    given = [Path(source.path) for source in sources if source.schema == "file"]
    return (CONFIGS, *(folder for folder in given if folder.resolve() != CONFIGS))


def _read(group: Any, key: str, beside: Mapping[str, tuple[str, ...]]) -> Any:
    if not isinstance(group, dict):
        return group
    children = {name: _read(child, f"{key}.{name}" if key else name, beside) for name, child in group.items()}
    if "_target_" not in group:
        return children
    function = load_target(f"{key}._target_", group["_target_"])
    names = [name for name in group if name not in ("_target_", *beside.get(key, ()))]
    group.update(check_arguments(key, function, {name: group[name] for name in names}))
    arguments = {name: children[name] if isinstance(group[name], dict) else group[name] for name in names}
    return Node(key, function, arguments, group)


def check_arguments(key: str, target: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """Check names and plain types of arguments against a signature, and return them converted."""
    parameters = inspect.signature(target).parameters
    # What stands before / comes from the caller.
    parameters = {n: p for n, p in parameters.items() if p.kind is not inspect.Parameter.POSITIONAL_ONLY}
    hints = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    for name, value in given.items():
        if name not in parameters:
            hint = did_you_mean(name, parameters) or f": {target.__name__} takes {', '.join(parameters)}"
            raise ValueError(f"{key}.{name}={value} is not known{hint}")
    checked = {}
    for name, parameter in parameters.items():
        plain = _plain(hints.get(name, Any))
        if name in given:
            schema = make_dataclass("Argument", [(name, plain)])
            try:
                checked[name] = OmegaConf.to_container(OmegaConf.structured(schema(given[name])))[name]
            except OmegaConfBaseException as error:
                expected = getattr(hints[name], "__name__", hints[name])
                raise ValueError(f"{key}.{name}={given[name]!r} must be of type {expected}") from error
        elif parameter.default is parameter.empty and plain is not Any:
            raise ValueError(f"{key}.{name} must be given: {target.__name__} needs it")
    return checked


def _plain(hint: Any) -> Any:
    """The part of a type hint that OmegaConf can check, or Any."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    plain = [option for option in options if option in (bool, int, float, str)]
    if len(plain) != 1:
        return Any
    return plain[0] | None if types.NoneType in options else plain[0]
