"""Classifier-free guidance: away from the prediction without a class. [CFG]"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from diffusion.guidance.guidance import Branch, Guidance
from diffusion.objective import Precond
from runtime.errors import check_positive


@dataclass(eq=False)
class CFG(Guidance):
    """Guidance by the same network on the null class.

    Args:
        num_channels: number of guided channels; the others keep the strong prediction. None: all. PARITY: the
            released code of [DiT], [SiT] and [LightningDiT] guides three.
        The other arguments are documented in `Guidance`.
    """

    num_channels: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("guidance.num_channels", self.num_channels)

    def check(self, precond: Precond) -> None:
        num_channels = precond.net.latent_shape[0]
        if self.num_channels is not None and self.num_channels > num_channels:
            raise ValueError(f"guidance.num_channels={self.num_channels} must be at most {num_channels}")
        if self.guidance_scale != 1:
            check_null_class(precond.net, f"guidance.guidance_scale={self.guidance_scale} must be 1")

    def weak(self, strong: Branch) -> Branch:
        return on_null_class(strong)

    def combine(self, D_s: Tensor, D_w: Tensor, w: float) -> Tensor:
        guided = super().combine(D_s, D_w, w)
        if self.num_channels is None:
            return guided
        return torch.cat([guided[:, : self.num_channels], D_s[:, self.num_channels :]], dim=1)


def on_null_class(branch: Branch) -> Branch:
    """Replace a branch's class labels or captions, if any, by the null class or the empty caption."""
    if branch.class_labels is None:
        return branch
    return replace(branch, class_labels=branch.precond.net.null_labels(len(branch.class_labels)))


def check_null_class(net: Any, rule: str) -> None:
    """Raise a ValueError unless the network has a trained null class; `rule` starts the message."""
    if net.null_labels(1) is None:
        raise ValueError(f"{rule} for an unconditional network")
    if not net.class_dropout_prob:
        raise ValueError(f"{rule} for a network whose null class was not trained (class_dropout_prob=0)")
