"""A run to draw samples from: what `sample.py` and `fid.py` are asked, checked, and completed by what the run
says.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from builders import config as configuration
from builders.network import build_net, build_precond
from builders.rules import DECODINGS, LABELS, NUM_SEEDS, check_guidance
from runtime.config import build_node
from runtime.errors import check_choice, check_positive
from runtime.launch import Launch
from training.checkpoint import damage_of, load_weights, shapes_in, steps_in
from training.run_folder import RunFolder

FIRST_BLOCK = "blocks.0."
MAX_TOKENS = 2**16  # of 4096x4096 pixels, at a factor of 8 and in patches of 2
RECORDED = ("num_samples", "batch_size", "first_seed", "labels", "class_label", "mixed_precision")


@dataclass
class OpenedRun:
    """A run that is ready to be sampled from.

    Args:
        precond: the averaged weights in their preconditioning, in eval mode.
        sampler: as the run and the request say.
        drawing: the arguments of an ImageSource that say what is drawn.
        decoding: the arguments of data.encoder_for that say what decodes it.
        name: tells sets of samples of one run apart.
        weights: the file of the averaged weights.
        data: what the run trained on.
        sizes: the arguments of LatentManifest.check_sizes that the run expects.
        protocol: everything that moves a number, to be kept beside what is made from the samples.
    """

    precond: nn.Module
    sampler: Callable[..., Any]
    drawing: dict[str, Any]
    decoding: dict[str, Any]
    name: str
    weights: Path
    data: dict[str, Any]
    sizes: dict[str, int]
    protocol: dict[str, Any]


def check_run(request: dict[str, Any]) -> None:
    """Check what is asked of a run before any device is touched.

    Args:
        request: `run`, and the keys of SamplingConfig.

    Raises:
        FileNotFoundError: there is no such run, or it has no such checkpoint.
        ValueError: with the key, the value and the rule.
    """
    config, _ = read_run(request["run"])
    _settings(request, config)
    if request["checkpoint"] is None:
        _checkpoints_of(Path(request["run"]))
    else:
        find_checkpoint(Path(request["run"]), request["checkpoint"])


def open_run(request: dict[str, Any], launch: Launch) -> OpenedRun:
    """Load the averaged weights of a run.

    Args:
        request: `run`, and the keys of SamplingConfig.

    Raises:
        FileNotFoundError: there is no such run, or it has no checkpoint yet.
        ValueError: with the key, the value and the rule.
    """
    run = Path(request["run"])
    config, details = read_run(run)
    settings = _settings(request, config)
    # The first process chooses: a run that still trains may save between the looks of two.
    checkpoint = launch.broadcast_from_main(
        partial(find_checkpoint, run, request["checkpoint"], launch.print)
    )
    weights = checkpoint / "ema.safetensors"
    net = load_net(config, weights).to(launch.device).eval()
    drawing = {
        key: settings[key] for key in ("batch_size", "guidance_scale", "first_seed", "labels", "class_label")
    }
    bf16 = settings["mixed_precision"] == "bf16"
    return OpenedRun(
        precond=build_precond(config, net).eval(),
        sampler=build_node(settings, "sampler"),
        drawing={**drawing, "bf16": bf16},
        decoding={
            "encoder": request["encoder"] or config["data"].get("encoder"),
            "allow_other": request["allow_other_encoder"],
            "bf16": bf16,
            "official": settings["decoding"] == "official",
        },
        name=_name(checkpoint, settings),
        weights=weights,
        data=details["data"],
        sizes={key: config["data"][key] for key in ("input_size", "in_channels", "num_classes")},
        protocol={
            **settings,
            "run": str(run),
            "checkpoint": str(checkpoint),
            "ema": config["ema"],
            "data": details["data"],
        },
    )


def read_run(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return configuration and manifest of a run that was started, which may come from anywhere.

    Raises:
        FileNotFoundError: there is none here.
        ValueError: what it says breaks a rule.
    """
    run = RunFolder(path)
    run.check_started()
    config, details = configuration.of_run(run), run.manifest()
    if not isinstance(details.get("data"), dict) or not isinstance(details["data"].get("manifest"), dict):
        raise ValueError(f"{run.manifest_file} does not tell the data (data.manifest)")
    return config, details


def load_net(config: dict[str, Any], weights: Path) -> nn.Module:
    """Build the network of a run with its weights; no memory is taken for more than the weights are.

    Raises:
        ValueError: the weights do not match the model.
    """
    _check_shapes(config, weights)
    net = build_net(config)
    load_weights(net, weights)
    return net


