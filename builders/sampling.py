"""Open a run for sampling, and check the requests of `sample.py` and `fid.py`.

A run opens in three lines:

    run = open_run("runs/NAME")
    denoise = run.guidance(Branch(run.precond, class_labels))
    latents = run.sampler(denoise, noise, run.precond.path)
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from builders.drawing import DrawOptions, ImageModel
from builders.experiment import Experiment, as_node
from builders.public import read_weights_file
from builders.rules import DECODINGS, LABELS, NUM_SEEDS
from builders.schemas import PRECISIONS, SWITCH
from data import LatentManifest, Words, encoder_for, image_decoder, manifest_from, text_encoder_for
from data.manifest import MAX_PROMPTS
from diffusion import Guidance, Precond
from models import Backbone
from runtime.errors import as_value_error, check_choice, check_positive
from runtime.files import sha256
from runtime.launch import ALONE, Launch
from runtime.nodes import read_nodes
from training.checkpoint import find_checkpoint
from training.ema import reconstruct
from training.run_folder import RunFolder
from training.weights import find_mismatch, load_weights, read_weights

MAX_SLUG = 60  # letters of a prompt in the name of a file
MAX_TOKENS = 2**16  # 4096x4096 pixels with an autoencoder of factor 8 and patches of 2
GROUPS = ("sampler", "guidance")
STD = re.compile(r"std(0?\.\d+)")  # a checkpoint of ema=post_hoc
SETTINGS = (*(option.name for option in fields(DrawOptions)), "decoding", *GROUPS)  # keys that change samples
NAMED = {"num_steps": None, "guidance_scale": None}  # keys with a separate part in the name of a file


@dataclass
class SamplingConfig:
    """The samples to draw. None: the run's value."""

    run: str | None = None
    checkpoint: str | None = None  # a step, a name or a path; None: the newest; without run: a file
    objective: str | None = None  # for a file of other code: edm, flow, sit or ddpm
    latents: str | None = None  # for a file of other code: a latent folder; None: sd-vae-ft-ema
    num_samples: int | None = None
    batch_size: int | None = None  # number of images per part; None: chosen by memory
    first_seed: int = 0
    labels: str = "random"  # random (from the seeds) or balanced (the classes in turn)
    class_label: int | None = None  # draw only this class
    prompt: str | None = None  # draw only this prompt, from a network with captions
    prompts: str | None = None  # a file with a prompt in each line, in turn; None: captions of the data
    text_encoder: str | None = None  # its folder or name; None: as in the manifest of the latents
    guidance_scale: float | None = None
    num_steps: int | None = None
    sampler: dict[str, Any] = field(default_factory=dict)  # chosen as sampler=OPTION
    guidance: dict[str, Any] = field(default_factory=dict)
    mixed_precision: str = "auto"  # precision of the network: auto (bf16 if it is faster), no or bf16
    compile: str = "auto"  # compile blocks: auto (if it saves time), true or false
    decoding: str | None = None  # rounded or official
    encoder: str | None = None  # name or folder of the autoencoder; None: as in the manifest of the latents
    allow_other_encoder: bool = False

    @property
    def name(self) -> str:
        """The run or the file of weights, for messages."""
        return f"run={self.run}" if self.run else f"checkpoint={self.checkpoint}"

    @property
    def folder(self) -> Path:
        """The default folder of results: the run, or a folder next to the file of weights."""
        return Path(self.run or f"{self.checkpoint}.drawn")


T = TypeVar("T", bound=SamplingConfig)


@dataclass
class SampleConfig(SamplingConfig):
    """The keys of `sample.py`."""

    num_samples: int | None = 100
    out: str | None = None  # None: inside the run
    grid_columns: int = 10
    overwrite: bool = False


@dataclass(frozen=True)
class OpenedRun:
    """A run or a file of weights, ready for sampling; `precond` is in eval mode."""

    path: Path
    experiment: Experiment
    weights: Path  # the file of the averaged weights
    entry: str | None  # entry of that file; None: its top level
    precond: Precond
    sampler: Callable[..., torch.Tensor]
    guidance: Guidance
    weak: dict[Path, Experiment]  # weights of the weak networks of guidance -> their experiments


def open_run(
    path: str | Path, checkpoint: str | None = None, *, guided: bool = True, launch: Launch = ALONE
) -> OpenedRun:
    """Load the averaged weights of a run.

    Args:
        checkpoint: a step, a name or a path; None: the newest.
        guided: False: open the network without the run's guidance.
    """
    experiment = read_run(path)
    if not guided:
        experiment = replace(experiment, guidance_node=read_nodes({"_target_": "diffusion.CFG"}, "guidance"))
    return open_weights(Path(path), experiment, _weights_of(Path(path), checkpoint, launch), launch)


