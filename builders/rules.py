"""Rules across groups of a training configuration, and rules of data and evaluation."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from builders.schemas import TrainConfig
from models import TextShape
from runtime.errors import check_choice, check_not_negative, check_positive
from runtime.provenance import flatten
from runtime.targets import walk

if TYPE_CHECKING:
    from builders.experiment import Experiment

EDM_PRECOND, POST_HOC_EMA = "diffusion.EDMPrecond", "training.ema.PostHocEMA"
COUNTS = {"data.num_entries", "data.num_components", "data.num_images", "evaluation.batch_size"}
DRAWN_DATA = ("data.synthetic", "data.mixture")
ROUTES = {"tread": "paper", "sprint": "sprint"}  # routed method -> its published option of model/routes
METHODS = ("dit", *ROUTES)
DECODINGS = ("rounded", "official")
LABELS = ("random", "balanced")  # of samples
MAY_BE_INFINITE = ("sampler.S_max", math.inf)
NUM_SEEDS = 2**32  # different seeds of the CPU's generator
MAX_SYNTHETIC = 2**28  # numbers in random latents: 1 GiB


def check_rules(experiment: "Experiment", num_processes: int) -> None:
    """Check names, seed, sizes, and the rules that cross groups."""
    train, data, name = experiment.train, experiment.data_node, Path(experiment.run_name)
    for key, value in (("run_name", experiment.run_name), ("output_dir", experiment.output_dir)):
        if not value.strip():
            raise ValueError(f"{key}='{value}' must not be empty")
    if name.is_absolute() or ".." in name.parts:
        raise ValueError(f"run_name={name} must be a name below runs/: set output_dir for another folder")
    if not 0 <= experiment.seed < NUM_SEEDS:
        raise ValueError(f"seed={experiment.seed} must not be negative or exceed {NUM_SEEDS - 1}")
    if train.batch_size % ((train.micro_batch_size or 1) * num_processes):
        micro = f"train.micro_batch_size={train.micro_batch_size} times " if train.micro_batch_size else ""
        rule = f"must be a multiple of {micro}the number of processes={num_processes}"
        raise ValueError(f"train.batch_size={train.batch_size} {rule}")
    check_choice("decoding", experiment.decoding, DECODINGS)
    _check_routes(experiment)
    if experiment.ema_node.target == POST_HOC_EMA and not train.milestone_every:
        raise ValueError("ema=post_hoc needs train.milestone_every=STEPS: the milestones are its snapshots")
    _check_kept_tokens(experiment)
    for key, value in flatten(experiment.written).items():
        if key in COUNTS:
            check_positive(key, value)
    check_not_negative("data.seed", data.arguments.get("seed", 0))
    if data.target in DRAWN_DATA:
        _check_drawn(data.arguments)
    if experiment.evaluation is not None:
        _check_evaluation(experiment.evaluation.arguments, train)


def _check_routes(experiment: "Experiment") -> None:
    method, routes = experiment.method, experiment.model_node.written["routes"]
    check_choice("method", method, METHODS)
    if method in ROUTES and not routes:
        rule = f"{method.upper()} training requires you to configure the routes"
        raise ValueError(f"model.routes={routes}: {rule}, e.g. model/routes={ROUTES[method]}")
    if method == "dit" and routes:
        rule = "must be empty for model=dit, the dense twin; use model=tread"
        raise ValueError(f"model.routes={routes} {rule}")


def _check_kept_tokens(experiment: "Experiment") -> None:
    train, router = experiment.train, experiment.model_node.arguments.get("router")
    if train.kept_tokens_only and (router is None or router.target != "routing.random_router"):
        raise ValueError("train.kept_tokens_only=true needs model/router=random: the loss draws its noise")
    if weight := train.reconstruction_weight:
        if not train.kept_tokens_only:
            raise ValueError(f"train.reconstruction_weight={weight} needs train.kept_tokens_only=true")
        # Flow predicts x_in by a velocity of 0, and DDPM's D_x is off by 1 / alpha times the error.
        if experiment.precond_node.target != EDM_PRECOND:
            raise ValueError(f"train.reconstruction_weight={weight} needs diffusion=edm")


def _check_evaluation(evaluation: dict[str, Any], train: TrainConfig) -> None:
    if "labels" in evaluation:
        check_choice("evaluation.labels", evaluation["labels"], LABELS)
    if train.eval_every and train.eval_every % train.save_every:
        rule = f"must be a multiple of train.save_every={train.save_every} if samples are scored"
        raise ValueError(f"train.eval_every={train.eval_every} {rule}")


def check_finite(config: dict[str, Any]) -> None:
    """Raise a ValueError if a number of a configuration is not finite."""
    for key, value in walk(config):
        if isinstance(value, float) and not (math.isfinite(value) or (key, value) == MAY_BE_INFINITE):
            raise ValueError(f"{key}={value} must be a finite number")


def _check_drawn(data: dict[str, Any]) -> None:
    """Raise a ValueError unless random latents of this number and size fit into memory."""
    count, num_held_out = data["num_entries"], data["num_held_out"]
    if count * data["in_channels"] * data["input_size"] ** 2 > MAX_SYNTHETIC:
        raise ValueError(f"data.num_entries={count} must give at most {MAX_SYNTHETIC} numbers in memory")
    if not 0 <= num_held_out < count:
        raise ValueError(f"data.num_held_out={num_held_out} must be in [0, {count - 1}], of data.num_entries")


def check_latents(experiment: "Experiment") -> None:
    """Raise a ValueError unless the network fits the latents and the classes of the data."""
    net, shape, num_classes = experiment.meta_net, experiment.latent_shape, experiment.num_classes
    if net.latent_shape != shape:
        raise ValueError(f"the model takes latents of {net.latent_shape}, but the data have {shape}")
    text = experiment.data_node.arguments.get("text")
    if net.text is not None and (text is None or net.text != TextShape(**text)):
        raise ValueError(f"model.text={asdict(net.text)} must be data.text={text}")
    if net.num_classes != num_classes:
        raise ValueError(f"model.num_classes={net.num_classes} must be data.num_classes={num_classes}")
