"""The interface of a network that can be trained and sampled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn

from models.text import TextShape
from routing import Route


@dataclass(frozen=True)
class Flops:
    """FLOPs of the matrix products for one image; a multiplication and an addition count as two.

    Args:
        training: forward and backward pass of one step.
        fp32_training: the part of `training` that runs outside autocast.
    """

    forward: int
    training: int
    fp32_training: int = 0


class Backbone(nn.Module):
    """Base class of networks F_x. Shapes: N samples, C channels, T tokens of the image.

    forward(x, c_noise, class_labels, *, routing=None, generator=None) -> F_x (N, C or 2C, H, W), for
    x (N, C, H, W), c_noise (N,) and class_labels (N,) int64, captions (see `TextShape`) or None. With an
    inner head it returns F_x and the prediction of the inner block.

    Args:
        latent_shape: (C, H, W) of the input.
        num_classes: number of classes; label `num_classes` is the null class. 0: no classes.
        text: shape of the captions that the network takes instead of classes; None: classes.
        class_dropout_prob: probability of the null class or empty caption in training; 0: it is not trained.
        num_tokens: T.
        routes: routes in layer order; (): none.
        blocks: the blocks that routes count.
        inner_head: index of a block whose output also gives a prediction of F_x; None: no second prediction.
        projected: after a forward in `train()` mode, the projector's output for each token, and a bool mask
            (N, T) of the tokens that the block processed, or None if it processed all. None: no projector.
    """

    latent_shape: tuple[int, int, int]
    num_classes: int
    text: TextShape | None = None
    class_dropout_prob: float
    num_tokens: int
    routes: tuple[Route, ...]
    blocks: Sequence[nn.Module]
    inner_head: int | None = None
    projected: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def null_labels(self, num_samples: int) -> torch.Tensor | None:
        """Return labels (N,) of the null class, or empty captions; None for an unconditional network."""
        device = next(self.parameters()).device
        if self.text is not None:
            return self.text.empty(num_samples, device)
        return torch.full((num_samples,), self.num_classes, device=device) if self.num_classes else None

    @property
    def units(self) -> Sequence[nn.Module]:
        """The modules that are compiled and sharded separately."""
        return self.blocks

    def add_projector(self, build: Callable[[int], nn.Module], block: int, target_flops: int = 0) -> None:
        """Apply the module build(D) to the tokens (N, T, D) after a block in `train()` mode; the output is
        `projected`. Computing the target of an image takes `target_flops`.
        """
        raise ValueError(f"alignment: {type(self).__name__} has no projector; alignment=none trains without")

    def flops(self, num_kept: Sequence[int]) -> Flops:
        """Return the cost of an image if route i keeps num_kept[i] tokens; 0: its window is skipped."""
        raise NotImplementedError
