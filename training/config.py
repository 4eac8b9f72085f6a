"""The configuration: its schema, its rules, and the one place that builds objects from it.

Groups of plain numbers have a dataclass here. A group with a `_target_` is checked against the signature of what it names:
the signature is the schema.
"""

import hashlib
import inspect
import os
import re
import sys
import traceback
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import Field, dataclass, field, fields, is_dataclass, make_dataclass
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
import torch.nn as nn
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runtime.lock import TRY_AGAIN, Busy
from runtime.provenance import flatten
from training.messages import did_you_mean, explain, one_line
from training.rules import check_finite, check_groups, check_loop
from training.run_folder import RunFolder
from training.targets import CONFIGS, allowed_targets, check_apart, check_targets, load_target

LONGEST_NAME = 160
MAY_BE_EMPTY = ("evaluation", "tracker")
GROUPS_OF_TARGETS = ("model", "data", "diffusion.precond", "diffusion.loss", "optimizer", "sampler", *MAY_BE_EMPTY)


@dataclass
class TrainConfig:
    """Scalars of the loop; README has the table."""

    total_steps: int = MISSING
    batch_size: int = MISSING  # global, over all processes and micro-batches
    micro_batch_size: int | None = None  # None: batch_size / number of processes
    mixed_precision: str = "auto"
    compile: str = "auto"
    keep_freed_memory: str = "auto"  # on a CPU; does not change results
    grad_clip: float | None = None
    log_every: int = 50
    save_every: int = MISSING
    eval_every: int | None = None
    sample_every: int | None = None
    keep_last: int = 2
    milestone_every: int | None = None
    max_time_sec: float | None = None
    max_skipped_steps: int = 10
    num_workers: int = 0
    init_from: str | None = None
    init_from_objective: str | None = None  # edm, ddpm or flow: what a file predicts that this project did not write
    masked_loss: bool = False


@dataclass
class RoutingConfig:
    """What the routes do over a training; routing.RoutePlan explains and checks the keys."""

    schedule: str = "constant"
    start_factor: float | None = None
    end_factor: float | None = None
    num_levels: int = 4
    off_last_steps: int | None = None
    force_keep_overflow: str = "grow"


@dataclass
class OptimizerConfig:
    """AdamW, or another optimizer of the same arguments."""

    _target_: str = "torch.optim.AdamW"
    lr: float = MISSING
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.0


@dataclass
class EMAConfig:
    """Average of the weights that samples are drawn from."""

    decay: float = 0.9999
    warmup: bool = False


@dataclass
class DiffusionConfig:
    """Preconditioning and loss, fed from one sigma_data."""

    sigma_data: float = MISSING
    precond: dict[str, Any] = field(default_factory=dict)
    loss: dict[str, Any] = field(default_factory=dict)


@dataclass
class GuidanceConfig:
    """Guidance of the samples drawn during training."""

    guidance_scale: float = 1.0


@dataclass
class Config:
    """Root of the training configuration."""

    method: str = MISSING  # set by the model group: tread or dit
    run_name: str = MISSING
    output_dir: str = MISSING
    wait: bool = False  # for another process that holds output_dir
    seed: int = 0
    decoding: str = "rounded"  # of samples, from latents to bytes; or official, as the public TREAD code
    data: dict[str, Any] = field(default_factory=dict)  # before the model, which takes its sizes: a mistake is told here
    model: dict[str, Any] = field(default_factory=dict)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ema: EMAConfig = field(default_factory=EMAConfig)
    sampler: dict[str, Any] = field(default_factory=dict)
    guidance: GuidanceConfig = field(default_factory=GuidanceConfig)
    evaluation: dict[str, Any] = field(default_factory=dict)
    tracker: dict[str, Any] = field(default_factory=dict)
    train: TrainConfig = field(default_factory=TrainConfig)


@dataclass
class SamplingConfig:
    """What is drawn from a run; None means: as in the run."""

    checkpoint: str | None = None  # a step, a name or a path; None: the newest
    num_samples: int | None = None
    batch_size: int = 100
    first_seed: int = 0
    labels: str = "random"  # drawn from the seeds; or balanced, the classes in turn
    class_label: int | None = None  # this class alone, in place of labels
    guidance_scale: float | None = None
    num_steps: int | None = None
    mixed_precision: str = "no"  # of the network and of the encoder that decodes
    decoding: str | None = None  # rounded or official
    encoder: str | None = None  # where the encoder of the latents is found; None: where their manifest says
    allow_other_encoder: bool = False