def _weights_of(run: Path, checkpoint: str | None, launch: Launch) -> Path:
    find = partial(find_checkpoint, run, checkpoint)
    if match := STD.fullmatch(checkpoint or ""):
        find = partial(reconstruct, run, float(match[1]))
    # The first rank chooses: a run that still trains may save a new checkpoint at any time.
    return launch.broadcast_from_main(find) / "ema.safetensors"


def open_weights(path: Path, experiment: Experiment, weights: Path, launch: Launch) -> OpenedRun:
    """Load a file of weights into the network of an experiment."""
    net, entry = load_net(experiment, weights)
    precond, weak = experiment.precond(net.to(launch.device)).eval(), {}

    def open_weak(run: str, checkpoint: str | None) -> Precond:
        opened = open_run(run, checkpoint, guided=False, launch=launch)
        if _captions(opened.experiment) != _captions(experiment):
            raise ValueError(f"guidance.weak_run={run} must encode captions as the sampled network does")
        weak[opened.weights] = opened.experiment
        return opened.precond

    guidance, sampler = experiment.guidance(open_weak), experiment.sampler()
    return OpenedRun(path, experiment, weights, entry, precond, sampler, guidance, weak)


def _captions(experiment: Experiment) -> dict[str, Any]:
    """Return the encoder of a run's captions and its vocabulary or sizes."""
    text = experiment.details.get("data", {}).get("manifest", {}).get("text") or {}
    return {key: value for key, value in text.items() if key not in ("prompts", "num_captions")}


def read_request(request: T) -> tuple[T, Experiment]:
    """Check a request for samples, before any device is touched.

    Returns:
        The request, completed by its run or file, and the experiment with the requested sampler and guidance.
    """
    experiment = read_source(request)
    completed = complete(request, experiment)
    check_prompts(request, experiment)
    try:
        nodes = {f"{key}_node": as_node(read_nodes(getattr(completed, key), key), key) for key in GROUPS}
        experiment = replace(experiment, **nodes)
        experiment.check_sampling()
    except ValueError as error:
        if all(getattr(request, key) in (None, {}) for key in (*GROUPS, *NAMED)):
            where = f"{request.run}/config.yaml" if request.run else request.name
            raise ValueError(f"{where}: {error}") from error
        # Messages have the names of these two keys on the command line.
        message = re.sub(r"^(sampler|guidance)\.(?=num_steps|guidance_scale)", "", str(error))
        raise ValueError(message) from error
    if request.run is not None and not STD.fullmatch(request.checkpoint or ""):
        find_checkpoint(Path(request.run), request.checkpoint)
    return completed, experiment


def open_model(
    request: SamplingConfig, experiment: Experiment, launch: Launch
) -> tuple[ImageModel, str, dict[str, Any]]:
    """Open the model that draws the requested images; return it with a name and a record for them."""
    path = weights = Path(request.run or str(request.checkpoint))
    if request.run is not None:
        weights = _weights_of(path, request.checkpoint, launch)
    run = open_weights(path, experiment, weights, launch)
    manifest = manifest_of(request, experiment)
    if request.class_label in manifest.untrained_classes:
        raise ValueError(f"class_label={request.class_label} has no images in the training data")
    entry = run.entry or run.weights.name
    if request.run is None:
        launch.print(f"weights {run.weights} ({entry})")
    data = experiment.data_node.arguments
    sizes = {key: data[key] for key in ("input_size", "in_channels", "num_classes")}
    manifest.check_sizes(request.latents or str(run.path), sizes, data.get("text"))
    official = request.decoding == "official"
    options = {"allow_other": request.allow_other_encoder, "official": official}
    encoder = encoder_for(manifest, launch.device, request.encoder or data.get("encoder"), **options)
    decode = image_decoder(manifest, encoder, official)
    condition: tuple[Any, ...] = (manifest.trained_classes, manifest.class_names)
    if experiment.takes_text:
        condition = text_condition(manifest, launch.device, prompts_of(request), request.text_encoder)
    parts = (run.precond, run.sampler, run.guidance, decode, launch.device, *condition)
    sources = (experiment, *run.weak.values())  # weights do not determine their networks
    networks = [{key: source.written[key] for key in ("model", "diffusion")} for source in sources]
    record = {
        **{key: getattr(request, key) for key in SETTINGS},
        "labels": request.labels if request.class_label is None else None,
        "prompt": request.prompt,
        "prompts": request.prompts and {"file": request.prompts, "sha256": sha256(Path(request.prompts))},
        "run": request.run,
        "checkpoint": str(run.weights.parent if request.run else run.weights),
        "objective": request.objective,
        "ema": experiment.ema_node.written,
        "networks": networks,
        "data": experiment.details["data"],
        "encoder": {"name": encoder.name, "weights_hash": encoder.weights_hash},
        "weights_entry": entry,
        "weights_sha256": sha256(run.weights),  # now, because a run that still trains removes old checkpoints
        "weak_weights": {str(file): sha256(file) for file in run.weak},
    }
    return ImageModel(*parts), _name(run, request), record


