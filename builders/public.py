"""Networks in files of weights: of DiT, SiT, REPA, LightningDiT, SPRINT, TREAD, and of `builders.export`.

The names and shapes in a file of public code determine the architecture, but not the objective: files of DiT,
SiT and TREAD look the same. A file of `builders.export` contains its configuration.
"""

from dataclasses import asdict, replace
from math import isqrt
from pathlib import Path
from typing import Any

from builders.experiment import Experiment
from builders.schemas import OBJECTIVES, OBJECTIVES_OF_OTHERS
from data import LatentManifest
from data.manifest import read_manifest
from runtime.errors import check_choice
from runtime.files import parse_json
from runtime.nodes import Node
from training.run_folder import RunFolder
from training.weights import LABEL_TABLE, Weights, is_own_checkpoint, metadata_in, read_weights

# Number of heads by published width of DiT and LightningDiT: shapes do not contain it.
NUM_HEADS = {384: 6, 768: 12, 1024: 16, 1152: 16, 1536: 24, 1792: 28}
MIN_ROUTED_DEPTH = 6  # model/routes=paper has the window of blocks 2 to depth - 4
ENCODER, SCALE, CHANNELS = "stabilityai/sd-vae-ft-ema", 0.18215, 4
SIDE = 32  # default side of the latents of a network without a position table
CONFIG, MANIFEST = "tread.config", "tread.manifest"  # names in the header of an exported file


def read_weights_file(file: Path, objective: str | None, latents: str | None = None) -> Experiment:
    """Read the experiment of a file of weights, with a manifest of its data.

    Args:
        objective: edm, flow, sit (flow with the time from noise to data) or ddpm; None: the file is from
            `builders.export`.
        latents: a latent folder; its manifest describes the scale and the decoder of the latents, and their
            size if the file does not contain it (SPRINT). None: latents of sd-vae-ft-ema, of 256x256 images.
    """
    if not file.is_file():
        raise FileNotFoundError(f"checkpoint={file} is not a file: give a file of weights, or run=FOLDER")
    if is_own_checkpoint(file):
        run, step = file.parents[2], file.parent.name
        raise ValueError(f"checkpoint={file} belongs to a run: give run={run} checkpoint={step}")
    if carries_configuration(file):
        header = metadata_in(file)
        for key, value in (("objective", objective), ("latents", latents)):
            if value is not None:
                raise ValueError(f"{key}={value} must not be given: {file} contains its configuration")
        if MANIFEST not in header:
            raise ValueError(f"{file} has no manifest of its latents ({MANIFEST}) in its header")
        written, manifest = (parse_json(header[name].encode()) for name in (CONFIG, MANIFEST))
        return _with_manifest(Experiment.of_written(written, str(file)), manifest)
    if objective is None:
        raise ValueError(f"objective must be given, {file} does not contain it: {OBJECTIVES_OF_OTHERS}")
    check_choice("objective", objective, tuple(OBJECTIVES))
    weights = read_weights(file, shapes_only=True)
    described = None if latents is None else read_manifest(latents)
    sizes = sizes_of(weights, SIDE if described is None else described.shape[1])
    sizes |= classes_of(weights, None if described is None else described.num_classes)
    keys = [f"{key}={value}".lower() for key, value in sizes.items()]
    # A network of TREAD may have been trained with routes, which sparse guidance needs.
    may_route = objective in ("edm", "flow") or sizes["model/block"] == "lightning"
    model = "tread" if may_route and sizes["model.depth"] >= MIN_ROUTED_DEPTH else "dit"
    model = "sprint" if sizes["model/block"] == "sprint" else model
    experiment = Experiment.compose([f"model={model}", "data=synthetic", *OBJECTIVES[objective], *keys])
    # The network may have been trained on classes that have no latents in this folder.
    if described is not None:
        return _with_manifest(experiment, asdict(replace(described, untrained_classes=())))
    if (in_channels := sizes["data.in_channels"]) != CHANNELS:
        rule = f"which {ENCODER} does not make: give latents=FOLDER, whose manifest has their scale"
        raise ValueError(f"{file} takes latents of {in_channels} channels, {rule}")
    numbers = (1, experiment.latent_shape, "float32", "samples", experiment.num_classes)
    return _with_manifest(experiment, asdict(LatentManifest(*numbers, ENCODER, scale=SCALE, std=1.0)))


