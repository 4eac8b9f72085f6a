"""Parse a command line for Hydra, and explain the errors of Hydra and OmegaConf in one line."""

import re
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runtime.errors import UserError, did_you_mean
from runtime.targets import CONFIGS, read_configs, walk

SCHEMA = "_schema"  # suffix of the names of schemas
# Lines of messages that only help developers.
FOR_DEVELOPERS = ("To append to your", "full_key:", "reference_type=", "object_type=", "See https://", "^")
CLEARER = (  # (pattern in a message, replacement)
    (r"Invalid value assigned: \w+ is not a ListConfig.*", "must be a list"),
    (r"Cannot merge DictConfig with List.*", "must be a list"),
    (r"Invalid type assigned: \w+ is not a subclass of \w+\..*", "is a group of keys, set one by one"),
    (r"(Could not load 'hydra/\w+/\w+')\.", r"\1: run `pip install -r requirements-sweeps.txt`"),
    (r"list index out of range$", "the list has no item with this index"),
    (r"^invalid literal for int\(\) with base 10: ('.*')$", r"\1 is not an index of a list: use 0, 1, ..."),
)
INTERPOLATED = re.compile(r"Interpolation key '(.*)' not found\s+full_key: (\S+)")


def options_first(arguments: Sequence[str]) -> list[str]:
    """Move options before overrides, as Hydra needs."""
    known, others = get_args_parser().parse_known_args(arguments)
    for text in others:
        if text.startswith("-"):
            key = text.lstrip("-").replace("-", "_")
            raise UserError(f"{text} is not an option (see --help): set keys without dashes, as {key}")
    overrides = [*known.overrides, *others]
    quoted = [_quote(text) for text in overrides]
    return [text for text in arguments if text not in overrides] + quoted


def _quote(override: str) -> str:
    """Quote a prompt, so that Hydra takes its commas, brackets and apostrophes literally."""
    key, _, value = override.partition("=")
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    if key != "prompt" or value == "null" or is_quoted:
        return override
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', value)
    return f'prompt="{escaped}"'


def explanation(error: BaseException) -> str:
    """Explain an error of Hydra, OmegaConf or this project in one line."""
    if isinstance(error, OverrideParseException):
        rule = "must be KEY=VALUE without spaces (list items as routes.0.KEY, special characters in quotes)"
        return f"{error.override} cannot be read: {rule}"
    cause = error.__cause__ if isinstance(error, HydraException) else None
    text = ": ".join(filter(None, (one_line(str(e)) for e in (error, cause) if e)))
    if unknown := re.match(r"Could not override '([\w./@]+)'", text):
        return _unknown_key(unknown[1])
    if unknown := re.match(r".*Could not find '(.+)/(.+)' Available options in '.*': (.*)", text):
        group, option, options = unknown[1], unknown[2], unknown[3].split()
        hint = did_you_mean(option, options)
        rule = f"is not known{hint}" if hint else f"must be one of {', '.join(options)}"
        return f"{group}={option} {rule}"
    text = re.sub(r"^Error merging override (.*?): ", r"\1: ", text)
    for pattern, words in CLEARER:
        text = re.sub(pattern, words, text)
    return text


def one_line(text: str) -> str:
    """Remove the lines for developers from a message of Hydra or OmegaConf."""
    text = INTERPOLATED.sub(r"\2 takes its value from \1, which is missing", text)
    lines = [line.strip() for line in text.split("Config search path")[0].splitlines()]
    joined = " ".join(line for line in lines if line and not line.startswith(FOR_DEVELOPERS))
    return re.sub(r"^\w+ raised while resolving interpolation: ", "", joined)


def is_of_hydra(error: BaseException) -> bool:
    """True if an error comes from composing a configuration; Hydra also raises plain ValueErrors."""
    raised_in = {*Path(traceback.extract_tb(error.__traceback__)[-1].filename).parts}
    is_known = isinstance(error, HydraException | OmegaConfBaseException)
    return is_known or not raised_in.isdisjoint(("hydra", "omegaconf"))


def _unknown_key(key: str) -> str:
    """Name the options that have a key, or else a key with the same last part or a similar name."""
    stored = ConfigStore.instance().repo
    schemas = [stored[name].node for name in stored if name.endswith(f"{SCHEMA}.yaml")]
    in_schemas = {name for schema in schemas for name, _ in walk(OmegaConf.to_container(schema))}
    in_files: dict[str, set[str]] = {}  # key -> the options that have it
    for file, package, node in read_configs(CONFIGS):
        group = file.parent.relative_to(CONFIGS).as_posix()
        for name, _ in walk(node, package):
            options = in_files.setdefault(name, set())
            options |= {f"{group}={file.stem}"} if name.startswith(f"{group.replace('/', '.')}.") else set()
    last = re.split(r"[./]", key)[-1]
    if (options := in_files.get(key)) and key.split(".")[0] in in_schemas and last not in in_schemas:
        return f"{key} needs {' or '.join(sorted(options))} on the command line"
    folders = {path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*") if path.is_dir()}
    groups = {folder for folder in folders if not folder.startswith("hydra")}
    known = in_schemas | groups | {name for name in in_files if name.split(".")[0] in in_schemas}
    same = sorted(name for name in known - {key} if re.split(r"[./]", name)[-1] == last)
    near = get_close_matches(key, same, n=1, cutoff=0) or get_close_matches(key, sorted(known - {key}), n=1)
    return f"{key} is not known" + "".join(f": did you mean {name}?" for name in near)