def read_source(request: SamplingConfig) -> Experiment:
    """Read the experiment of the requested run or file of weights."""
    if request.run is not None:
        for key in ("objective", "latents"):
            if (value := getattr(request, key)) is not None:
                raise ValueError(f"{key}={value} must not be given with run: the run has it")
        return read_run(request.run)
    if request.checkpoint is None:
        raise ValueError("run=FOLDER or checkpoint=FILE must be given")
    file = Path(request.checkpoint)
    experiment = read_weights_file(file, request.objective, request.latents)
    check_shapes(experiment, file)
    return experiment


def read_run(path: str | Path) -> Experiment:
    """Read the experiment and the manifest of a run from an untrusted folder."""
    run = RunFolder(path)
    experiment, details = Experiment.of_run(run), run.manifest()
    if not isinstance(details.get("data"), dict) or not isinstance(details["data"].get("manifest"), dict):
        raise ValueError(f"{run.manifest_file} has no manifest of the data (data.manifest)")
    return replace(experiment, details=details)


def load_net(experiment: Experiment, weights: Path) -> tuple[Backbone, str | None]:
    """Build a network with its weights; return it with the entry of the weights in the file."""
    check_shapes(experiment, weights)
    net = experiment.net()
    return net, load_weights(net, weights)["entry"]


def check_shapes(experiment: Experiment, file: Path) -> None:
    """Compare the network of an experiment with the shapes of its weights, before it takes memory."""
    weights = read_weights(file, shapes_only=True)
    depth = experiment.model_node.arguments.get("depth", 1)
    if depth > len(weights.tensors):
        raise ValueError(f"{file} holds {len(weights.tensors)} tensors, fewer than model.depth={depth} needs")
    with as_value_error(file):  # an invalid network is a fault of the file
        net = experiment.meta_net
    if net.num_tokens > MAX_TOKENS:
        given = f"{net.num_tokens} tokens of latents {net.latent_shape}"
        raise ValueError(f"{file}: {given}, must be at most {MAX_TOKENS}")
    if mismatch := find_mismatch(net, weights):
        raise ValueError(f"{file}: weights do not match the model: {mismatch}")


def complete(request: T, experiment: Experiment) -> T:
    """Check a request, and complete it with the configuration of its run."""
    if (num_samples := request.num_samples) is None:
        raise ValueError("num_samples=null must be a number")
    check_positive("num_samples", num_samples)
    check_positive("batch_size", request.batch_size)
    if request.first_seed < 0 or request.first_seed + num_samples > NUM_SEEDS:
        rule = f"must not be negative, and the last seed less than {NUM_SEEDS}"
        raise ValueError(f"first_seed={request.first_seed} {rule}")
    precision, compiled = request.mixed_precision.lower(), request.compile.lower()  # a YAML `true` is "True"
    check_choice("mixed_precision", precision, PRECISIONS)
    check_choice("compile", compiled, SWITCH)
    check_choice("labels", request.labels, LABELS)
    num_classes, label = experiment.num_classes, request.class_label
    if label is not None and request.labels == "balanced":
        raise ValueError(f"class_label={label} is one class: labels=balanced must not be given with it")
    if label is not None and experiment.takes_text:
        raise ValueError(f"class_label={label} must be null: the network takes captions, give prompt=TEXT")
    if label is not None and not 0 <= label < num_classes:
        unconditional = "null for an unconditional network (num_classes=0)"
        allowed = f"in [0, {num_classes - 1}]" if num_classes else unconditional
        raise ValueError(f"class_label={label} must be {allowed}")
    decoding = experiment.decoding if request.decoding is None else request.decoding
    check_choice("decoding", decoding, DECODINGS)
    groups = {group: getattr(request, group) or experiment.written[group] for group in GROUPS}
    for group, key in (("sampler", "num_steps"), ("guidance", "guidance_scale")):
        if (value := getattr(request, key)) is not None:
            groups[group] = {**groups[group], key: value}
    times = groups["sampler"].get("times")
    if isinstance(times, dict) and times.get("shift", 1) is None:  # this sampler was composed without the run
        shift = experiment.written["diffusion"]["loss"].get("shift")
        groups["sampler"] = {**groups["sampler"], "times": {**times, "shift": shift}}
    if (weak := groups["guidance"]).get("weak_checkpoint") is not None and weak["weak_run"] is None:
        groups["guidance"] = {**weak, "weak_run": request.run}
    values = {"mixed_precision": precision, "compile": compiled, "decoding": decoding, **groups}
    if request.prompt is not None or request.prompts is not None:
        values["labels"] = "balanced"
    return replace(request, **values)