@dataclass
class SampleConfig(SamplingConfig):
    """What `sample.py` is asked."""

    run: str = MISSING
    num_samples: int = 100
    output: str | None = None  # None: inside the run
    grid_columns: int = 10
    overwrite: bool = False


@dataclass
class ScoreConfig(SamplingConfig):
    """What `fid.py` is asked."""

    mode: str = "score"  # or reference: make one from images
    suite: str = "adm"  # or digits, glyphs
    samples: str | None = None  # an .npz, a folder or a zip
    run: str | None = None  # draw samples and score them without files
    reference: str | None = None
    images: str | None = None
    resolution: int | None = None
    out: str | None = None  # None: beside the samples, or inside the run
    weights: str = "evaluation_files/weights-inception-2015-12-05-6726825d.pth"
    allow_unpublished_weights: bool = False
    precision_recall: bool = True
    exact_distances: bool = False
    kid: bool = False
    detector_batch_size: int = 64
    overwrite: bool = False


@dataclass
class EncodeConfig:
    """What `data.encode` is asked."""

    source: str = MISSING  # a folder of class folders, a zip of one, or a list
    out: str = MISSING
    encoder: str = "sd-vae-ft-ema"  # or sd-vae-ft-mse, sdxl, identity, a folder, OWNER/NAME on the hub
    resolution: int = 256
    mirrors: bool = True
    masks: str | None = None
    conditioning_type: str = "mask"  # or segmentation; of the masks
    num_held_out: int | None = None  # None: one image in a hundred, at most 5,000
    mixed_precision: str = "no"
    skip_corrupt: bool = False


@dataclass
class ConvertConfig:
    """What `data.convert` is asked; None means: as the format is assumed to be."""

    format: str = MISSING
    source: str = MISSING
    out: str = MISSING
    num_classes: int | None = None  # None: the largest label + 1
    num_held_out: int = 0
    stored_as: str | None = None  # samples, mean_logvar or mean_std
    scaled: bool | None = None
    mirrored: bool | None = None
    encoder: str | None = None
    scale: float | None = None


@dataclass
class AdviceConfig:
    """What `benchmarks.advise` is asked; None means: as in the run."""

    run: str = MISSING
    checkpoint: str | None = None  # a step, a name or a path; None: the newest
    num_samples: int = 256
    batch_size: int | None = None
    repeats: int = 11
    mask_coverage: float | None = None  # None: from the masks of the data, where the run uses them
    data_path: str | None = None  # where the data of the run are found; None: in the folder that it names
    output: str | None = None  # None: inside the run
    overwrite: bool = False


@dataclass
class FinetuneConfig:
    """What `examples.finetune` is asked."""

    transformer: str = MISSING  # a folder that diffusers has saved one in
    inputs: str = MISSING  # a folder of arrays
    output_dir: str = "runs/finetune"
    routes: Any = field(default_factory=list)  # or the name of one of configs/model/routes
    tread_config: str | None = None  # a JSON file of SimpleTuner, in place of routes
    mask_area: float = 0.0  # a mask that covers more than this fraction of a token's patch holds it; 0: any that touches it
    importance_weight: float = 0.0
    train: str = "lora"  # or lokr, full
    rank: int = 16
    quantize: str | None = None  # int8, int4 or nf4: of the base weights
    gradient_checkpointing: bool = False
    mixed_precision: str = "no"  # or bf16
    lr: float = 1e-4
    shift: float = 1.0  # of the times, towards noise
    batch_size: int = 4  # of all processes together
    total_steps: int = 1000
    num_held_out: int = 64
    log_every: int = 10
    eval_every: int = 100
    save_every: int = 100
    seed: int = 0


SCHEMAS = {
    "train": Config,
    "sample": SampleConfig,
    "fid": ScoreConfig,
    "encode": EncodeConfig,
    "convert": ConvertConfig,
    "advise": AdviceConfig,
    "finetune": FinetuneConfig,
}


def register() -> None:
    """Make the schemas and resolvers known to Hydra; entry points call this before they compose."""
    store = ConfigStore.instance()
    for name, schema in SCHEMAS.items():
        store.store(name=f"{name}_schema", node=schema)
    OmegaConf.register_new_resolver("default_run_name", _default_run_name, replace=True)
    OmegaConf.register_new_resolver("latent_manifest", partial(_manifest_key, "data:read_manifest"), replace=True)
    OmegaConf.register_new_resolver("shard_manifest", partial(_manifest_key, "data.shards:read_shard_manifest"), replace=True)


