"""The configuration of a program: composed, completed, checked, and read back from a run."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from builders.network import (
    OURS,
    build_ema,
    build_guidance,
    build_loss,
    build_net,
    build_optimizer,
    build_precond,
    build_route_plan,
    build_sampler,
)
from builders.recipe import recipe
from builders.rules import MUST_NAME_A_TARGET, check_finite, check_groups, check_latents, check_loop
from builders.schemas import Config
from data.manifest import read_manifest
from data.shards import read_shard_manifest
from diffusion import Precond
from routing import Route
from runtime.command_line import one_line
from runtime.config import (
    build_node,
    check_arguments,
    compose_config,
    config_folders,
    register_with_hydra,
    to_plain,
)
from runtime.provenance import flatten
from runtime.sweep import key_of, sweep_arguments, swept_keys
from runtime.targets import CONFIGS, allowed_targets, check_apart, check_targets, load_target
from training.checkpoint import find_checkpoint
from training.run_folder import RunFolder

MAX_NAME = 160
PLAIN_VALUE = re.compile(r"-?[\w.]+(e-\d+)?", re.ASCII)  # which a folder's name shows as it is
NAMED_ALWAYS = ("model", "model/size", "data")
NAMED_OTHERWISE = ("experiment", "parity", "tracker")  # a tracker changes no result
GROUPS_OF_TARGETS = (*MUST_NAME_A_TARGET, "model.block", "model.router", "model.rejoin")
GROUPS_OF_TARGETS += ("sampler.times", "evaluation", "tracker")


def register(program: str, schema: type) -> None:
    """Tell Hydra the schema of a program, before it composes, and the resolvers."""
    resolvers = {
        "default_run_name": _default_run_name,
        "latent_manifest": lambda path, key: getattr(read_manifest(path), key),
        "shard_manifest": lambda path, key: getattr(read_shard_manifest(path), key),
        "recipe": recipe,
    }
    register_with_hydra(program, schema, resolvers)


def _default_run_name(seed: int) -> str:
    """Name a run by the groups that differ from their defaults, a job of a sweep by what is swept."""
    hydra = HydraConfig.get()
    choices = hydra.runtime.choices
    experiment = choices.get("experiment") or ""
    parts = [choices.get(group) for group in NAMED_ALWAYS]
    parts = [part for part in parts if part and f"_{part}_" not in f"_{experiment}_"]
    parts += ["parity"] if choices.get("parity") == "official" else []
    if hydra.mode == RunMode.MULTIRUN:
        left_out = {*hydra.job.config.override_dirname.exclude_keys}
        of_sweeper = [f"{key}={value}" for key, value in (hydra.sweeper.get("params") or {}).items()]
        swept = swept_keys([*sweep_arguments(), *of_sweeper])
        chosen = _chosen_in_sweep(hydra.overrides.task, left_out, swept)
    else:
        chosen = "_".join(_chosen_groups(hydra.overrides.task))
    name = "_".join(filter(None, [experiment, *parts, f"seed{seed}", chosen]))
    # Folder names are limited to 255 bytes; the hash keeps shortened names apart.
    return name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}_{_short_hash(name)}"


def _chosen_in_sweep(overrides: Iterable[str], left_out: set[str], swept: set[str]) -> str:
    """A job's swept overrides, and a hash of the others and of values with special characters."""
    keyed = sorted((key_of(text), text) for text in overrides)
    first = [text for key, text in keyed if key in swept - left_out]
    hashed = [text for key, text in keyed if key not in swept | left_out]
    # Usable on the command line again, as run=runs/NAME: values that differ in special characters look alike.
    shown = re.sub(r"[^\w.-]+", "-", ",".join(first))
    hashed += [text for text in first if not PLAIN_VALUE.fullmatch(text.partition("=")[2])]
    return "_".join(filter(None, [shown, _short_hash(",".join(hashed)) if hashed else ""]))


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _chosen_groups(overrides: Iterable[str]) -> Iterator[str]:
    entries = yaml.safe_load((CONFIGS / "config.yaml").read_text())["defaults"]
    defaults = dict(item for entry in entries if isinstance(entry, dict) for item in entry.items())
    for group, _, choice in (override.partition("=") for override in overrides):
        if group in defaults and choice != defaults[group] and group not in (*NAMED_ALWAYS, *NAMED_OTHERWISE):
            yield f"{group.rpartition('/')[2]}-{choice}"


