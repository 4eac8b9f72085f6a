"""Rules across groups of a training configuration, and of data and evaluation before they are opened."""

import math
from pathlib import Path
from typing import Any

from builders.schemas import check_train
from models import Backbone
from runtime.errors import check_choice, check_not_negative, check_positive
from runtime.provenance import flatten

MUST_NAME_A_TARGET = ("model", "data", "diffusion.precond", "diffusion.loss")
MUST_NAME_A_TARGET += ("optimizer", "ema", "sampler", "guidance")
STREAMED_DATA = "data.open_shards"
RECONSTRUCTS = "diffusion.EDMPrecond"
COUNTS = {"data.num_entries", "data.num_components", "data.num_images", "evaluation.batch_size"}
DRAWN_DATA = ("data.synthetic", "data.mixture")
# Option of model/routes that each routed method is known for.
ROUTES = {"tread": "paper", "sprint": "sprint"}
METHODS = ("dit", *ROUTES)
PARTS = ("block", "router", "rejoin")  # that not every model has
DECODINGS = ("rounded", "official")
LABELS = ("random", "balanced")  # of samples
MAY_BE_INFINITE = ("sampler.S_max", math.inf)
NUM_SEEDS = 2**32  # that the CPU's generator distinguishes
MAX_SYNTHETIC = 2**28  # numbers of random latents: 1 GiB


def check_loop(config: dict[str, Any], num_processes: int) -> None:
    """Check names, seed and the group train."""
    train = config["train"]
    for key in ("run_name", "output_dir"):
        if not config[key].strip():
            raise ValueError(f"{key}='{config[key]}' must not be empty")
    name = Path(config["run_name"])
    if name.is_absolute() or ".." in name.parts:
        raise ValueError(f"run_name={name} must be a name below runs/: output_dir sets any other place")
    check_train(train)
    if not 0 <= config["seed"] < NUM_SEEDS:
        raise ValueError(f"seed={config['seed']} must not be negative, and less than {NUM_SEEDS}")
    batch_size, micro_batch_size = train["batch_size"], train["micro_batch_size"] or 1
    if batch_size % (micro_batch_size * num_processes):
        raise ValueError(
            f"train.batch_size={batch_size} must be a multiple of train.micro_batch_size={micro_batch_size} "
            f"times the number of processes={num_processes}"
        )


def check_groups(config: dict[str, Any]) -> None:
    """Check the rules that cross groups."""
    method, routes, data = config["method"], config["model"]["routes"], config["data"]
    train, evaluation = config["train"], config["evaluation"]
    check_choice("method", method, METHODS)
    check_choice("decoding", config["decoding"], DECODINGS)
    if method in ROUTES and not routes:
        rule = f"{method.upper()} training requires you to configure the routes"
        raise ValueError(f"model.routes={routes}: {rule}, e.g. model/routes={ROUTES[method]}")
    if method == "dit" and routes:
        rule = "must be empty for model=dit, the dense twin; use model=tread"
        raise ValueError(f"model.routes={routes} {rule}")
    flat = flatten(config)
    for key in (*MUST_NAME_A_TARGET, *(f"model.{part}" for part in PARTS if part in config["model"])):
        if f"{key}._target_" not in flat:
            raise ValueError(f"{key} must name a _target_")
    if train["kept_tokens_only"] and flat.get("model.router._target_") != "routing.random_router":
        raise ValueError(
            "train.kept_tokens_only=true needs model/router=random: the loss must know the kept tokens"
        )
    if weight := train["reconstruction_weight"]:
        if not train["kept_tokens_only"]:
            raise ValueError(f"train.reconstruction_weight={weight} needs train.kept_tokens_only=true")
        # Flow predicts x_in by a velocity of 0, and DDPM's D_x is off by 1 / alpha times the error.
        if config["diffusion"]["precond"]["_target_"] != RECONSTRUCTS:
            raise ValueError(f"train.reconstruction_weight={weight} needs diffusion=edm")
    for key in flat.keys() & COUNTS:
        if flat[key] is not None:
            check_positive(key, flat[key])
    if "seed" in data:
        check_not_negative("data.seed", data["seed"])
    if data["_target_"] in DRAWN_DATA:
        check_drawn(data)
    if "labels" in evaluation:
        check_choice("evaluation.labels", evaluation["labels"], LABELS)
    if evaluation and train["eval_every"] and train["eval_every"] % train["save_every"]:
        raise ValueError(
            f"train.eval_every={train['eval_every']} must be a multiple of train.save_every="
            f"{train['save_every']} where samples are scored, so that a failure there loses nothing"
        )
    if data["_target_"] == STREAMED_DATA and train["num_workers"]:
        rule = "must be 0 for data=stream, which reads ahead by itself"
        raise ValueError(f"train.num_workers={train['num_workers']} {rule}")
    if data["_target_"] == STREAMED_DATA and evaluation and evaluation.get("reference") is None:
        raise ValueError("evaluation.reference=null, the training images, must be a file for data=stream")


def check_finite(node: Any, key: str = "") -> None:
    """Raise a ValueError where a number of a configuration is not finite."""
    if isinstance(node, dict | list):
        for name, child in node.items() if isinstance(node, dict) else enumerate(node):
            check_finite(child, f"{key}.{name}" if key else str(name))
    elif isinstance(node, float) and not (math.isfinite(node) or (key, node) == MAY_BE_INFINITE):
        raise ValueError(f"{key}={node} must be a finite number")


def check_drawn(data: dict[str, Any]) -> None:
    """Raise a ValueError unless as many random latents can be drawn."""
    count, num_held_out = data["num_entries"], data["num_held_out"]
    if count * data["in_channels"] * data["input_size"] ** 2 > MAX_SYNTHETIC:
        raise ValueError(f"data.num_entries={count} must give at most {MAX_SYNTHETIC} numbers in memory")
    if not 0 <= num_held_out < count:
        raise ValueError(f"data.num_held_out={num_held_out} must be in [0, {count - 1}], of data.num_entries")


def check_latents(net: Backbone, data: dict[str, Any]) -> None:
    """Raise a ValueError unless a network fits the latents and the classes of the data."""
    shape = (data["in_channels"], data["input_size"], data["input_size"])
    if net.latent_shape != shape:
        raise ValueError(f"the model takes latents of {net.latent_shape}, those of the data are {shape}")
    if net.num_classes != (expected := data["num_classes"]):
        raise ValueError(f"model.num_classes={net.num_classes} must be data.num_classes={expected}")
