"""The base class of all alignments: an auxiliary loss between projected tokens and a target.

Shapes: N samples, T tokens of the image, D channels of a token, F numbers of a target.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn as nn

from runtime.errors import check_choice, check_positive

TOKENS = ("all", "kept")
HINT = "an encoder gives one for 16x16 pixels (data.encode features=, or alignment.encoder)"


class Alignment(ABC):
    """Add a projector to a network, and compare its output with a target for each token.

    Subclasses implement `projector`, `target` and `error`.

    Args:
        block: index of the block whose output is projected, from 0.
        weight: factor of the loss, which is a mean over tokens.
        until_step: the weight is 0 from this step on [HASTE]; None: never.
        tokens: `all`; or `kept`: in a window, only tokens that the block processed count. `all` reads the
            others as they entered the window.
    """

    needs_features = False  # the target is made from features of the images
    encoder: str | None = None  # computes the features at each step; None: they are stored
    weights: str | None = None  # file of the encoder's weights
    encode: Callable[[torch.Tensor], torch.Tensor] | None = None  # x -> features, by the encoder

    def __init__(self, block: int, weight: float, until_step: int | None = None, tokens: str = "all"):
        check_positive("alignment.weight", weight)
        check_choice("alignment.tokens", tokens, TOKENS)
        check_positive("alignment.until_step", until_step, otherwise=", or null")
        self.block, self.weight, self.until_step, self.tokens = block, weight, until_step, tokens

    @abstractmethod
    def projector(self, hidden_size: int, target_size: int, grid_size: int) -> nn.Module:
        """Build the module from tokens (N, T, D) to predictions (N, T, F); T = grid_size ** 2."""

    @abstractmethod
    def target(self, x: torch.Tensor, features: torch.Tensor | None, grid_size: int, /) -> torch.Tensor:
        """Return targets (N, T, F) for clean latents x (N, C, H, W) and features (N, T, F) of the images."""

    @abstractmethod
    def error(self, predicted: torch.Tensor, target: torch.Tensor, /) -> torch.Tensor:
        """Return the error of each token (N, T) for predictions and targets (N, T, F) in fp32."""

    def attach(self, net: Any, feature_shape: Sequence[int] | None, target_flops: int = 0) -> None:
        """Add the projector to a backbone.

        Args:
            feature_shape: (T, F) of the features of an image; None: there are none.
            target_flops: cost of the features of an image, if they are computed at each step.

        Raises:
            ValueError: the features are missing or of another grid, or the network cannot be aligned.
        """
        grid_size, x = round(net.num_tokens**0.5), torch.zeros(1, *net.latent_shape, device="meta")
        features = None if feature_shape is None else torch.zeros(1, *feature_shape, device="meta")
        if self.needs_features and (features is None or features.shape[1] != net.num_tokens):
            given = "have none" if features is None else f"have them for {features.shape[1]}"
            needs = f"alignment={type(self).__name__.lower()} needs features for {net.num_tokens} tokens"
            raise ValueError(f"{needs}, the images {given}: {HINT}")
        target_size = self.target(x, features, grid_size).shape[-1]
        build = partial(self.projector, target_size=target_size, grid_size=grid_size)
        net.add_projector(build, self.block, target_flops)

    def loss(self, net: Any, x: torch.Tensor, features: torch.Tensor | None, step: int) -> torch.Tensor:
        """Return the loss (N,) of the last forward for clean x (N, C, H, W) and stored features (N, T, F)."""
        predicted, kept = net.projected
        net.projected = None  # its graph would stay in memory
        if self.until_step is not None and step >= self.until_step:
            return 0 * predicted.float().mean(dim=(1, 2))  # DDP waits for the projector's gradient
        features = features if self.encode is None else self.encode(x)
        target = self.target(x.float(), features, round(net.num_tokens**0.5))
        if predicted.shape != target.shape:
            shapes = f"projector returns {tuple(predicted.shape)}, its target is {tuple(target.shape)}"
            raise ValueError(f"alignment={type(self).__name__}: the {shapes}")
        error = self.error(predicted.float(), target.float())  # (N, T)
        if kept is None or self.tokens == "all":
            return error.mean(dim=1)
        return (error * kept).sum(dim=1) / kept.sum(dim=1).clamp(min=1)


def mlp(sizes: list[int]) -> nn.Sequential:
    """Build linear layers of these sizes with SiLU between them, initialised as the network's."""
    layers: list[nn.Module] = []
    for size, next_size in pairwise(sizes):
        linear = nn.Linear(size, next_size)
        nn.init.xavier_uniform_(linear.weight)
        nn.init.zeros_(linear.bias)
        layers += [*([nn.SiLU()] if layers else []), linear]
    return nn.Sequential(*layers)
