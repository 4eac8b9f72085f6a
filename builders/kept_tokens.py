"""An ablation: the loss of the kept tokens alone, as in the released code of TREAD's first version."""

from dataclasses import replace
from math import isqrt
from typing import Any

import torch

from diffusion import Loss
from models import Backbone
from routing import Routing, num_tokens_kept
from routing.tokens import keep_lowest


class KeptTokensLoss:
    """Leave the pixels of tokens that bypassed a window out of the mean of a loss.

    It draws the noise of the routes in place of their router, which must be the random one.
    """

    def __init__(self, loss: Loss, net: Backbone):
        self.loss, self.net = loss, net

    def __call__(
        self,
        precond: Any,
        x: torch.Tensor,
        class_labels: torch.Tensor | None,
        *,
        t: torch.Tensor | None = None,
        routing: Routing | None = None,
        mask: torch.Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Return the loss (N,); without `routing`, a dense evaluation, that of all tokens."""
        if routing is not None:
            shape = (x.shape[0], self.net.num_tokens)
            noise = [torch.rand(shape, generator=generator, device=x.device) for _ in self.net.routes]
            routing = replace(routing, noise=noise)
            weight = self._weight(routing, x)  # (N, H, W)
            mask = weight if mask is None else mask * weight
        return self.loss(precond, x, class_labels, t=t, routing=routing, mask=mask, generator=generator)

    def _weight(self, routing: Routing, x: torch.Tensor) -> torch.Tensor:
        """Return (N, H, W): 0 where a token bypassed, elsewhere so that the mean is one over kept pixels."""
        T, grid = self.net.num_tokens, isqrt(self.net.num_tokens)
        kept = torch.ones(x.shape[0], T, device=x.device)
        for noise, ratio in zip(routing.noise, routing.ratios(self.net.routes, active=True), strict=True):
            ids_keep = keep_lowest(noise, num_tokens_kept(T, ratio), routing.force_keep)  # (N, K)
            kept = kept * torch.zeros_like(kept).scatter(1, ids_keep, 1.0)
        # Routes may have no kept token in common.
        weight = kept * T / kept.sum(dim=1, keepdim=True).clamp(min=1)
        size = x.shape[-1] // grid
        return weight.view(-1, grid, grid).repeat_interleave(size, 1).repeat_interleave(size, 2)
