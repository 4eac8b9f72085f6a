"""The configuration: its schema, its rules, and the one place that builds objects from it.

Groups of plain numbers have a dataclass here. A group with a `_target_` is checked against the signature of what it names:
the signature is the schema.
"""

import hashlib
import inspect
import os
import shutil
import sys
import sysconfig
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, make_dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import get_object
from joblib import cpu_count
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

METHODS = ("dit", "tread")
PRECISIONS = ("auto", "no", "bf16")
COMPILE = ("auto", "true", "false")
LONGEST_NAME = 160
NUM_SEEDS = 2**32  # what the CPU's generator tells apart
GROUPS_OF_TARGETS = ("model", "data", "sampler", "evaluation", "tracker")
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # as /proc/cpuinfo names them on x86 and Arm


@dataclass
class TrainConfig:
    """Scalars of the loop; README has the table."""

    total_steps: int = MISSING
    batch_size: int = MISSING  # global, over all processes and micro-batches
    micro_batch_size: int | None = None  # None: batch_size / number of processes
    mixed_precision: str = "auto"
    compile: str = "auto"
    grad_clip: float | None = None
    log_every: int = 50
    save_every: int = MISSING
    eval_every: int | None = None
    sample_every: int | None = None
    keep_last: int = 2
    milestone_every: int | None = None
    num_workers: int = 0
    init_from: str | None = None


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
    seed: int = 0
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ema: EMAConfig = field(default_factory=EMAConfig)
    sampler: dict[str, Any] = field(default_factory=dict)
    guidance: GuidanceConfig = field(default_factory=GuidanceConfig)
    evaluation: dict[str, Any] = field(default_factory=dict)
    tracker: dict[str, Any] = field(default_factory=dict)
    train: TrainConfig = field(default_factory=TrainConfig)


@dataclass
class SampleConfig:
    """What `sample.py` is asked; None means: as in the run."""

    run: str = MISSING
    checkpoint: str | None = None  # None: the newest
    num_samples: int = 100
    batch_size: int = 100
    first_seed: int = 0
    guidance_scale: float | None = None
    num_steps: int | None = None
    class_label: int | None = None  # None: all classes in turn
    mixed_precision: str = "no"
    output: str | None = None  # None: inside the run
    grid_columns: int = 10


@dataclass
class ScoreConfig:
    """What `fid.py` is asked."""

    samples: str = MISSING
    reference: str = MISSING
    output: str | None = None  # None: beside the samples
    evaluation: dict[str, Any] = field(default_factory=dict)


def register() -> None:
    """Make the schemas and resolvers known to Hydra; entry points call this before they compose."""
    store = ConfigStore.instance()
    for name, schema in (("train_schema", Config), ("sample_schema", SampleConfig), ("fid_schema", ScoreConfig)):
        store.store(name=name, node=schema)
    OmegaConf.register_new_resolver("default_run_name", _default_run_name, replace=True)
    OmegaConf.register_new_resolver("latent_manifest", _latent_manifest, replace=True)


def _default_run_name(seed: int, *, _root_: DictConfig) -> str:
    # While Hydra works out the folder of a job, its own settings are in the configuration; afterwards they are not.
    hydra = _root_["hydra"] if "hydra" in _root_ else HydraConfig.get()
    choices = hydra.runtime.choices
    name = f"{choices['model']}_{choices['model/size']}_{choices['data']}_seed{seed}"
    if hydra.mode == RunMode.MULTIRUN and hydra.job.override_dirname:
        name += "_" + hydra.job.override_dirname.replace("/", "-")
    # Folder names have a limit of 255 bytes; the hash keeps shortened names apart.
    return name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _latent_manifest(path: str, key: str) -> Any:
    return getattr(get_object("data.latents.read_manifest")(path), key)


