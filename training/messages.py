"""What Hydra and OmegaConf say of a command line, in words of this project: key, value, rule, and what was meant."""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from training.targets import CONFIGS

NOT_FOR_USERS = ("To append to your config", "full_key:", "reference_type=", "object_type=", "See https://", "^")
CLEARER = (
    (r"Invalid value assigned: \w+ is not a ListConfig, list or tuple\.", "must be a list, [VALUE,VALUE]"),
    (r"Cannot merge DictConfig with ListConfig", "must be a list, [VALUE,VALUE]"),
    (r"Invalid type assigned: \w+ is not a subclass of \w+\. value: .*", "is a group of keys, which are set one by one"),
    (r"Cannot assign \w+ to Dict\[.*\]", "is a group of keys, which are set one by one"),
    (r"field '[\w.]+' is not Optional", "must not be null"),
    (r"\w+ \(DictConfig\) does not support deletion", "must not be removed"),
    (r"list index out of range", "the list has no such item"),
    (r"^invalid literal for int\(\) with base 10: ('.*')$", r"\1 is no item of a list: they have numbers, from 0"),
)
INTERPOLATED = re.compile(r"Interpolation key '(.*)' not found\s+full_key: (\S+)")
KEY_IN_FILE = re.compile(r"^\s*(\w+):", re.MULTILINE)


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


def did_you_mean(key: str, keys: Iterable[str]) -> str:
    """Return a hint at the key that is nearest to one that is not known; empty if none is near."""
    name = re.split(r"[./]", key)[-1]
    near = get_close_matches(name, sorted(set(keys)), n=1)
    return f": did you mean {key.removesuffix(name)}{near[0]}?" if near and near[0] != name else ""


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
