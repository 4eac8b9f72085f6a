"""The interface of a network that can be trained and sampled."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn

from routing import Route, Routing


@dataclass(frozen=True)
class Flops:
    """FLOPs of the matrix products of one image; a multiplication and an addition are two.

    Args:
        training: forward and backward of one step.
        fp32_training: the part of `training` that runs outside autocast.
    """

    forward: int
    training: int
    fp32_training: int = 0


class Backbone(nn.Module):
    """A network F_x. Shapes: N samples, C channels, T tokens of the image.

    Args:
        latent_shape: (C, H, W) of the input.
        num_classes: the label `num_classes` is the null class; 0: unconditional, labels are None.
        class_dropout_prob: probability of training on the null class; 0: it is not trained.
        num_tokens: T.
        routes: in the order of the layers; () for none.
        blocks: compiled one by one.
    """

    latent_shape: tuple[int, int, int]
    num_classes: int
    class_dropout_prob: float
    num_tokens: int
    routes: tuple[Route, ...]
    blocks: Sequence[nn.Module]

    def forward(
        self,
        x: torch.Tensor,
        c_noise: torch.Tensor,
        class_labels: torch.Tensor | None,
        *,
        routing: Routing | None = None,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Return F_x (N, C or 2C, H, W) for x (N, C, H, W), c_noise (N,) and class_labels (N,) int64."""
        raise NotImplementedError

    def flops(self, num_kept: Sequence[int]) -> Flops:
        """Cost of an image if each route keeps `num_kept` tokens; 0: its window is skipped."""
        raise NotImplementedError