def _check_shapes(config: dict[str, Any], weights: Path) -> None:
    """Hold the sizes that a configuration declares against the shapes in the weights, block by block."""
    model, found = config["model"], shapes_in(weights)
    with torch.device("meta"):
        net = build_net(config | {"model": model | {"depth": 1, "routes": []}})
    if net.num_tokens > MAX_TOKENS:
        raise ValueError(f"model.input_size={model['input_size']} must give at most {MAX_TOKENS} tokens")
    one = net.state_dict()
    block = {name: tensor for name, tensor in one.items() if name.startswith(FIRST_BLOCK)}
    rest = {name: tuple(tensor.shape) for name, tensor in one.items() if name not in block}
    if len(found) != len(rest) + model["depth"] * len(block):
        raise ValueError(f"{weights} holds {len(found)} tensors, not those of model.depth={model['depth']}")
    for i in range(model["depth"]):
        rest |= {
            f"blocks.{i}.{name.removeprefix(FIRST_BLOCK)}": tuple(tensor.shape)
            for name, tensor in block.items()
        }
    for name, shape in rest.items():
        if found.get(name) != shape:
            raise ValueError(f"{weights}: {name} is {found.get(name)}, the model of the run needs {shape}")


def find_checkpoint(run_folder: Path, asked: str | None, show: Callable[[str], None] = print) -> Path:
    """Return the folder of a checkpoint: the newest that is whole, or the one that is asked for by path, name
    or step.

    Args:
        show: is told what is passed over.

    Raises:
        FileNotFoundError: there is none.
        ValueError: none is whole.
    """
    if asked is None:
        return _newest_whole(run_folder, show)
    named = dict(steps_in(run_folder / "checkpoints")).get(int(asked)) if asked.isdigit() else None
    for folder in (named, run_folder / "checkpoints" / asked, Path(asked)):
        if folder and folder.is_dir():
            return folder
    known = ", ".join(str(step) for step, _ in steps_in(run_folder / "checkpoints"))
    raise FileNotFoundError(f"checkpoint={asked} not found: run={run_folder} has steps {known or 'none yet'}")


def _checkpoints_of(run_folder: Path) -> list[tuple[int, Path]]:
    found = steps_in(run_folder / "checkpoints")
    if not found:
        raise FileNotFoundError(f"run={run_folder} has no checkpoint yet")
    return found


def _newest_whole(run_folder: Path, show: Callable[[str], None]) -> Path:
    for _, path in reversed(_checkpoints_of(run_folder)):
        damage = damage_of(path, ["ema.safetensors"])
        if damage is None:
            return path
        show(f"warning: {path} is damaged ({damage}) and passed over; the checkpoint before it is used")
    raise ValueError(f"run={run_folder} has no intact checkpoint to sample from")


def _settings(request: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    for key in ("num_samples", "batch_size"):
        check_positive(key, request[key])
    if not 0 <= request["first_seed"] <= NUM_SEEDS - request["num_samples"]:
        raise ValueError(
            f"first_seed={request['first_seed']} must not be negative, and the last seed less than "
            f"{NUM_SEEDS}"
        )
    check_choice("mixed_precision", request["mixed_precision"], ("no", "bf16"))
    check_choice("labels", request["labels"], LABELS)
    num_classes, label = config["model"]["num_classes"], request["class_label"]
    if label is not None and not 0 <= label < num_classes:
        classes = (
            f"in [0, {num_classes - 1}]"
            if num_classes
            else "null for an unconditional network (num_classes=0)"
        )
        raise ValueError(f"class_label={label} must be {classes}")
    if label is not None and request["labels"] == "balanced":
        raise ValueError(f"class_label={label} is one class: labels=balanced must not be given with it")
    scale = (
        config["guidance"]["guidance_scale"]
        if request["guidance_scale"] is None
        else request["guidance_scale"]
    )
    check_guidance("guidance_scale", scale, num_classes)
    sampler = config["sampler"]
    if request["num_steps"] is not None:
        check_positive("num_steps", request["num_steps"])
        sampler = {**sampler, "num_steps": request["num_steps"]}
    decoding = config["decoding"] if request["decoding"] is None else request["decoding"]
    check_choice("decoding", decoding, DECODINGS)
    settings = {key: request[key] for key in RECORDED}
    settings |= {"guidance_scale": scale, "sampler": sampler, "decoding": decoding}
    return settings if label is None else {**settings, "labels": None}


def _name(checkpoint: Path, settings: dict[str, Any]) -> str:
    parts = [checkpoint.name, f"n{settings['num_samples']}", f"seed{settings['first_seed']}"]
    if settings["class_label"] is not None:
        parts += [f"class{settings['class_label']}"]
    elif settings["labels"] == "balanced":
        parts += ["balanced"]
    parts += [f"guidance{settings['guidance_scale']:g}"] if settings["guidance_scale"] != 1 else []
    parts += [f"{settings['sampler']['num_steps']}steps"]
    parts += ["bf16"] if settings["mixed_precision"] == "bf16" else []
    parts += ["official"] if settings["decoding"] == "official" else []
    return "_".join(parts)
