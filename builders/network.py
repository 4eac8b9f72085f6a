"""The network of a configuration, the plan of its routes, and the preconditioning around it."""

from typing import Any

import torch.nn as nn

from routing import Route, RoutePlan
from runtime.config import build_node


def build_net(config: dict[str, Any]) -> nn.Module:
    """Build the network of a validated configuration, on the current default device."""
    return build_node(config, "model")(routes=[Route(**fields) for fields in config["model"]["routes"]])


def build_route_plan(config: dict[str, Any], net: nn.Module) -> RoutePlan:
    """Build the plan that tells the routes of a network what to do at each step."""
    return RoutePlan(net.routes, net.num_tokens, config["train"]["total_steps"], **config["routing"])


def build_precond(config: dict[str, Any], net: nn.Module) -> nn.Module:
    """Wrap a network in the preconditioning of the configuration."""
    return build_node(config, "diffusion.precond")(net)
