"""Targets that a configuration may build: those in the YAML files of `configs/` and of --config-dir.

A target is allowed only at the key where a file has it: functions of this project could be misused, too.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import yaml

from runtime.errors import as_value_error

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
_PACKAGE = re.compile(r"(?:#.*\n)*?#\s*@package\s+(\S+)")

Targets = dict[str, dict[str, str]]  # key of a node -> allowed _target_ -> file that has it


def read_configs(folder: Path) -> Iterator[tuple[Path, str, Any]]:
    """Yield each YAML file of a folder of configurations with the key of its content and the content.

    Raises:
        ValueError: a file is not YAML.
    """
    for file in sorted(folder.rglob("*.yaml")):
        text = file.read_text()
        try:
            content = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
        group = ".".join(file.relative_to(folder).parent.parts)
        package = match[1] if (match := _PACKAGE.match(text)) else "_group_"
        yield file, group if package == "_group_" else re.sub(r"^_global_\.?", "", package), content


def walk(node: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each node of nested dictionaries and lists, with its dotted key."""
    yield key, node
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, child in children:
        yield from walk(child, f"{key}.{name}" if key else str(name))


@lru_cache
def allowed_targets(folders: Sequence[Path] = (CONFIGS,)) -> Targets:
    """Collect the targets in the YAML files of folders; items of a list share its key."""
    targets: Targets = {}
    for folder in folders:
        for file, package, content in read_configs(folder):
            for key, name in _targets_in(content, package):
                targets.setdefault(key, {}).setdefault(name, f"{folder.name}/{file.relative_to(folder)}")
    return targets


def check_targets(node: Any, allowed: Targets, key: str = "") -> None:
    """Raise a ValueError if a configuration has a target that is not allowed; nothing is imported."""
    for target_key, name in _targets_in(node, key):
        names = allowed.get(target_key, {})
        if not isinstance(name, str) or name not in names:
            rule = f"must be {' or '.join(sorted(names))}" if names else "is not allowed"
            hint = "to use other code, name it in a YAML file of a folder given as --config-dir=FOLDER"
            raise ValueError(f"{target_key}._target_={name} {rule}, as YAML files in configs/ say: {hint}")


def check_apart(run: Path, folders: Sequence[Path]) -> None:
    """Raise a ValueError if a run is inside a folder of configurations: it could allow itself any target."""
    if any(run.resolve().is_relative_to(folder.resolve()) for folder in folders):
        raise ValueError(f"run={run} must not be inside a folder of configurations: move it")


def load_target(key: str, name: str) -> Callable[..., Any]:
    """Import a target: an attribute of a module, even if a submodule has the same name."""
    with as_value_error(f"{key}={name} cannot be imported", ImportError, ValueError, AttributeError):
        target = resolve_name(":".join(name.rsplit(".", 1)))
    if not callable(target):
        raise ValueError(f"{key}={name} must be the dotted name of a class or a function")
    return target


def _targets_in(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    for child_key, child in walk(node, key):
        if isinstance(child, dict) and "_target_" in child:
            yield re.sub(r"\.\d+\b", "", child_key), child["_target_"]