def prompts_of(request: SamplingConfig) -> list[str] | None:
    """Return the requested prompts; None: the request has none."""
    if request.prompt is not None:
        return [request.prompt]
    if request.prompts is None:
        return None
    with as_value_error(f"prompts={request.prompts} cannot be read", OSError, UnicodeDecodeError):
        text = Path(request.prompts).read_text("utf-8-sig")
    if not (lines := [line.strip() for line in text.splitlines() if line.strip()]):
        raise ValueError(f"prompts={request.prompts} has no prompts")
    return lines


def check_prompts(request: SamplingConfig, experiment: Experiment) -> None:
    """Check the keys of prompts; word by word, if the data have a vocabulary."""
    keys = [key for key in ("prompt", "prompts", "text_encoder") if getattr(request, key) is not None]
    if keys and not experiment.takes_text:
        value = getattr(request, keys[0])
        raise ValueError(f"{keys[0]}={value} does not apply: the network takes no captions")
    if keys[:2] == ["prompt", "prompts"]:
        raise ValueError("prompt and prompts must not be given together")
    if prompts := prompts_of(request):
        text = manifest_of(request, experiment).text or {}
        if "words" in text:
            Words(text["words"], text["num_tokens"])(prompts)


def manifest_of(request: SamplingConfig, experiment: Experiment) -> LatentManifest:
    """Return the manifest of the data of the requested run or file."""
    where = f"{request.run}/manifest.json" if request.run else request.name
    return manifest_from(experiment.details["data"]["manifest"], f"{where}: data.manifest")


def text_condition(
    manifest: LatentManifest,
    device: torch.device,
    prompts: Sequence[str] | None = None,
    text_encoder: str | None = None,
) -> tuple[np.ndarray, None, Callable[[np.ndarray], torch.Tensor]]:
    """Return the arguments `classes`, `class_names` and `encode_labels` of `ImageModel` for captions.

    Args:
        prompts: None: the manifest's, which are held-out captions.
    """
    text = manifest.text or {}
    encoder, texts = text_encoder_for(text, device, text_encoder), [*(prompts or text["prompts"])]
    if len(texts) > MAX_PROMPTS:  # too many embeddings to keep
        return np.array(texts), None, lambda chosen: torch.from_numpy(encoder(chosen.tolist()))
    # A language model is not needed again.
    rows, embedded = {text: i for i, text in enumerate(texts)}, torch.from_numpy(encoder(texts))
    return np.array(texts), None, lambda chosen: embedded[[rows[text] for text in chosen.tolist()]]


def _name(run: OpenedRun, request: SamplingConfig) -> str:
    name = run.path.stem if run.path == run.weights else run.weights.parent.name
    objective = [request.objective] if request.objective else []
    parts = [name, *objective, f"n{request.num_samples}", f"seed{request.first_seed}"]
    if request.class_label is not None:
        parts += [f"class{request.class_label}"]
    elif prompts := prompts_of(request):
        digest = hashlib.sha256(str(prompts).encode()).hexdigest()[:8]
        parts += [f"{re.sub(r'[^0-9A-Za-z]+', '-', prompts[0])[:MAX_SLUG]}-{digest}"]
    elif request.labels == "balanced":
        parts += ["balanced"]
    scale = request.guidance.get("guidance_scale", 1)
    parts += ["guidance" + str(scale).removesuffix(".0")] if scale != 1 else []
    parts += [f"{request.sampler['num_steps']}steps"] if "num_steps" in request.sampler else []
    for group in GROUPS:
        node, run_node = {**getattr(request, group), **NAMED}, {**run.experiment.written[group], **NAMED}
        if node != run_node:
            digest = hashlib.sha256(json.dumps(node, sort_keys=True).encode()).hexdigest()[:8]
            parts += [f"{node['_target_'].rpartition('.')[2]}-{digest}"]
    parts += {"auto": [], "no": ["fp32"], "bf16": ["bf16"]}[request.mixed_precision]
    parts += ["official"] if request.decoding == "official" else []
    return "_".join(parts)