def validate(cfg: DictConfig, num_processes: int = 1) -> dict[str, Any]:
    """Check a training configuration before any device is touched; return it resolved, as plain types."""
    config = resolve(cfg)
    check_loop(config, num_processes)
    check_groups(config)
    with torch.device("meta"):
        net = build_net(config)  # the network's own rules, without its memory
    check_latents(net, config["data"])
    if "router" in config["model"]:
        build_node(config, "model.router")(torch.zeros(1, net.num_tokens, 1), 1)  # it checks its own keys
    build_route_plan(config, net)
    build_loss(config, net)
    build_optimizer(config, net.named_parameters())
    build_ema(config, net)
    check_sampling(config)
    return config


def check_sampling(config: dict[str, Any]) -> None:
    """Call sampler and guidance on a single number: they check their own keys."""
    for group in ("sampler", "guidance"):
        _check_arguments({group: config[group]})
    with torch.device("meta"):
        net = build_net(config)
    guidance, precond = build_guidance(config), build_precond(config, net)
    guidance.load(_without_weights)
    guidance.check(precond)

    @cache
    def check_variance() -> None:
        latents, t = torch.zeros(1, *net.latent_shape, device="meta"), torch.tensor(precond.path.t_max)
        labels = torch.zeros(1, dtype=torch.long, device="meta") if net.num_classes else None
        precond.learned_variance(precond.predict(latents, t, labels), latents)

    def denoise(x: torch.Tensor, t: torch.Tensor, *, with_variance: bool = False) -> Any:
        if with_variance:
            check_variance()
        return (x, x) if with_variance else x

    build_sampler(config)(denoise, torch.zeros(1, 1, 1, 1), precond.path, randn_like=torch.zeros_like)


def _without_weights(path: str, checkpoint: str | None) -> Precond:
    run = RunFolder(path)
    run.check_started()
    find_checkpoint(run.path, checkpoint)
    config = of_run(run)
    with torch.device("meta"):
        return build_precond(config, build_net(config))


def resolve(cfg: DictConfig) -> dict[str, Any]:
    """Resolve a configuration into plain types, and check keys, targets and arguments."""
    config = to_plain(cfg, {"data.path": " (a latent folder, see data/README.md)"})
    check_targets(config, allowed_targets(config_folders()))
    _check_arguments(config)
    check_finite(config)
    return config


def composed(overrides: Sequence[str]) -> dict[str, Any]:
    """Compose and check the configuration of a training with these overrides."""
    register("train", Config)
    return resolve(compose_config(["run_name=none", *overrides]))


def of_run(run: RunFolder) -> dict[str, Any]:
    """Read the configuration of a run, which may come from anywhere, checked as on the command line."""
    check_apart(run.path, config_folders())
    return checked(run.config(), run.config_file)


def checked(written: Any, file: str | Path) -> dict[str, Any]:
    """Check a configuration from anyone's file as on the command line."""
    try:
        if "${" in str(written):
            raise ValueError("it has interpolations, which no run writes")
        config = resolve(OmegaConf.merge(OmegaConf.structured(Config), written))
        if missing := flatten(config).keys() - flatten(written).keys():
            raise ValueError(f"{min(missing)} is missing: another version of this code wrote it")
        check_loop(config, num_processes=1)
        check_groups(config)
    except (ValueError, OverflowError, OmegaConfBaseException) as error:  # overflow: of an int in a float
        place = error.full_key if isinstance(error, OmegaConfBaseException) else None
        key = f"{one_line(place)}: " if place else ""
        raise ValueError(f"{file}: {key}{one_line(str(error))}") from error
    return config


def _check_arguments(node: Any, key: str = "") -> None:
    """Check the arguments of every node that has a `_target_`, and put the converted ones in place."""
    if not isinstance(node, dict):
        return
    for name, child in node.items():
        _check_arguments(child, f"{key}.{name}" if key else name)
    if "_target_" in node:
        target = load_target(f"{key}._target_", node["_target_"])
        ours = ("_target_", *OURS.get(key, ()))
        arguments = {name: value for name, value in node.items() if name not in ours}
        node.update(check_arguments(key, target, arguments))
    elif key in GROUPS_OF_TARGETS and node:
        raise ValueError(f"{key}={node} must name a _target_")
    if key == "model":
        node["routes"] = check_routes("model.routes", node.get("routes", []))


def check_routes(key: str, given: Any) -> list[dict[str, Any]]:
    """Check names and types of the arguments of each route."""
    if not isinstance(given, list) or not all(isinstance(fields, dict) for fields in given):
        raise ValueError(f"{key}={given} must be a list of routes, each {{KEY: VALUE, ...}}; [] for none")
    return [check_arguments(f"{key}.{i}", Route, fields) for i, fields in enumerate(given)]
