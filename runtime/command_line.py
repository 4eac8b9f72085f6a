"""The command line as Hydra reads it: options before overrides, and its errors in one line."""

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

from runtime.errors import UserError
from runtime.targets import CONFIGS, read_configs, walk

SCHEMA = "_schema"  # the suffix of schemas, beside the files of the same names
FOR_DEVELOPERS = (
    "To append to your config",
    "full_key:",
    "reference_type=",
    "object_type=",
    "See https://",
    "^",
)
CLEARER = (
    (
        r"Invalid value assigned: \w+ is not a ListConfig.*|Cannot merge DictConfig with List.*",
        "must be a list",
    ),
    (
        r"Invalid type assigned: \w+ is not a subclass of \w+\. value: .*",
        "is a group of keys, set one by one",
    ),
    (r"(Could not load 'hydra/\w+/\w+')\.", r"\1, which `pip install -r requirements-sweeps.txt` brings"),
    (
        r"^invalid literal for int\(\) with base 10: ('.*')$",
        r"\1 is not an item of a list: those are 0, 1, ...",
    ),
)
INTERPOLATED = re.compile(r"Interpolation key '(.*)' not found\s+full_key: (\S+)")


def options_first(arguments: Sequence[str]) -> list[str]:
    """Sort a command line: Hydra parses options only before the overrides."""
    known, others = get_args_parser().parse_known_args(arguments)
    for text in others:
        if text.startswith("-"):
            key = text.lstrip("-").replace("-", "_")
            raise UserError(f"{text} is no option (--help lists them): keys are set without dashes, as {key}")
    overrides = [*known.overrides, *others]
    return [text for text in arguments if text not in overrides] + overrides


def explanation(error: BaseException) -> str:
    """Explain an error of Hydra, of OmegaConf, or of our own in one line."""
    if isinstance(error, OverrideParseException):
        rule = "must be KEY=VALUE without spaces, items of a list as routes.0.KEY, other characters in quotes"
        return f"{error.override} cannot be read: {rule}"
    cause = error.__cause__ if isinstance(error, HydraException) else None
    text = ": ".join(filter(None, (one_line(str(e)) for e in (error, cause) if e)))
    if unknown := re.match(r"Could not override '([\w./@]+)'", text):
        hint = "".join(f": did you mean {key}?" for key in _nearest(unknown[1]))
        return f"{unknown[1]} is not known{hint}"
    text = re.sub(r"^Error merging override (.*?): ", r"\1: ", text)
    for pattern, words in CLEARER:
        text = re.sub(pattern, words, text)
    return text


def one_line(text: str) -> str:
    """Strip a message of what Hydra and OmegaConf add for developers."""
    text = INTERPOLATED.sub(r"\2 takes its value from \1, which is not there", text)
    lines = [line.strip() for line in text.split("Config search path")[0].splitlines()]
    joined = " ".join(line for line in lines if line and not line.startswith(FOR_DEVELOPERS))
    return re.sub(r"^\w+ raised while resolving interpolation: ", "", joined)


def is_of_hydra(error: BaseException) -> bool:
    """True if an error comes from composing, where Hydra raises bare ValueErrors, too."""
    raised_in = {*Path(traceback.extract_tb(error.__traceback__)[-1].filename).parts}
    is_known = isinstance(error, HydraException | OmegaConfBaseException)
    return is_known or not raised_in.isdisjoint(("hydra", "omegaconf"))


def _nearest(key: str) -> list[str]:
    """The known key that an unknown one most likely means: with the same last name, or else similar."""
    known = sorted(_known_keys() - {key})
    last = re.split(r"[./]", key)[-1]
    same = [name for name in known if re.split(r"[./]", name)[-1] == last]
    return get_close_matches(key, same, n=1, cutoff=0) or get_close_matches(key, known, n=1)


def _known_keys() -> set[str]:
    """Keys of this program's schemas and of the files of its groups, and the names of the groups."""
    stored = ConfigStore.instance().repo
    schemas = [stored[name].node for name in stored if name.endswith(f"{SCHEMA}.yaml")]
    own = {key for schema in schemas for key, _ in walk(OmegaConf.to_container(schema))}
    in_files = {key for _, package, node in read_configs(CONFIGS) for key, _ in walk(node, package)}
    folders = {path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*") if path.is_dir()}
    groups = {folder for folder in folders if not folder.startswith("hydra")}
    return own | groups | {key for key in in_files if key.split(".")[0] in own}
