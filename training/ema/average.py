"""Exponential moving average of the weights, in fp32; skipped steps leave it unchanged."""

from copy import deepcopy
from typing import Any

import torch
import torch.nn as nn


class EMA:
    """Average a network's parameters.

    Args:
        net: the network. It is copied in eval mode; build the average before its blocks are compiled.
        decay: weight of the old average in each update, in [0, 1).
        warmup: start with a small decay: min(decay, (1 + s) / (10 + s)) after s updates.
    """

    def __init__(self, net: nn.Module, decay: float, warmup: bool):
        if not 0 <= decay < 1:
            raise ValueError(f"ema.decay={decay} must be in [0, 1)")
        self.net = deepcopy(net).eval().requires_grad_(False)
        self.decay, self.warmup = decay, warmup
        self.num_updates = torch.zeros((), device=next(net.parameters()).device)

    @torch.no_grad()
    def update(self, net: nn.Module, skipped: torch.Tensor) -> None:
        """Move the average towards `net`, unless `skipped` is 1 (0 or 1, 0-d, on the device)."""
        weight = self._weight() * (1 - skipped)
        averages: list[torch.Tensor] = list(self.net.parameters())
        # average += weight * (parameter - average); the weight stays on the device
        torch._foreach_lerp_(averages, list(net.parameters()), [weight] * len(averages))
        self.num_updates += 1 - skipped

    def _weight(self) -> torch.Tensor:
        """Return the weight of the network in the next update, 0-d."""
        decay = torch.full_like(self.num_updates, self.decay)
        if self.warmup:
            # beta_s = min(beta, (1 + s) / (10 + s))
            decay = torch.minimum(decay, (1 + self.num_updates) / (10 + self.num_updates))
        return 1 - decay

    def state_dict(self) -> dict[str, Any]:
        """Return the averaged weights, under the network's names, and the number of updates."""
        return {**self.net.state_dict(), "num_updates": int(self.num_updates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        weights = dict(state)
        self.num_updates.fill_(weights.pop("num_updates"))
        self.net.load_state_dict(weights)