def start_process() -> PartialState:
    """Join the other processes of the launch, if there are any, on CUDA or else on a fair share of the CPU's cores."""
    # TF32 is off: sampling and scores are fp32, training is fp32 or bf16.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available())
    # The launchers set one thread where nobody chose, which is right beside a GPU and half the speed on two cores.
    if state.device.type == "cpu" and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        torch.set_num_threads(max(1, cpu_count() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    return state


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn a mistake of the user, found before any work is done, into one line; HYDRA_FULL_ERROR=1 shows where."""
    try:
        yield
    except (ValueError, OSError, OmegaConfBaseException) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        sys.exit(f"error: {' '.join(str(error).split())}")


def validate(cfg: DictConfig, num_processes: int = 1) -> dict[str, Any]:
    """Check a training configuration before any device is touched, and return it resolved, as plain types.

    Raises:
        ValueError: with the dotted key, the value and the rule.
    """
    config = resolve(cfg)
    _check_targets(config)
    _check_loop(config, num_processes)
    _check_groups(config)
    with torch.device("meta"):
        build_net(config)  # the network's own rules, without its memory
    return config


def resolve(cfg: DictConfig) -> dict[str, Any]:
    """Return a configuration as plain types, every interpolation resolved.

    Raises:
        ValueError: a mandatory key has no value.
    """
    missing = OmegaConf.missing_keys(cfg)
    if missing:
        hint = " (a latent folder; data/README.md tells how one is made)" if "data.path" in missing else ""
        raise ValueError(f"{', '.join(sorted(missing))} must be given, as KEY=VALUE{hint}")
    return OmegaConf.to_container(cfg, resolve=True)


def build(node: dict[str, Any]) -> Callable[..., Any]:
    """Return what the node's `_target_` names, with the node's other entries bound as arguments."""
    return partial(get_object(node["_target_"]), **{key: value for key, value in node.items() if key != "_target_"})


def build_net(config: dict[str, Any]) -> nn.Module:
    """Build the network of a validated configuration, on the current default device."""
    route = get_object("routing.Route")
    return build(config["model"])(routes=[route(**fields) for fields in config["model"]["routes"]])


def build_precond(config: dict[str, Any], net: nn.Module) -> nn.Module:
    """Wrap a network in the preconditioning of the configuration."""
    return build(config["diffusion"]["precond"])(net)


def resolve_auto(config: dict[str, Any], saved: dict[str, Any], device: torch.device, num_processes: int) -> dict[str, Any]:
    """Decide what the configuration leaves open, for this machine; a resumed run keeps what it was begun with.

    Args:
        saved: what an earlier start of this run decided; empty for a new run.

    Raises:
        ValueError: the launcher asks for another precision, or the processes do not divide the batch.
    """
    train = config["train"]
    precision, compiled = train["mixed_precision"], train["compile"]
    if precision == "auto":
        precision = saved.get("mixed_precision") or ("bf16" if _has_fast_bf16(device) else "no")
    if compiled == "auto":
        compiled = saved["compile"] if "compile" in saved else _can_compile(device)
    micro_batch_size = train["micro_batch_size"] or saved.get("micro_batch_size") or train["batch_size"] // num_processes
    resolved = {
        "mixed_precision": precision,
        "compile": compiled in (True, "true"),
        "micro_batch_size": micro_batch_size,
    }
    # `accelerate launch` sets this variable to "no" where nobody chose.
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if launched not in ("no", precision):
        raise ValueError(
            f"train.mixed_precision={train['mixed_precision']} gives {precision} here, "
            f"but the launcher asks for {launched}: they must agree"
        )
    if not train["micro_batch_size"] and train["batch_size"] % (micro_batch_size * num_processes):
        raise ValueError(
            f"{num_processes} processes can not share train.batch_size={train['batch_size']} in the micro-batches of "
            f"{micro_batch_size} that this run was begun with"
        )
    return resolved


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
            raise ValueError(f"{key}.{name}={value} is not known: {target.__name__} takes {', '.join(parameters)}")
    checked = {}
    for name, parameter in parameters.items():
        plain = _plain(hints.get(name, Any))
        if name in given:
            schema = make_dataclass("Argument", [(name, plain)])
            try:
                checked[name] = OmegaConf.to_container(OmegaConf.structured(schema(given[name])))[name]
            except OmegaConfBaseException as error:
                raise ValueError(f"{key}.{name}={given[name]!r} must be of type {hints[name]}") from error
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


def _check_targets(node: Any, key: str = "") -> None:
    """Check every node that has a `_target_`, and put the converted arguments in place."""
    if not isinstance(node, dict):
        return
    for name, child in node.items():
        _check_targets(child, f"{key}.{name}" if key else name)
    if "_target_" in node:
        try:
            target = get_object(node["_target_"])
        except (ImportError, ValueError) as error:
            raise ValueError(f"{key}._target_={node['_target_']} can not be imported: {error}") from error
        node.update(check_arguments(key, target, {name: value for name, value in node.items() if name != "_target_"}))
    elif key in GROUPS_OF_TARGETS and node:
        raise ValueError(f"{key}={node} must name a _target_")
    if key == "model":
        route = get_object("routing.Route")
        node["routes"] = [check_arguments(f"model.routes.{i}", route, fields) for i, fields in enumerate(node["routes"])]


def _check_loop(config: dict[str, Any], num_processes: int) -> None:
    train = config["train"]
    for key in ("total_steps", "batch_size", "log_every", "save_every", "keep_last"):
        _check_positive(f"train.{key}", train[key])
    for key in ("micro_batch_size", "grad_clip", "eval_every", "sample_every", "milestone_every"):
        if train[key] is not None:
            _check_positive(f"train.{key}", train[key])
    for key, choices in (("mixed_precision", PRECISIONS), ("compile", COMPILE)):
        train[key] = train[key].lower()  # a YAML `true` arrives as "True"
        if train[key] not in choices:
            raise ValueError(f"train.{key}={train[key]} must be one of {', '.join(choices)}")
    if train["num_workers"] < 0:
        raise ValueError(f"train.num_workers={train['num_workers']} must not be negative")
    if not 0 <= config["seed"] < NUM_SEEDS:
        raise ValueError(f"seed={config['seed']} must not be negative, and less than {NUM_SEEDS}")
    if not 0 <= config["ema"]["decay"] < 1:
        raise ValueError(f"ema.decay={config['ema']['decay']} must be in [0, 1)")
    optimizer = config["optimizer"]
    _check_positive("optimizer.lr", optimizer["lr"])
    if len(optimizer["betas"]) != 2 or not all(0 <= beta < 1 for beta in optimizer["betas"]):
        raise ValueError(f"optimizer.betas={optimizer['betas']} must be two numbers in [0, 1)")
    _check_split(train["batch_size"], train["micro_batch_size"] or 1, num_processes)


def _check_groups(config: dict[str, Any]) -> None:
    """Check the rules that cross groups."""
    method, routes = config["method"], config["model"]["routes"]
    if method not in METHODS:
        raise ValueError(f"method={method} must be one of {', '.join(METHODS)}")
    if method == "tread" and not routes:
        raise ValueError(f"model.routes={routes}: TREAD training requires you to configure the routes, e.g. model/routes=paper")
    if method == "dit" and routes:
        raise ValueError(f"model.routes={routes} must be empty for model=dit, the dense twin; use model=tread")
    diffusion, num_classes = config["diffusion"], config["model"]["num_classes"]
    _check_positive("diffusion.sigma_data", diffusion["sigma_data"])
    for key in ("precond", "loss"):
        own = diffusion[key].get("sigma_data", diffusion["sigma_data"])
        if own != diffusion["sigma_data"]:
            raise ValueError(f"diffusion.{key}.sigma_data={own} must be diffusion.sigma_data={diffusion['sigma_data']}")
    if num_classes != config["data"]["num_classes"]:
        raise ValueError(f"model.num_classes={num_classes} must be data.num_classes={config['data']['num_classes']}")
    check_sampling(config["sampler"], config["guidance"]["guidance_scale"], num_classes)
    evaluation = config["evaluation"]
    if "num_samples" in evaluation and evaluation["num_samples"] < 2:
        raise ValueError(f"evaluation.num_samples={evaluation['num_samples']} must be at least 2")
    if evaluation.get("_target_") == "evaluation.DigitsEvaluator" and config["data"]["_target_"] != "data.digits":
        raise ValueError(f"evaluation._target_={evaluation['_target_']} scores digits: it needs data=digits")


def check_sampling(sampler: dict[str, Any], guidance_scale: float, num_classes: int) -> None:
    """Check what a sampler and guidance are asked to do.

    Raises:
        ValueError: no steps, or guidance of an unconditional network.
    """
    _check_positive("sampler.num_steps", sampler["num_steps"])
    if guidance_scale != 1 and not num_classes:
        raise ValueError(f"guidance.guidance_scale={guidance_scale} must be 1 for an unconditional network (num_classes=0)")


def _check_positive(key: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{key}={value} must be greater than 0")


def _check_split(batch_size: int, micro_batch_size: int, num_processes: int) -> None:
    if batch_size % (micro_batch_size * num_processes):
        raise ValueError(
            f"train.batch_size={batch_size} must be a multiple of train.micro_batch_size={micro_batch_size} "
            f"times the number of processes={num_processes}"
        )


def _has_fast_bf16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    cpuinfo = Path("/proc/cpuinfo")
    return device.type == "cpu" and cpuinfo.exists() and bool(BF16_FLAGS & set(cpuinfo.read_text().split()))


def _can_compile(device: torch.device) -> bool:
    if device.type == "cuda":
        return find_spec("triton") is not None
    has_headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    return device.type == "cpu" and has_headers and shutil.which(os.environ.get("CXX", "g++")) is not None
