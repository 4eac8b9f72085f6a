"""The Experiment: a checked, typed configuration of a training that builds its parts."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property, partial
from math import isqrt
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from builders.config import SCHEDULE_KEYS, register, resolve_nodes
from builders.kept_tokens import KeptTokensLoss
from builders.rules import check_latents, check_rules
from builders.schemas import Config, RoutingConfig, TrainConfig, check_train
from data import LatentDataset, mask_coverage
from diffusion import Guidance, Loss, Precond
from models import Backbone, TextShape, token_mask
from routing import Route, RoutePlan
from runtime.command_line import one_line
from runtime.config import compose_config
from runtime.errors import as_value_error, check_index, check_not_negative
from runtime.launch import ALONE, Launch
from runtime.machine import processes_here
from runtime.nodes import Node, check_arguments, config_folders
from runtime.provenance import flatten, source_sha256
from runtime.targets import check_apart
from training.alignment import Alignment
from training.checkpoint import find_checkpoint
from training.ema import EMA, networks_of
from training.optimizer import Optimizer
from training.run_folder import RunFolder

SCALARS = ("method", "run_name", "output_dir", "wait", "seed", "sweep_metric", "decoding")
GROUPS = ("data", "optimizer", "ema", "sampler", "guidance")
OPTIONAL = ("alignment", "evaluation", "tracker")
PARTS = ("block", "router", "rejoin")  # optional groups of a model


@dataclass(frozen=True, eq=False)
class Experiment:
    """A checked configuration of a training. Its methods build the parts.

    Args:
        written: the configuration as plain types, as in config.yaml.
        alignment_node: None: no alignment.
        evaluation: None: samples are not scored during training.
        details: the manifest of the run that it was read from; empty without a run.
    """

    written: dict[str, Any]
    method: str
    run_name: str
    output_dir: str
    wait: bool
    seed: int
    sweep_metric: str | None
    decoding: str
    train: TrainConfig
    routing: RoutingConfig
    data_node: Node
    model_node: Node
    precond_node: Node
    loss_node: Node
    optimizer_node: Node
    ema_node: Node
    sampler_node: Node
    guidance_node: Node
    alignment_node: Node | None
    evaluation: Node | None
    tracker: Node | None
    details: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_config(cls, cfg: DictConfig, num_processes: int = 1) -> "Experiment":
        """Check a composed configuration, before anything is built."""
        written, nodes = resolve_nodes(cfg)
        train = TrainConfig(**written["train"])
        check_train(train)
        written["train"] = asdict(train)  # options in lower case
        values: dict[str, Any] = {key: written[key] for key in SCALARS}
        values |= {f"{key}_node": as_node(nodes[key], key) for key in GROUPS}
        optional = {key: as_node(nodes[key], key) if nodes[key] else None for key in OPTIONAL}
        values |= {"alignment_node": optional.pop("alignment"), **optional}
        for part in ("precond", "loss"):
            values[f"{part}_node"] = as_node(nodes["diffusion"].get(part), f"diffusion.{part}")
        if (text := written["data"].get("text")) is not None:
            check_text_shape("data.text", text)
        routing, model = RoutingConfig(**written["routing"]), _model_node(nodes["model"])
        experiment = cls(written, train=train, routing=routing, model_node=model, **values)
        check_rules(experiment, num_processes)
        return experiment

    @classmethod
    def compose(cls, overrides: Sequence[str]) -> "Experiment":
        """Compose the experiment of `train.py` with overrides."""
        register("train", Config)
        return cls.of_config(compose_config(["run_name=none", *overrides]))

    @classmethod
    def of_run(cls, run: RunFolder) -> "Experiment":
        """Read the experiment of a run from an untrusted folder, checked like a command line."""
        run.check_started()
        check_apart(run.path, config_folders())
        return cls.of_written(run.config(), run.config_file)

    @classmethod
    def of_written(cls, written: Any, file: str | Path) -> "Experiment":
        """Read an experiment from an untrusted configuration, checked like a command line."""
        try:
            if "${" in str(written):
                raise ValueError("it has interpolations, but runs write plain values")
            experiment = cls.of_config(DictConfig(OmegaConf.merge(OmegaConf.structured(Config), written)))
            if missing := flatten(experiment.written).keys() - flatten(written).keys():
                raise ValueError(f"{min(missing)} is missing: another version of this code wrote it")
        except (ValueError, OverflowError, OmegaConfBaseException) as error:  # overflow: int to float
            full_key = error.full_key if isinstance(error, OmegaConfBaseException) else None
            key = f"{one_line(full_key)}: " if full_key else ""
            raise ValueError(f"{file}: {key}{one_line(str(error))}") from error
        return experiment

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of the latents of the data."""
        data = self.data_node.arguments
        return data["in_channels"], data["input_size"], data["input_size"]

    @property
    def num_classes(self) -> int:
        return self.data_node.arguments["num_classes"]

    @property
    def takes_text(self) -> bool:
        """True if the network takes captions instead of classes."""
        return self.meta_net.text is not None

    @property
    def routes(self) -> tuple[Route, ...]:
        return tuple(self.model_node.arguments["routes"])

    @property
    def meta_net(self) -> Backbone:
        """The network on the meta device, for its shapes and rules."""
        return self.model_node.on_meta

    @cached_property
    def num_averages(self) -> int:
        """The number of averages of the weights."""
        return len(networks_of(self.ema(self.meta_net)))

    def with_model(self, changes: dict[str, Any]) -> "Experiment":
        """Return the experiment with other arguments of the network; `written` is unchanged."""
        return replace(self, model_node=_model_node(self.model_node.changed(changes)))

    def net(self, device: torch.device | None = None) -> Backbone:
        """Build the network and draw its weights on a device, by default torch's."""
        with nullcontext() if device is None else device:
            return self.model_node.bind()()

    def precond(self, net: nn.Module) -> Precond:
        return self.precond_node.bind()(net)

    def loss(self, net: Backbone) -> Loss | KeptTokensLoss:
        loss = self.loss_node.bind()()
        if not self.train.kept_tokens_only:
            return loss
        return KeptTokensLoss(loss, net, self.train.reconstruction_weight)

    def alignment(self) -> Alignment | None:
        """Build the alignment, without its projector; None: there is none."""
        alignment = self.alignment_node and self.alignment_node.bind()()
        if alignment is not None:
            check_index("alignment.block", alignment.block, len(self.meta_net.blocks))
        return alignment

    def route_plan(self, net: Backbone) -> RoutePlan:
        """Build the schedule of the routes' ratios."""
        return RoutePlan(net.routes, net.num_tokens, self.train.total_steps, **asdict(self.routing))

    def optimizer(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        """Build the optimizer of a network's parameters."""
        written = self.optimizer_node.written
        options = {key: written[key] for key in SCHEDULE_KEYS if key in written}
        options = check_arguments("optimizer", Optimizer, options)
        for key in ("lr", "weight_decay"):
            check_not_negative(f"optimizer.{key}", written.get(key, 0))
        with as_value_error("optimizer", ValueError, TypeError, IndexError):  # torch does not name the key
            optimizers = self.optimizer_node.bind()(named_parameters)
        return Optimizer(optimizers, **options)

    def ema(self, net: nn.Module) -> EMA:
        return self.ema_node.bind()(net)

    def sampler(self) -> Callable[..., torch.Tensor]:
        """Bind the sampler: sampler(denoise, noise, path, randn_like=) -> latents."""
        return self.sampler_node.bind()

    def guidance(self, open_precond: Callable[[str, str | None], Precond]) -> Guidance:
        """Build the guidance; open_precond(run, checkpoint) opens a weak network."""
        guidance = self.guidance_node.bind()()
        guidance.load(open_precond)
        return guidance

    def data(self, launch: Launch = ALONE) -> LatentDataset:
        """Open the data, first on the main rank; check that all ranks have the same data and code."""
        with launch.main_first():
            dataset = self.data_node.bind()()
        if self.train.masked_loss and not dataset.manifest.conditioning_type:
            rule = "conditioning_type of the latent manifest must be mask or segmentation (data/README.md)"
            raise ValueError(f"train.masked_loss=true needs masks: {rule}")
        # Gradients of ranks with different data or code must not be averaged.
        data = {"fingerprint of the data": dataset.describe()["fingerprint"]}
        data |= {"code (sha256)": source_sha256(), "torch": torch.__version__}
        if self.train.parallel == "hsdp":
            data["the variable LOCAL_WORLD_SIZE"] = processes_here()
        launch.assert_ranks_agree({**flatten(self.written), **data})
        return dataset

    def token_mask(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """Return a function from masks (N, H, W) to the tokens (N, T) that they touch; None without masks."""
        patch_size = self.latent_shape[1] // isqrt(self.meta_net.num_tokens)
        return partial(token_mask, patch_size=patch_size) if self.train.masked_loss else None

    def mask_coverage(self, dataset: LatentDataset) -> float:
        """Return the fraction of tokens that masks force to stay, if windows grow for them; otherwise 0."""
        masks_to_tokens = self.token_mask()
        if masks_to_tokens is None or self.routing.force_keep_overflow != "grow":
            return 0.0
        return mask_coverage(dataset, masks_to_tokens, self.train.batch_size)

    def check(self) -> "Experiment":
        """Build every part, so that it checks its keys; the network is on the meta device."""
        net = self.meta_net
        check_latents(self)
        if net.routes and "router" in self.model_node.arguments:
            self.check_router(net.num_tokens)
        self.route_plan(net)
        self.loss(net)
        self.alignment()
        self.optimizer(net.named_parameters())
        self.ema(net)
        self.check_sampling()
        return self

    def check_router(self, num_tokens: int) -> None:
        """Check that the router returns the positions of two tokens, for a sample of zeros."""
        arguments = self.model_node.arguments
        router, x = arguments["router"].bind(), torch.zeros(1, num_tokens, arguments.get("hidden_size", 1))
        # Errors of a user's router.
        with as_value_error("model.router", TypeError, RuntimeError, IndexError, AttributeError, KeyError):
            shape = tuple(router(x, 2, force_keep=None, noise=None, generator=None).shape)
        if shape != (1, 2):
            raise ValueError(f"model.router must return positions (N, K), here (1, 2): it returned {shape}")

    def check_sampling(self) -> None:
        """Call sampler and guidance on one number, so that they check their keys."""
        if "times" in self.sampler_node.arguments:
            as_node(self.sampler_node.arguments["times"], "sampler.times")
        net, precond = self.meta_net, self.precond(self.meta_net)
        self.guidance(_without_weights).check(precond)

        @cache
        def check_variance() -> None:
            latents, t = torch.zeros(1, *net.latent_shape, device="meta"), torch.tensor(precond.path.t_max)
            precond.learned_variance(precond.predict(latents, t, net.null_labels(1))[0], latents)

        def denoise(x: torch.Tensor, t: torch.Tensor, *, with_variance: bool = False) -> Any:
            if with_variance:
                check_variance()
            return (x, x) if with_variance else x

        self.sampler()(denoise, torch.zeros(1, 1, 1, 1), precond.path, randn_like=torch.zeros_like)


def check_routes(key: str, routes: Any) -> list[dict[str, Any]]:
    """Check the names and types of each route's arguments."""
    if not isinstance(routes, list) or not all(isinstance(fields, dict) for fields in routes):
        raise ValueError(f"{key}={routes} must be a list of routes, each {{KEY: VALUE, ...}}; [] for none")
    return [check_arguments(f"{key}.{i}", Route, fields) for i, fields in enumerate(routes)]


def check_text_shape(key: str, shape: Any) -> TextShape:
    """Check the names and types of the shape of captions."""
    if not isinstance(shape, dict):
        raise ValueError(f"{key}={shape} must be the shape of captions, {{KEY: VALUE, ...}}, or null")
    return TextShape(**check_arguments(key, TextShape, shape))


def as_node(group: Any, key: str) -> Node:
    """Return a group that is a node; raise a ValueError if it has no `_target_`."""
    if not isinstance(group, Node):
        raise ValueError(f"{key}={group} must name a _target_")
    return group


def _model_node(group: Any) -> Node:
    node = as_node(group, "model")
    for part in PARTS:
        if part in node.arguments:
            as_node(node.arguments[part], f"model.{part}")
    routes = node.written["routes"] = check_routes("model.routes", node.written.get("routes", []))
    arguments = {**node.arguments, "routes": [Route(**fields) for fields in routes]}
    if (text := node.written.get("text")) is not None:
        arguments["text"] = check_text_shape("model.text", text)
    return replace(node, arguments=arguments)


def _without_weights(path: str, checkpoint: str | None) -> Precond:
    run = RunFolder(path)
    experiment = Experiment.of_run(run)
    find_checkpoint(run.path, checkpoint)
    return experiment.precond(experiment.meta_net)
