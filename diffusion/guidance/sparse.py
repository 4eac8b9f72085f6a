"""Sparse guidance: away from a prediction from fewer tokens; both predictions use the class. [SG]"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from torch import Tensor

from diffusion.guidance.auto import AutoGuidance
from diffusion.guidance.guidance import Branch, data_share
from diffusion.objective import Precond
from diffusion.path import Denoise, Path
from routing import Routing
from runtime.errors import check_choice

MASKS = ("fresh", "fixed")
RATIO_SCHEDULES = ("constant", "cosine")


@dataclass(eq=False)
class SparseGuidance(AutoGuidance):
    """Guidance between two selection ratios: more tokens bypass in the weak branch.

    [SG] does not say whether masks are drawn per evaluation and per branch; both are options here.

    Args:
        strong_ratio, weak_ratio: selection ratios of all routes: the fractions of tokens that bypass.
        masks: `fresh`: drawn at each evaluation; `fixed`: drawn once per image.
        share_masks: True: both branches select tokens by the same noise, so that the weak branch keeps a
            subset of the strong branch's tokens.
        ratio_schedule: `constant`; or `cosine`: from noise to data the weak ratio falls from its value to 0,
            and the strong ratio rises from 0 to its value.
        num_levels: number of values that a scheduled ratio takes; each gives a sequence length to compile.
        The other arguments are documented in `AutoGuidance`. weak_run=None: both branches share a network.
    """

    strong_ratio: float = 0.0
    weak_ratio: float = 0.75
    masks: str = "fresh"
    share_masks: bool = False
    ratio_schedule: str = "constant"
    num_levels: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, ratio in (("strong_ratio", self.strong_ratio), ("weak_ratio", self.weak_ratio)):
            if not 0 <= ratio < 1:
                raise ValueError(f"guidance.{key}={ratio} must be in [0, 1)")
        check_choice("guidance.masks", self.masks, MASKS)
        check_choice("guidance.ratio_schedule", self.ratio_schedule, RATIO_SCHEDULES)
        if self.num_levels < 2:
            raise ValueError(f"guidance.num_levels={self.num_levels} must be at least 2")

    def check(self, precond: Precond) -> None:
        self.check_weak(precond)
        strong, weak = precond.net, self._weak.net if self._weak else precond.net
        if not strong.routes:
            raise ValueError("guidance=sparse needs a network with routes (model=tread)")
        if (len(weak.routes), weak.num_tokens) != (len(strong.routes), strong.num_tokens):
            raise ValueError(
                f"guidance.weak_run={self.weak_run}: it has {len(weak.routes)} routes for {weak.num_tokens} "
                f"tokens, must have {len(strong.routes)} for {strong.num_tokens}, like the sampled run"
            )

    def ratios(self, path: Path, t: Tensor) -> tuple[float, float]:
        """Return the strong and the weak ratio at time t, 0-d."""
        if self.ratio_schedule == "constant":
            return self.strong_ratio, self.weak_ratio
        rise = (1 - math.cos(math.pi * data_share(path, t))) / 2
        rise = round(rise * (self.num_levels - 1)) / (self.num_levels - 1)
        return self.strong_ratio * rise, self.weak_ratio * (1 - rise)

    def branches(self, strong: Branch, t: Tensor) -> tuple[Branch, Branch]:
        weak, ratios = self.weak(strong), self.ratios(strong.precond.path, t)
        noises: tuple[Any, Any] = (None, None)
        if strong.rand is not None:
            net = strong.precond.net
            R, T = len(net.routes), net.num_tokens
            noise = strong.rand(2 * R * T).unflatten(1, (2, R, T)).transpose(0, 1)  # (2, N, R, T)
            noises = (noise[0], noise[0 if self.share_masks else 1])
        return _with_routing(strong, ratios[0], noises[0]), _with_routing(weak, ratios[1], noises[1])

    def __call__(self, strong: Branch) -> Denoise:
        if strong.rand is None and (self.masks == "fixed" or self.share_masks):
            raise ValueError("guidance.masks=fixed and guidance.share_masks=true need Branch(rand=...)")
        if self.masks == "fixed":
            strong = replace(strong, rand=lru_cache(strong.rand))
        return super().__call__(strong)


def _with_routing(branch: Branch, ratio: float, noise: Tensor | None) -> Branch:
    """Add a routing to a branch; noise (N, R, T) selects the tokens. No routing if all tokens are kept."""
    routing = Routing(ratio, noise=None if noise is None else list(noise.unbind(1)))
    routed = replace(branch, routing=routing)
    return replace(branch, routing=None) if routed.num_kept == branch.num_kept else routed
