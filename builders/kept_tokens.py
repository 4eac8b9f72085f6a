"""Ablations: the loss of the kept tokens alone, as in the released code of TREAD's first version, and with a
term that reconstructs the others, as masked training has it [MaskDiT].
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
    """Leave the pixels of tokens that bypassed a window out of the mean of a loss.

    It draws the noise of the routes in place of their router, which must be the random one.

    Args:
        reconstruction_weight: of the error of the other tokens against what the network was given there, a
            mean over them. DEVIATION: the input of EDM's network has about unit variance; the public code of
            [MaskDiT] normalises each patch of x + n instead, which a patch of one number does not allow.
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
        """Loss (N,); without `routing`, a dense evaluation, of all tokens."""
        reconstruct = None
        if routing is not None:
            shape = (x.shape[0], self.net.num_tokens)
            noise = [torch.rand(shape, generator=generator, device=x.device) for _ in self.net.routes]
            routing = replace(routing, noise=noise)
            kept = self._kept(routing, x)  # (N, T)
            of_kept, of_others = (self._weight(chosen, x) for chosen in (kept, 1 - kept))  # (N, H, W)
            if mask is not None:
                of_kept, of_others = mask * of_kept, mask * of_others
            mask = of_kept
            if self.reconstruction_weight:
                reconstruct = self.reconstruction_weight * of_others
        return self.loss(
            *(precond, x, class_labels),
            t=t,
            routing=routing,
            mask=mask,
            reconstruct=reconstruct,
            generator=generator,
        )

    def _kept(self, routing: Routing, x: torch.Tensor) -> torch.Tensor:
        T, ratios = self.net.num_tokens, routing.ratios(self.net.routes, active=True)
        kept = torch.ones(x.shape[0], T, device=x.device)
        for noise, ratio in zip(routing.noise or (), ratios, strict=True):
            ids_keep = keep_lowest(noise, num_tokens_kept(T, ratio), routing.force_keep)  # (N, K)
            kept = kept * torch.zeros_like(kept).scatter(1, ids_keep, 1.0)
        return kept

    def _weight(self, chosen: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """(N, H, W): 0 where a token is not chosen (N, T), else such that the mean is over chosen pixels."""
        T, grid = self.net.num_tokens, isqrt(self.net.num_tokens)
        # There may be none: routes without a kept token in common, or without one that bypasses.
        weight = chosen * T / chosen.sum(dim=1, keepdim=True).clamp(min=1)
        size = x.shape[-1] // grid
        return weight.view(-1, grid, grid).repeat_interleave(size, 1).repeat_interleave(size, 2)
