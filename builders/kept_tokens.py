"""Losses of ablations: the loss of the kept tokens only, as in the released code of TREAD's first version,
optionally with a reconstruction of the other tokens, as in masked training [MaskDiT].
"""

from dataclasses import replace
from math import isqrt
from typing import Any

import torch

from diffusion import Loss
from models import Backbone
from routing import Routing, num_tokens_kept
from routing.tokens import keep_lowest
from runtime.errors import check_not_negative


class KeptTokensLoss:
    """The mean of a loss over tokens that did not bypass a window.

    The loss draws the noise of the routes itself, so the router must be the random one.

    Args:
        reconstruction_weight: weight of the mean error of the other tokens, against the network's input.
            DEVIATION: the input of EDM's network has about unit variance; the public code of [MaskDiT]
            normalises each patch of x + n instead, which is not possible for a patch of one number.
    """

    def __init__(self, loss: Loss, net: Backbone, reconstruction_weight: float = 0.0):
        check_not_negative("train.reconstruction_weight", reconstruction_weight)
        self.loss, self.net, self.reconstruction_weight = loss, net, reconstruction_weight
        self.draw_t = loss.draw_t

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
        """Compute the loss (N,); without `routing`, the dense loss of all tokens."""
        reconstruct = None
        if routing is not None:
            shape = (x.shape[0], self.net.num_tokens)
            noise = [torch.rand(shape, generator=generator, device=x.device) for _ in self.net.routes]
            routing = replace(routing, noise=noise)
            kept = self._kept(routing, x)  # (N, T)
            kept_weight, other_weight = (self._weight(tokens, x) for tokens in (kept, 1 - kept))  # (N, H, W)
            if mask is not None:
                kept_weight, other_weight = mask * kept_weight, mask * other_weight
            mask = kept_weight
            if self.reconstruction_weight:
                reconstruct = self.reconstruction_weight * other_weight
        options: dict[str, Any] = {"t": t, "routing": routing, "mask": mask, "reconstruct": reconstruct}
        return self.loss(precond, x, class_labels, **options, generator=generator)

    def _kept(self, routing: Routing, x: torch.Tensor) -> torch.Tensor:
        T, ratios = self.net.num_tokens, routing.ratios(self.net.routes, active=True)
        kept = torch.ones(x.shape[0], T, device=x.device)
        for noise, ratio in zip(routing.noise or (), ratios, strict=True):
            ids_keep = keep_lowest(noise, num_tokens_kept(T, ratio), routing.force_keep)  # (N, K)
            kept = kept * torch.zeros_like(kept).scatter(1, ids_keep, 1.0)
        return kept

    def _weight(self, tokens: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return weights (N, H, W) of the pixels of these tokens (N, T), so that the mean is over them."""
        T, grid = self.net.num_tokens, isqrt(self.net.num_tokens)
        # The sum can be 0: no token is kept by all routes, or no token bypasses.
        weight = tokens * T / tokens.sum(dim=1, keepdim=True).clamp(min=1)
        size = x.shape[-1] // grid
        return weight.view(-1, grid, grid).repeat_interleave(size, 1).repeat_interleave(size, 2)
