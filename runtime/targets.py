"""What a configuration may build: what the YAML files of `configs/` name, or those of a folder that
--config-dir adds.

    python -m runtime.targets [--config-dir FOLDER]        lists it

A name is allowed for the key for which a file names it, and for no other: our own functions could be put to a
bad use, too.
"""

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import yaml

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
_PACKAGE = re.compile(r"(?:#.*\n)*?#\s*@package\s+(\S+)")

Targets = dict[
    str, dict[str, str]
]  # by the key of a node: the names that its _target_ may have, each with a file that says so


@lru_cache
def allowed_targets(folders: Sequence[Path] = (CONFIGS,)) -> Targets:
    """Return what the YAML files of folders name; items of a list share the key of the list."""
    found: Targets = {}
    for folder in folders:
        for file in sorted(folder.rglob("*.yaml")):
            text = file.read_text()
            try:
                content = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(f"{file} is no YAML: {' '.join(str(error).split())}") from error
            for key, name in _targets_in(content, _package(text, file.relative_to(folder).parent)):
                found.setdefault(key, {}).setdefault(name, f"{folder.name}/{file.relative_to(folder)}")
    return found


def check_targets(node: Any, allowed: Targets, key: str = "") -> None:
    """Refuse a configuration that names, anywhere in it, what may not be built there. Nothing is imported."""
    for place, name in _targets_in(node, key):
        names = allowed.get(place, {})
        if not isinstance(name, str) or name not in names:
            rule = f"must be {' or '.join(sorted(names))}" if names else "must not be there"
            raise ValueError(
                f"{place}._target_={name} {rule}, as YAML files in configs/ say: name other code in one of a "
                "folder that you "
                "give with --config-dir=FOLDER"
            )


def check_apart(run: Path, folders: Sequence[Path]) -> None:
    """Raise a ValueError where a run lies in a folder whose files say what may be built: its own would be
    among them.
    """
    if any(run.resolve().is_relative_to(folder.resolve()) for folder in folders):
        raise ValueError(
            f"run={run} lies in a folder of configurations, which say what may be built: give another one"
        )


def load_target(key: str, name: str) -> Callable[..., Any]:
    """Import what a configuration names; the last part of a name is in a module, be there a module of that
    name or not.
    """
    try:
        target = resolve_name(":".join(name.rsplit(".", 1)))
    except (ImportError, ValueError, AttributeError) as error:
        raise ValueError(f"{key}={name} cannot be imported: {error}") from error
    if not callable(target):
        raise ValueError(f"{key}={name} must be the dotted name of a class or a function")
    return target


def _targets_in(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, list):
        for child in node:
            yield from _targets_in(child, key)
    elif isinstance(node, dict):
        if "_target_" in node:
            yield key, node["_target_"]
        for name, child in node.items():
            yield from _targets_in(child, f"{key}.{name}" if key else str(name))


def _package(text: str, group: Path) -> str:
    """Return the key that a file's content goes to, as its first lines tell Hydra; its folder's, where they
    tell nothing.
    """
    of_group = ".".join(group.parts)
    told = _PACKAGE.match(text)
    if not told or told[1] == "_group_":
        return of_group
    return "" if told[1] == "_global_" else told[1].removeprefix("_global_.")


def main() -> None:
    """List what may be built."""
    parser = argparse.ArgumentParser(
        prog="python -m runtime.targets",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config-dir", type=Path, help="a folder beside configs/, as it is given to the programs"
    )
    added = parser.parse_args().config_dir
    for key, names in sorted(allowed_targets((CONFIGS, *([added] if added else []))).items()):
        for name, file in sorted(names.items()):
            print(f"{key:20} {name:36} {file}")


if __name__ == "__main__":
    main()