def _with_manifest(experiment: Experiment, manifest: Any) -> Experiment:
    return replace(experiment, details={"data": {"manifest": manifest}})


def carries_configuration(file: Path) -> bool:
    """True if a file is from `builders.export`."""
    return CONFIG in metadata_in(file)


def precond_of(file: Path, objective: str | None) -> Node:
    """Return the preconditioning of a file's network; its run's if no objective is given."""
    if objective is None:
        return _own_experiment(file).precond_node
    return Experiment.compose(["data=synthetic", *OBJECTIVES[objective]]).precond_node


def num_heads_of(weights: Weights, objective: str | None) -> int | None:
    """Return the number of attention heads, from the run or the published width; None if unknown."""
    if objective is None:
        return _own_experiment(weights.file).model_node.arguments.get("num_heads")
    embedding = weights.tensors.get("x_embedder.proj.weight")
    return None if embedding is None else NUM_HEADS.get(embedding.shape[0])


def _own_experiment(file: Path) -> Experiment:
    if carries_configuration(file):
        return read_weights_file(file, None)
    return Experiment.of_run(RunFolder(file.parents[2]))


def sizes_of(weights: Weights, side: int) -> dict[str, Any]:
    """Return the keys of a configuration that the shapes of a DiT determine.

    Args:
        side: side of the latents for SPRINT, whose networks have no position table.

    Raises:
        ValueError: the shapes do not belong to a DiT of a published width.
    """
    file, shapes = weights.file, {name: tuple(tensor.shape) for name, tensor in weights.tensors.items()}
    is_sprint = "rejoins.0.mask_token" in shapes  # as renamed by `training.sprint`
    try:
        hidden_size, in_channels, patch_size, _ = shapes["x_embedder.proj.weight"]
        num_outputs = shapes["final_layer.linear.weight"][0]
        side = side if is_sprint else isqrt(shapes["pos_embed"][1]) * patch_size
        depth = 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("blocks."))
    except (KeyError, ValueError, IndexError) as error:
        raise ValueError(f"{file} does not have the names and shapes of a DiT ({error})") from error
    if hidden_size not in NUM_HEADS:
        known = ", ".join(map(str, NUM_HEADS))
        raise ValueError(f"{file}: hidden_size={hidden_size} must be a published width, {known}")
    return {
        "model.hidden_size": hidden_size,
        "model.num_heads": NUM_HEADS[hidden_size],
        "model.patch_size": patch_size,
        "model.depth": depth,
        "model/block": "sprint" if is_sprint else "lightning" if "blocks.0.norm1.weight" in shapes else "dit",
        "model.learn_sigma": num_outputs == 2 * in_channels * patch_size**2,
        "data.in_channels": in_channels,
        "data.input_size": side,
    }


def classes_of(weights: Weights, num_described: int | None) -> dict[str, Any]:
    """Return the keys that a table of labels determines. In public code it has a row for the null class only
    if that class was trained.

    Args:
        num_described: number of classes in the manifest of the latents; None: unknown.

    Raises:
        ValueError: the number of rows does not fit the classes, or does not tell if there is a null class.
    """
    table = weights.tensors.get(LABEL_TABLE)
    if table is None:  # unconditional, even if the file has a number of classes
        return {"data.num_classes": 0}
    num_rows = table.shape[0]
    declared = num_described if weights.num_classes is None else weights.num_classes
    if declared is None and num_rows % 10 == 0:
        classes = f"{num_rows} classes, or {num_rows - 1} and the null class"
        rule = "give latents=FOLDER, whose manifest has num_classes"
        raise ValueError(f"{weights.file}: {num_rows} rows of labels are {classes}: {rule}")
    num_classes = num_rows - 1 if declared is None else declared
    if num_rows - num_classes not in (0, 1):
        source = "the manifest of latents" if weights.num_classes is None else "the file"
        rule = f"must be num_classes={num_classes}, from {source}, or one more for the null class"
        raise ValueError(f"{weights.file}: {num_rows} rows of labels {rule}")
    dropout = {} if num_rows > num_classes else {"model.class_dropout_prob": 0.0}
    return {"data.num_classes": num_classes, **dropout}
