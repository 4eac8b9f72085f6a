"""Build what a configuration names: backbone, plan of routes, objective, sampler, guidance."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from builders.kept_tokens import KeptTokensLoss
from diffusion import Guidance, Loss, Precond
from models import Backbone
from routing import Route, RoutePlan
from runtime.config import build_node, check_arguments
from training.ema import EMA
from training.optimizer import Optimizer

# Keys of a group that its target does not take.
OURS = {"optimizer": ("warmup_steps",)}


def build_net(config: dict[str, Any]) -> Backbone:
    """Build the network of a validated configuration, on torch's default device."""
    model = config["model"]
    parts = {"routes": [Route(**fields) for fields in model["routes"]]}
    if "block" in model:
        parts["block"] = build_node(config, "model.block").func  # a class, which has no keys
    if "router" in model:
        parts["router"] = build_node(config, "model.router")
    if "rejoin" in model:
        parts["rejoin"] = build_node(config, "model.rejoin")
    return build_node(config, "model")(**parts)


def build_route_plan(config: dict[str, Any], net: Backbone) -> RoutePlan:
    """Build the plan of what the routes of a network do at each step."""
    return RoutePlan(net.routes, net.num_tokens, config["train"]["total_steps"], **config["routing"])


def build_optimizer(
    config: dict[str, Any], named_parameters: Iterable[tuple[str, nn.Parameter]]
) -> Optimizer:
    """Build the optimizer of the parameters of a network."""
    node = dict(config["optimizer"])
    options = {key: node.pop(key) for key in OURS["optimizer"] if key in node}
    options = check_arguments("optimizer", Optimizer, options)
    try:
        built = build_node({"optimizer": node}, "optimizer")(named_parameters)
    except (ValueError, TypeError, IndexError) as error:  # torch's messages name no key
        raise ValueError(f"optimizer: {error}") from error
    return Optimizer(built, **options)


def build_ema(config: dict[str, Any], net: nn.Module) -> EMA:
    """Build the average of a network's weights."""
    return build_node(config, "ema")(net)


def build_precond(config: dict[str, Any], net: nn.Module) -> Precond:
    """Wrap a network in the preconditioning of the configuration."""
    return build_node(config, "diffusion.precond")(net)


def build_loss(config: dict[str, Any], net: Backbone) -> Loss | KeptTokensLoss:
    """Build the training loss of the configuration."""
    loss = build_node(config, "diffusion.loss")()
    if not config["train"]["kept_tokens_only"]:
        return loss
    return KeptTokensLoss(loss, net, config["train"]["reconstruction_weight"])


def build_sampler(config: dict[str, Any]) -> Callable[..., torch.Tensor]:
    """Build sampler(denoise, noise, path, randn_like=)."""
    sampler = build_node(config, "sampler")
    if "times" in config["sampler"]:
        return partial(sampler, times=build_node(config, "sampler.times"))
    return sampler


def build_guidance(config: dict[str, Any]) -> Guidance:
    """Build the guidance of a configuration."""
    return build_node(config, "guidance")()
