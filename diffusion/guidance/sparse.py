"""Sparse guidance: away from what fewer tokens predict, both with the class. [SG]"""

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from diffusion.guidance.auto import AutoGuidance
from diffusion.guidance.guidance import Branch, data_share
from diffusion.objective import Precond
from diffusion.path import Denoise, Path
from routing import Routing
from runtime.errors import check_choice

MASKS = ("fresh", "fixed")
RATIO_SCHEDULES = ("constant", "cosine")


class SparseGuidance(AutoGuidance):
    """Strong and weak branch route different shares of the tokens.

    [SG] does not say whether masks are drawn for each evaluation and for each branch; both are options here.

    Args:
        strong_ratio, weak_ratio: selection ratios, the shares that bypass, of all routes.
        masks: `fresh` for each evaluation, or `fixed` for an image.
        share_masks: the branches order the tokens alike, so that the weak one keeps a part of the strong
            one's.
        ratio_schedule: `constant`; or `cosine`: the weak ratio falls from its value to 0 between noise and
            data while the strong one rises from 0 to its own.
        num_levels: how many values a scheduled ratio takes: each is a length to compile.
        The others are those of AutoGuidance; without weak_run both branches are of one network.
    """

    def __init__(
        self,
        guidance_scale: float = 1.0,
        guidance_interval: list[float] | None = None,
        schedule: str = "constant",
        weak_run: str | None = None,
        weak_checkpoint: str | None = None,
        null_class: bool = False,
        strong_ratio: float = 0.0,
        weak_ratio: float = 0.5,
        masks: str = "fresh",
        share_masks: bool = False,
        ratio_schedule: str = "constant",
        num_levels: int = 4,
    ):
        super().__init__(guidance_scale, guidance_interval, schedule, weak_run, weak_checkpoint, null_class)
        for key, ratio in (("strong_ratio", strong_ratio), ("weak_ratio", weak_ratio)):
            if not 0 <= ratio < 1:
                raise ValueError(f"guidance.{key}={ratio} must be in [0, 1)")
        check_choice("guidance.masks", masks, MASKS)
        check_choice("guidance.ratio_schedule", ratio_schedule, RATIO_SCHEDULES)
        if num_levels < 2:
            raise ValueError(f"guidance.num_levels={num_levels} must be at least 2")
        self.strong_ratio, self.weak_ratio = strong_ratio, weak_ratio
        self.masks, self.share_masks = masks, share_masks
        self.ratio_schedule, self.num_levels = ratio_schedule, num_levels

    def check(self, precond: Precond) -> None:
        """Raise a ValueError for a network without routes, or a weak one with others."""
        self.check_weak(precond)
        strong, weak = precond.net, self._weak.net if self._weak else precond.net
        if not strong.routes:
            raise ValueError("guidance=sparse needs a network with routes (model=tread)")
        if (len(weak.routes), weak.num_tokens) != (len(strong.routes), strong.num_tokens):
            raise ValueError(
                f"guidance.weak_run={self.weak_run}: it has {len(weak.routes)} routes for {weak.num_tokens} "
                f"tokens, the run has {len(strong.routes)} for {strong.num_tokens}"
            )

    def ratios(self, path: Path, t: torch.Tensor) -> tuple[float, float]:
        """Return the strong and the weak ratio at time t, 0-d."""
        if self.ratio_schedule == "constant":
            return self.strong_ratio, self.weak_ratio
        rise = (1 - math.cos(math.pi * data_share(path, t))) / 2
        rise = round(rise * (self.num_levels - 1)) / (self.num_levels - 1)
        return self.strong_ratio * rise, self.weak_ratio * (1 - rise)

    def branches(self, strong: Branch, t: torch.Tensor) -> tuple[Branch, Branch]:
        """Return the two branches at time t, each with its masks."""
        weak, ratios = self.weak(strong), self.ratios(strong.precond.path, t)
        orders: tuple[Any, Any] = (None, None)
        if strong.rand is not None:
            net = strong.precond.net
            R, T = len(net.routes), net.num_tokens
            noise = strong.rand(2 * R * T).unflatten(1, (2, R, T)).transpose(0, 1)  # (2, N, R, T)
            orders = (noise[0], noise[0 if self.share_masks else 1])
        return _routed(strong, ratios[0], orders[0]), _routed(weak, ratios[1], orders[1])

    def __call__(self, strong: Branch) -> Denoise:
        """Return the denoiser of one batch."""
        if strong.rand is None and (self.masks == "fixed" or self.share_masks):
            raise ValueError("guidance.masks=fixed and guidance.share_masks=true need Branch(rand=...)")
        if self.masks == "fixed":
            strong = replace(strong, rand=lru_cache(strong.rand))
        return super().__call__(strong)


def _routed(branch: Branch, ratio: float, order: torch.Tensor | None) -> Branch:
    """Return a branch whose routes bypass a share of the tokens: the last in an order (N, R, T)."""
    noise = None if order is None else list(order.unbind(1))
    routed = replace(branch, routing=Routing(ratio, noise=noise))
    return replace(branch, routing=None) if routed.num_kept == branch.num_kept else routed
