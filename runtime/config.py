"""Hydra and OmegaConf, whatever is configured: errors in one line, keys and types, and what a `_target_`
names.
"""

import inspect
import os
import re
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import Field, fields, is_dataclass, make_dataclass
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runtime.errors import UserError, did_you_mean
from runtime.lock import TRY_AGAIN, Busy
from runtime.targets import CONFIGS, allowed_targets, check_targets, load_target

SCHEMA = "_schema"  # what the names of schemas end in, beside those of the files that they are for
NOT_FOR_USERS = (
    "To append to your config",
    "full_key:",
    "reference_type=",
    "object_type=",
    "See https://",
    "^",
)
CLEARER = (
    (r"Invalid value assigned: \w+ is not a ListConfig, list or tuple\.", "must be a list, [VALUE,VALUE]"),
    (r"Cannot merge DictConfig with ListConfig", "must be a list, [VALUE,VALUE]"),
    (
        r"Invalid type assigned: \w+ is not a subclass of \w+\. value: .*",
        "is a group of keys, which are set one by one",
    ),
    (r"Cannot assign \w+ to Dict\[.*\]", "is a group of keys, which are set one by one"),
    (r"field '[\w.]+' is not Optional", "must not be null"),
    (r"\w+ \(DictConfig\) does not support deletion", "must not be removed"),
    (r"list index out of range", "the list has no such item"),
    (
        r"^invalid literal for int\(\) with base 10: ('.*')$",
        r"\1 is no item of a list: they have numbers, from 0",
    ),
)
INTERPOLATED = re.compile(r"Interpolation key '(.*)' not found\s+full_key: (\S+)")
KEY_IN_FILE = re.compile(r"^\s*(\w+):", re.MULTILINE)


def register_with_hydra(schemas: Mapping[str, type], resolvers: Mapping[str, Callable[..., Any]]) -> None:
    """Make the schemas of programs and the resolvers of interpolations known to Hydra."""
    store = ConfigStore.instance()
    for name, schema in schemas.items():
        store.store(name=f"{name}{SCHEMA}", node=schema)
    for name, resolver in resolvers.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)


@contextmanager
def user_mistakes() -> Iterator[None]:
    """Mark the errors of checking and building as the user's to mend."""
    try:
        yield
    except (ValueError, OSError, OmegaConfBaseException) as error:
        hydra = HydraConfig.get() if HydraConfig.initialized() else None
        job = (
            f" (in the job {' '.join(hydra.overrides.task)})"
            if hydra and hydra.mode == RunMode.MULTIRUN
            else ""
        )
        raise UserError(f"{error}{job}") from error


def run_main(main: Callable[[], None]) -> None:
    """Run a Hydra application so that a mistake of the user ends in one line; HYDRA_FULL_ERROR=1 shows where
    it was found.
    """
    show_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises what it would otherwise print in its own way
    try:
        main()
    except (UserError, HydraException, OmegaConfBaseException, ValueError) as error:
        if show_traceback or not (isinstance(error, UserError) or _is_of_hydra(error)):
            raise
        # One write: the lines of processes that share a terminal stay whole. `sys.exit(text)` takes two.
        sys.stderr.write(f"error: {explanation(error, sys.argv[1:])}\n")
        sys.exit(TRY_AGAIN if isinstance(error.__cause__, Busy) else 1)


def explanation(error: BaseException, arguments: Sequence[str]) -> str:
    """Return one line for an error of Hydra, of OmegaConf, or of our own."""
    if isinstance(error, OverrideParseException):
        rule = "must be KEY=VALUE, items of a list as routes.0.KEY, other signs in quotes"
        return f"{error.override} cannot be read: {rule}"
    texts = [
        str(error),
        *([str(error.__cause__)] if isinstance(error, HydraException) and error.__cause__ else []),
    ]
    return explain(texts, arguments, [f.name for schema in _schemas() for f in _fields_within(schema)])


def _is_of_hydra(error: BaseException) -> bool:
    """Return whether an error comes from composing, where Hydra raises bare ValueErrors, too."""
    own = isinstance(error, HydraException | OmegaConfBaseException)
    return own or bool(
        {"hydra", "omegaconf"} & {*Path(traceback.extract_tb(error.__traceback__)[-1].filename).parts}
    )


def _schemas() -> list[type]:
    """Return the schemas that `register_with_hydra` has told Hydra of."""
    stored = ConfigStore.instance().repo
    return [
        OmegaConf.get_type(entry.node) for name, entry in stored.items() if name.endswith(f"{SCHEMA}.yaml")
    ]


