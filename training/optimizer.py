"""One or more optimizers of torch, with steps that the device can skip and schedules of the learning rate.

A skipped step leaves weights, state and step counters bitwise unchanged. The host waits to learn whether a
step is skipped only where SYNC marks it.
"""

import math
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch

from runtime.errors import check_choice, check_not_negative

SCHEDULES = ("constant", "linear", "cosine")


class Optimizer:
    """Step one or more optimizers of torch.

    Args:
        optimizers: an optimizer, or several by name, each with a different part of the parameters. This is
            what a target of `configs/optimizer/` returns for the named parameters of a network.
        warmup_steps: number of steps over which the learning rates rise linearly to their values; 0: none.
        schedule: how the learning rates change after the warm-up: `constant`; or `linear` or `cosine`, to
            `end_factor` times their values at the last step.
    """

    def __init__(
        self,
        optimizers: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
        warmup_steps: int = 0,
        schedule: str = "constant",
        end_factor: float = 0.0,
    ):
        check_not_negative("optimizer.warmup_steps", warmup_steps)
        check_choice("optimizer.schedule", schedule, SCHEDULES)
        check_not_negative("optimizer.end_factor", end_factor)
        self.schedule, self.end_factor = schedule, end_factor
        self.optimizers = dict(optimizers) if isinstance(optimizers, Mapping) else {"all": optimizers}
        self.warmup_steps = warmup_steps
        self.groups = [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]
        self.rates = [group["lr"] for group in self.groups]
        self._stepped: set[torch.Tensor] = set()
        for group in self.groups:
            if group["params"][0].is_cuda and "capturable" in group and not group.get("fused"):
                group["capturable"] = True  # step counters on the device

    def set_rates(self, step: int, total_steps: int) -> None:
        """Set the learning rates of step 0, 1, ..., total_steps - 1."""
        # lr_k = lr min(1, (k + 1) / warmup_steps) f(p), where p goes from 0 after the warm-up to 1
        factor = min(1.0, (step + 1) / max(1, self.warmup_steps))
        progress = max(0, step - self.warmup_steps) / max(1, total_steps - 1 - self.warmup_steps)
        if self.schedule == "linear":
            factor *= 1 + (self.end_factor - 1) * progress
        if self.schedule == "cosine":
            factor *= self.end_factor + (1 - self.end_factor) * (1 + math.cos(math.pi * progress)) / 2
        for group, rate in zip(self.groups, self.rates, strict=True):
            group["lr"] = rate * factor

    @torch.no_grad()
    def step(self, skipped: torch.Tensor) -> None:
        """Apply the gradients, unless `skipped` (0 or 1, fp32, 0-d, on the device, the same on all ranks)."""
        moved = {p for group in self.groups for p in group["params"] if p.grad is not None}
        if not moved <= self._stepped:
            # SYNC: at the first step of a process. In a new run the optimizers have no state to restore.
            if skipped.item():
                return
            self._stepped |= moved
        for optimizer in self.optimizers.values():
            if optimizer.defaults.get("fused"):
                # torch.amp.GradScaler.step sets this, too: fused kernels change nothing if it is 1.
                optimizer.found_inf = skipped  # pyright: ignore (torch does not declare it)
                optimizer.step()
            else:
                _step_or_undo(optimizer, skipped)

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters by the key of their state in `state_dict`, joined with /."""
        parameters: dict[str, torch.Tensor] = {}
        for name, optimizer in self.optimizers.items():
            in_order = [p for group in optimizer.param_groups for p in group["params"]]
            parameters |= {f"{name}/state/{i}": p for i, p in enumerate(in_order)}
        return parameters

    def state_dict(self) -> dict[str, Any]:
        return {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state[name])
        self.groups = [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]


def _step_or_undo(optimizer: torch.optim.Optimizer, skipped: torch.Tensor) -> None:
    """Step, then restore weights and state if `skipped` is 1. The copies exist only during this call, after
    the activations, which are larger, are freed.
    """
    moved = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    weights = [_local(p).clone() for p in moved]
    states = [{key: _copy(value) for key, value in optimizer.state.get(p, {}).items()} for p in moved]
    optimizer.step()
    for parameter, weight, state in zip(moved, weights, states, strict=True):
        _restore(parameter, weight, skipped)
        for key, before in state.items():
            now = optimizer.state[parameter][key]
            if isinstance(now, torch.Tensor) and now.device == skipped.device:
                _restore(now, before, skipped)
            elif skipped.item():  # SYNC: torch counts on the host (Adagrad, Adafactor)
                optimizer.state[parameter][key] = before


def _restore(tensor: torch.Tensor, before: torch.Tensor, skipped: torch.Tensor) -> None:
    local = _local(tensor)
    torch.where(skipped.bool(), before, local, out=local)


def _copy(value: Any) -> Any:
    return _local(value).clone() if isinstance(value, torch.Tensor) else deepcopy(value)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor; other tensors unchanged."""
    return getattr(tensor, "to_local", lambda: tensor)()