def _default_run_name(seed: int) -> str:
    hydra = HydraConfig.get()
    choices = hydra.runtime.choices
    experiment = choices.get("experiment") or ""  # names what it is about; what it does not name is added
    parts = [choices[group] for group in ("model", "model/size", "data")]
    parts = [part for part in parts if f"_{part}_" not in f"_{experiment}_"]
    parts += ["parity"] if choices.get("parity") == "official" else []
    name = "_".join([*filter(None, [experiment]), *parts, f"seed{seed}"])
    if hydra.mode == RunMode.MULTIRUN and hydra.job.override_dirname:
        # A name must be usable on Hydra's command line again, as run=runs/NAME.
        name += "_" + re.sub(r"[^\w.-]+", "-", hydra.job.override_dirname)
    # Folder names have a limit of 255 bytes; the hash keeps shortened names apart.
    return name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _manifest_key(reader: str, path: str, key: str) -> Any:
    return getattr(resolve_name(reader)(path), key)


class Explained(SystemExit):
    """An end that one line explains: to whom it is shown, a traceback tells no more.

    Hydra lets it through as it is, where it would put words of its own before an Exception.
    """


@contextmanager
def user_mistakes() -> Iterator[None]:
    """Mark the errors of checking and building as the user's to mend."""
    try:
        yield
    except (ValueError, OSError, OmegaConfBaseException) as error:
        hydra = HydraConfig.get() if HydraConfig.initialized() else None
        job = f" (in the job {' '.join(hydra.overrides.task)})" if hydra and hydra.mode == RunMode.MULTIRUN else ""
        raise Explained(f"{error}{job}") from error


def run(main: Callable[[], None]) -> None:
    """Run a Hydra application so that a mistake of the user ends in one line; HYDRA_FULL_ERROR=1 shows where it was found."""
    show_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises what it would otherwise print in its own way
    try:
        main()
    except (Explained, HydraException, OmegaConfBaseException, ValueError) as error:
        if show_traceback or not (isinstance(error, Explained) or _is_of_hydra(error)):
            raise
        # One write: the lines of processes that share a terminal stay whole. `sys.exit(text)` takes two.
        sys.stderr.write(f"error: {explanation(error, sys.argv[1:])}\n")
        sys.exit(TRY_AGAIN if isinstance(error.__cause__, Busy) else 1)


def explanation(error: BaseException, arguments: Sequence[str]) -> str:
    """Return one line for an error of Hydra, of OmegaConf, or of our own."""
    if isinstance(error, OverrideParseException):
        return f"{error.override} can not be read: must be KEY=VALUE, items of a list as routes.0.KEY, other signs in quotes"
    texts = [str(error), *([str(error.__cause__)] if isinstance(error, HydraException) and error.__cause__ else [])]
    return explain(texts, arguments, [f.name for schema in SCHEMAS.values() for f in _fields_within(schema)])


def _is_of_hydra(error: BaseException) -> bool:
    """Say whether an error comes from composing, in which Hydra and OmegaConf raise bare ValueErrors, too."""
    own = isinstance(error, HydraException | OmegaConfBaseException)
    return own or bool({"hydra", "omegaconf"} & {*Path(traceback.extract_tb(error.__traceback__)[-1].filename).parts})


def _fields_within(schema: type) -> Iterator[Field]:
    for found in fields(schema):
        yield found
        if is_dataclass(found.type):
            yield from _fields_within(found.type)


def validate(cfg: DictConfig, num_processes: int = 1) -> dict[str, Any]:
    """Check a training configuration before any device is touched, and return it resolved, as plain types.

    Raises:
        ValueError: with the dotted key, the value and the rule.
    """
    config = resolve(cfg)
    check_loop(config, num_processes)
    check_groups(config)
    with torch.device("meta"):
        net = build_net(config)  # the network's own rules, without its memory
    build_route_plan(config, net)
    build(config, "diffusion.loss")()
    return config


def resolve(cfg: DictConfig) -> dict[str, Any]:
    """Return a configuration as plain types, every interpolation resolved, of the types that its schemas say.

    Raises:
        ValueError: a mandatory key has no value, or a key was removed, or forced upon a group that does not know it; a value
            is of another type than its `_target_` takes, or not finite.
    """
    _check_keys(cfg)
    missing = _missing(OmegaConf.to_container(cfg))
    if missing:
        hint = " (a latent folder; data/README.md tells how one is made)" if "data.path" in missing else ""
        raise ValueError(f"{', '.join(sorted(missing))} must be given, as KEY=VALUE{hint}")
    config = OmegaConf.to_container(cfg, resolve=True)
    check_targets(config, allowed_targets(config_folders()))
    _check_arguments(config)
    check_finite(config)
    return config