def _fields_within(schema: type) -> Iterator[Field]:
    for found in fields(schema):
        yield found
        if is_dataclass(found.type):
            yield from _fields_within(found.type)


def explain(texts: Sequence[str], arguments: Sequence[str], keys: Iterable[str]) -> str:
    """Return one line for an error.

    Args:
        texts: the messages of the error and of its cause.
        arguments: the command line.
        keys: names of keys of the schemas, to find the nearest among them and those of the files.
    """
    text = ": ".join(filter(None, map(one_line, texts)))
    if unknown := re.match(r"Could not override '([\w./@]+)'", text):
        return f"{unknown[1]} is not known{did_you_mean(unknown[1], [*keys, *_keys_of_files()])}"
    if "Config group override must be" in text:
        named = [a for a in arguments if (CONFIGS / a.partition("=")[0].lstrip("+~")).is_dir()]
        options = [f"{a} (one of {', '.join(_options(a.partition('=')[0].lstrip('+~')))})" for a in named]
        return f"{'; '.join(options)}: the value of a group must be the name of one of its files"
    text = re.sub(r"^Error merging override (.*?): ", r"\1: ", text)
    for pattern, words in CLEARER:
        text = re.sub(pattern, words, text)
    return text


def one_line(text: str) -> str:
    """Return a message without what Hydra and OmegaConf add for their own developers."""
    text = INTERPOLATED.sub(r"\2 takes its value from \1, which is not there", text)
    lines = [line.strip() for line in text.split("Config search path")[0].splitlines()]
    joined = " ".join(line for line in lines if line and not line.startswith(NOT_FOR_USERS))
    return re.sub(r"^\w+ raised while resolving interpolation: ", "", joined)


def _keys_of_files() -> set[str]:
    groups = {path.name for path in CONFIGS.rglob("*") if path.is_dir()}
    return groups.union(*(KEY_IN_FILE.findall(file.read_text()) for file in CONFIGS.rglob("*.yaml")))


def _options(group: str) -> list[str]:
    return sorted(file.stem for file in (CONFIGS / group).glob("*.yaml"))


def check_keys(node: Any, key: str = "") -> None:
    """Hold the keys against the schema: `++KEY=VALUE` and `~KEY` get by Hydra."""
    if not isinstance(node, DictConfig):
        return
    schema = OmegaConf.get_type(node)
    dotted = f"{key}." if key else ""
    if is_dataclass(schema):
        known = {found.name for found in fields(schema)}
        for name in sorted(set(node) - known):
            raise ValueError(f"{dotted}{name}={node[name]} is not known{did_you_mean(name, known)}")
        for name in sorted(known - set(node)):
            raise ValueError(f"{dotted}{name} must not be removed")
    for name in node:
        if not isinstance(name, str) or "." in name:
            raise ValueError(f"{dotted}{name!r} must be a name without dots: keys are nested")
        check_keys(node._get_node(name), f"{dotted}{name}")


def missing_keys(node: Any, key: str = "") -> list[str]:
    """Return the mandatory keys without a value; OmegaConf's own search fails where an interpolation needs
    one.
    """
    if isinstance(node, dict):
        return [
            found
            for name, child in node.items()
            for found in missing_keys(child, f"{key}.{name}" if key else name)
        ]
    if isinstance(node, list):
        return [found for i, child in enumerate(node) for found in missing_keys(child, f"{key}.{i}")]
    return [key] if node == MISSING else []


def build_node(config: dict[str, Any], key: str) -> Callable[..., Any]:
    """Return what the `_target_` of the node at a dotted key names, with the node's other entries bound as
    arguments.
    """
    node = reduce(getitem, key.split("."), config)
    check_targets(node, allowed_targets(config_folders()), key)  # here, too: on the very node that is built
    arguments = {name: value for name, value in node.items() if name != "_target_"}
    return partial(load_target(f"{key}._target_", node["_target_"]), **arguments)


def config_folders() -> tuple[Path, ...]:
    """Return the folders whose files say what may be built: our own, and those of the command line."""
    sources = HydraConfig.get().runtime.config_sources if HydraConfig.initialized() else []
    given = [Path(source.path) for source in sources if source.schema == "file"]
    return (CONFIGS, *(folder for folder in given if folder.resolve() != CONFIGS))


def check_arguments(key: str, target: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """Check arguments against a signature: names, and types where the annotation is of plain types.

    Returns:
        The arguments, converted to the types of the signature (`no` is false where a bool is expected).
    """
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
    """Return a type that OmegaConf checks, or Any."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    plain = [option for option in options if option in (bool, int, float, str)]
    if len(plain) != 1:
        return Any
    return plain[0] | None if types.NoneType in options else plain[0]
