"""Composed configurations: resolvers, default names of runs, conversion to typed requests and nodes."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from builders.recipe import recipe
from builders.rules import check_finite
from data.manifest import read_manifest
from runtime.config import register_with_hydra, to_plain
from runtime.nodes import read_nodes
from runtime.sweep import key_of, sweep_arguments, swept_keys
from runtime.targets import CONFIGS

T = TypeVar("T")
MAX_NAME = 160
PLAIN_VALUE = re.compile(r"-?[\w.]+(e-\d+)?", re.ASCII)  # unchanged in the name of a folder
NAMED_ALWAYS = ("model", "model/size", "data")
NAMED_OTHERWISE = ("experiment", "parity", "tracker")  # a tracker changes no result
SCHEDULE_KEYS = ("warmup_steps", "schedule", "end_factor")  # not arguments of the target


def register(program: str, schema: type) -> None:
    """Register the schema of a program and the resolvers; call this before Hydra composes."""
    resolvers = {
        "default_run_name": _default_run_name,
        "latent_manifest": lambda path, key: getattr(read_manifest(path), key),
        "recipe": recipe,
        "if_at_most": lambda value, limit, then, otherwise: then if value <= limit else otherwise,
        # shift = sqrt(C H W / 4096) [RAE]; smaller latents than 4x32x32 are not shifted
        "dimension_shift": lambda in_channels, size: max(1.0, in_channels * size**2 / 4096) ** 0.5,
    }
    register_with_hydra(program, schema, resolvers)


def _default_run_name(seed: int) -> str:
    """Name a run by its groups that differ from the defaults; a job of a sweep by its swept keys."""
    hydra = HydraConfig.get()
    choices = hydra.runtime.choices
    experiment = choices.get("experiment") or ""
    parts = [choices.get(group) for group in NAMED_ALWAYS]
    parts = [part for part in parts if part and f"_{part}_" not in f"_{experiment}_"]
    parts += ["parity"] if choices.get("parity") == "official" else []
    if hydra.mode == RunMode.MULTIRUN:
        left_out = {*hydra.job.config.override_dirname.exclude_keys}
        sweeper_keys = [f"{key}={value}" for key, value in (hydra.sweeper.get("params") or {}).items()]
        swept = swept_keys([*sweep_arguments(), *sweeper_keys])
        label = _sweep_label(hydra.overrides.task, left_out, swept)
    else:
        label = "_".join(_group_labels(hydra.overrides.task, choices))
    name = "_".join(filter(None, [experiment, *parts, f"seed{seed}", label]))
    # Folder names are limited to 255 bytes; the hash keeps shortened names apart.
    return name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}_{_short_hash(name)}"


def _sweep_label(overrides: Iterable[str], left_out: set[str], swept: set[str]) -> str:
    """Join a job's swept overrides and a hash of the others and of values with special characters."""
    keyed = sorted((key_of(text), text) for text in overrides)
    first = [text for key, text in keyed if key in swept - left_out]
    hashed = [text for key, text in keyed if key not in swept | left_out]
    # Without special characters, run=runs/NAME works on a command line; the hash tells such values apart.
    shown = re.sub(r"[^\w.-]+", "-", ",".join(first))
    hashed += [text for text in first if not PLAIN_VALUE.fullmatch(text.partition("=")[2])]
    return "_".join(filter(None, [shown, _short_hash(",".join(hashed)) if hashed else ""]))


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _group_labels(overrides: Iterable[str], choices: Mapping[str, str]) -> Iterator[str]:
    recipes = [CONFIGS / group / f"{choices.get(group)}.yaml" for group in ("data", "experiment")]
    files = (CONFIGS / "config.yaml", *recipes)
    defaults = {key: choice for file in files for key, choice in _defaults(file)}
    for group, _, choice in (override.partition("=") for override in overrides):
        if group in defaults and choice != defaults[group] and group not in (*NAMED_ALWAYS, *NAMED_OTHERWISE):
            yield f"{group.rpartition('/')[2]}-{choice}"


def _defaults(file: Path) -> Iterator[tuple[str, str]]:
    """Yield (group, option) for each entry of a file's defaults list, base files first."""
    for entry in yaml.safe_load(file.read_text()).get("defaults", ()) if file.is_file() else ():
        if isinstance(entry, str):
            yield from _defaults(file.with_name(f"{entry}.yaml"))
        else:
            yield from ((key.removeprefix("override ").removeprefix("/"), entry[key]) for key in entry)


def resolve(cfg: DictConfig, schema: type[T]) -> T:
    """Check a configuration and convert it to an instance of its schema."""
    return schema(**resolve_nodes(cfg)[0])


def resolve_nodes(cfg: DictConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Check a configuration; return it as plain types, and with a node for each target."""
    plain = to_plain(cfg, {"data.path": " (a latent folder, see data/README.md)"})
    nodes = read_nodes(plain, extra={"optimizer": SCHEDULE_KEYS})
    check_finite(plain)
    return plain, nodes
