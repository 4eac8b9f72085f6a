"""Groups of a configuration with a `_target_`: arguments are checked against its signature and bound."""

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, make_dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runtime.errors import did_you_mean
from runtime.targets import CONFIGS, allowed_targets, check_targets, load_target


@dataclass(frozen=True)
class Node:
    """A class or function with its arguments, from a group of a configuration; made by `read_nodes`.

    Args:
        key: the dotted key of the group.
        arguments: plain types and nodes; dictionaries may contain nodes.
        written: the group as plain types, with `_target_`, as in config.yaml.
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
        """Bind the arguments, nodes first; return the function itself if it has none."""
        bound = {k: v.bind() if isinstance(v, Node) else v for k, v in self.arguments.items()}
        return partial(self.function, **bound) if bound else self.function

    @cached_property
    def on_meta(self) -> Any:
        """The built object on the meta device, cached."""
        with torch.device("meta"):
            return self.bind()()

    def changed(self, changes: Mapping[str, Any]) -> "Node":
        """Return a copy with other arguments, checked again."""
        return read_nodes({**self.written, **changes}, self.key)


def read_nodes(group: Any, key: str = "", extra: Mapping[str, tuple[str, ...]] | None = None) -> Any:
    """Convert every dictionary with a `_target_` to a node, and its arguments, in place, to their types.

    Args:
        key: the dotted key of the group.
        extra: names in a group that are not arguments of its target, by key of the group.

    Raises:
        ValueError: a target is not allowed at its key, or an argument is unknown, missing or of another type.
    """
    check_targets(group, allowed_targets(config_folders()), key)
    return _read(group, key, extra or {})


def config_folders() -> tuple[Path, ...]:
    """Return the folders whose files allow targets: CONFIGS, and --config-dir of the command line."""
    sources = HydraConfig.get().runtime.config_sources if HydraConfig.initialized() else []
    given = [Path(source.path) for source in sources if source.schema == "file"]
    return (CONFIGS, *(folder for folder in given if folder.resolve() != CONFIGS))


def _read(group: Any, key: str, extra: Mapping[str, tuple[str, ...]]) -> Any:
    if not isinstance(group, dict):
        return group
    children = {name: _read(child, f"{key}.{name}" if key else name, extra) for name, child in group.items()}
    if "_target_" not in group:
        return children
    function = load_target(f"{key}._target_", group["_target_"])
    names = [name for name in group if name not in ("_target_", *extra.get(key, ()))]
    group.update(check_arguments(key, function, {name: group[name] for name in names}))
    arguments = {name: children[name] if isinstance(group[name], dict) else group[name] for name in names}
    return Node(key, function, arguments, group)


def check_arguments(key: str, target: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Check names and types of arguments against a signature, and return them converted."""
    parameters = inspect.signature(target).parameters
    # Parameters before / come from the caller.
    parameters = {n: p for n, p in parameters.items() if p.kind is not inspect.Parameter.POSITIONAL_ONLY}
    hints = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    for name, value in arguments.items():
        if name not in parameters:
            hint = did_you_mean(name, parameters) or f": {target.__name__} takes {', '.join(parameters)}"
            raise ValueError(f"{key}.{name}={value} is not known{hint}")
    checked = {}
    for name, parameter in parameters.items():
        plain = _plain(hints.get(name, Any))
        if name in arguments:
            schema = make_dataclass("Argument", [(name, plain)])
            try:
                converted = OmegaConf.structured(schema(arguments[name]))
                checked[name] = cast(dict[str, Any], OmegaConf.to_container(converted))[name]
            except OmegaConfBaseException as error:
                full_key, value, expected = name, arguments[name], hints[name]
                if error.full_key and error.full_key != name:  # an item of a list or a dictionary
                    full_key, value, expected = error.full_key, error.value, typing.get_args(expected)[-1]
                expected = getattr(expected, "__name__", expected)
                raise ValueError(f"{key}.{full_key}={value!r} must be of type {expected}") from error
        elif parameter.default is parameter.empty and plain is not Any:
            raise ValueError(f"{key}.{name} must be given: {target.__name__} needs it")
    return checked


def _plain(hint: Any) -> Any:
    """Return the part of a type hint that OmegaConf can check, or Any."""
    if typing.get_origin(hint) in (dict, list):
        return hint
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    plain = [option for option in options if option in (bool, int, float, str)]
    if len(plain) != 1:
        return Any
    return plain[0] | None if types.NoneType in options else plain[0]