def of_run(run: RunFolder) -> dict[str, Any]:
    """Return the configuration of a run, which may come from anywhere, held against the rules of the command line.

    Raises:
        ValueError: it breaks one, or was not written by this version.
    """
    written = run.config()
    check_apart(run.path, config_folders())
    try:
        if any("${" in text for text in _texts(written)):
            raise ValueError("it has interpolations, which no run writes")
        config = resolve(OmegaConf.merge(OmegaConf.structured(Config), written))
        if missing := flatten(config).keys() - flatten(written).keys():
            raise ValueError(f"{min(missing)} is missing: another version of this code wrote it")
        check_loop(config, num_processes=1)
        check_groups(config)
    except (ValueError, OverflowError, OmegaConfBaseException) as error:  # the second: an integer that no float can hold
        key = f"{error.full_key}: " if isinstance(error, OmegaConfBaseException) and error.full_key else ""
        raise ValueError(f"{run.config_file}: {key}{one_line(str(error))}") from error
    return config


def _texts(node: Any) -> Iterator[str]:
    children = [*node, *node.values()] if isinstance(node, dict) else node
    if isinstance(children, list | tuple):
        for child in children:
            yield from _texts(child)
    elif isinstance(node, str):
        yield node


def _check_keys(node: Any, key: str = "") -> None:
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
        _check_keys(node._get_node(name), f"{dotted}{name}")


def _missing(node: Any, key: str = "") -> list[str]:
    """Return the mandatory keys without a value; OmegaConf's own search fails where an interpolation needs one."""
    if isinstance(node, dict):
        return [found for name, child in node.items() for found in _missing(child, f"{key}.{name}" if key else name)]
    if isinstance(node, list):
        return [found for i, child in enumerate(node) for found in _missing(child, f"{key}.{i}")]
    return [key] if node == MISSING else []


def build(config: dict[str, Any], key: str) -> Callable[..., Any]:
    """Return what the `_target_` of the node at a dotted key names, with the node's other entries bound as arguments.

    Raises:
        ValueError: no file names it for this key.
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


def build_net(config: dict[str, Any]) -> nn.Module:
    """Build the network of a validated configuration, on the current default device."""
    route = resolve_name("routing:Route")
    return build(config, "model")(routes=[route(**fields) for fields in config["model"]["routes"]])


def build_route_plan(config: dict[str, Any], net: nn.Module) -> Any:
    """Build the plan that tells the routes of a network what to do at each step."""
    plan = resolve_name("routing:RoutePlan")
    return plan(net.routes, net.num_tokens, config["train"]["total_steps"], **config["routing"])


def build_precond(config: dict[str, Any], net: nn.Module) -> nn.Module:
    """Wrap a network in the preconditioning of the configuration."""
    return build(config, "diffusion.precond")(net)


def check_arguments(key: str, target: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """Check arguments against a signature: names, and types where the annotation is of plain types.

    Returns:
        The arguments, converted to the types of the signature (`no` is false where a bool is expected).

    Raises:
        ValueError: a name that the target does not take, a value of another type, or a plain argument that is missing.
    """
    parameters = inspect.signature(target).parameters
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


def _check_arguments(node: Any, key: str = "") -> None:
    """Check the arguments of every node that has a `_target_`, and put the converted ones in place."""
    if not isinstance(node, dict):
        return
    for name, child in node.items():
        _check_arguments(child, f"{key}.{name}" if key else name)
    if "_target_" in node:
        target = load_target(f"{key}._target_", node["_target_"])
        node.update(check_arguments(key, target, {name: value for name, value in node.items() if name != "_target_"}))
    elif key in GROUPS_OF_TARGETS and (node or key not in MAY_BE_EMPTY):
        raise ValueError(f"{key}={node} must name a _target_")
    if key == "model":
        node["routes"] = check_routes("model.routes", node.get("routes", []))


def check_routes(key: str, given: Any) -> list[dict[str, Any]]:
    """Return the arguments of each route, checked; raise ValueError with the key for what is not known or of another type."""
    if not isinstance(given, list) or not all(isinstance(fields, dict) for fields in given):
        raise ValueError(f"{key}={given} must be a list of routes, each {{KEY: VALUE, ...}}; [] for none")
    return [check_arguments(f"{key}.{i}", resolve_name("routing:Route"), fields) for i, fields in enumerate(given)]
