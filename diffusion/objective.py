"""Base classes of all objectives: a preconditioned network on a path, and its loss at random times.

Shapes: N samples, C channels, H, W.
"""

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import torch
import torch.nn as nn
from torch import Tensor

from diffusion.path import Path
from runtime.errors import check_positive


class Precond(nn.Module, ABC):
    """Turn a network F_x into a denoiser D_x. Subclasses set `path` and implement `inputs` and `clean`.

    Args:
        net: net(x, c_noise, class_labels, *, routing, generator) -> F_x (N, C or 2C, H, W).
    """

    path: Path
    net: Any  # a models.Backbone, which this package does not import

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the network's input and of D_x: float64 if the weights are float64, else float32."""
        weight = next(self.parameters(), None)
        return torch.float64 if weight is not None and weight.dtype == torch.float64 else torch.float32

    def predict(
        self,
        x: Tensor,
        t: Tensor,
        class_labels: Tensor | None,
        *,
        routing: Any = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return F_x (N, C or 2C, H, W) for x (N, C, H, W) at time t, (N,) or 0-d, and the prediction of the
        network's inner head (None if it has none).
        """
        x = x.to(self.dtype)
        x_in, c_noise = self.inputs(x, _times(t, x))
        F_x = self.net(x_in, c_noise.flatten(), class_labels, routing=routing, generator=generator)
        return F_x if isinstance(F_x, tuple) else (F_x, None)

    def denoised(self, F_x: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """Return D_x (N, C, H, W) in `dtype`."""
        x = x.to(self.dtype)
        return self.clean(self.predicted(F_x, x), x, _times(t, x))

    def predicted(self, F_x: Tensor, x: Tensor) -> Tensor:
        """Return the first C channels of F_x in `dtype`; a predicted variance is left out."""
        return F_x[:, : x.shape[1]].to(self.dtype)

    @abstractmethod
    def inputs(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Return the network's inputs for t (N, 1, 1, 1): scaled x (N, C, H, W), c_noise (N, 1, 1, 1)."""

    @abstractmethod
    def clean(self, F_x: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """Return D_x (N, C, H, W) from F_x and x at t (N, 1, 1, 1)."""

    def learned_variance(self, F_x: Tensor, x: Tensor) -> Tensor:
        """Return the predicted variance v (N, C, H, W), see `diffusion.ddpm`; raise if there is none."""
        raise ValueError("sampler.variance=learned needs diffusion=ddpm: use sampler.variance=small or large")

    def forward(
        self,
        x: Tensor,
        t: Tensor,
        class_labels: Tensor | None,
        *,
        routing: Any = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return D_x (N, C, H, W) in `dtype`; arguments as in `predict`."""
        F_x, _ = self.predict(x, t, class_labels, routing=routing, generator=generator)
        return self.denoised(F_x, x, t)


PrecondT = TypeVar("PrecondT", bound=Precond)


class Loss(ABC, Generic[PrecondT]):
    """Prediction error at a random time. Subclasses implement `draw_t` and `error`.

    Args:
        contrastive_weight: weight of the error against the velocity of another sample of the micro-batch. It
            is subtracted in `train()` mode, so that predictions of different samples differ [CFM].
        inner_weight: weight of the error of the inner head's prediction, which is added in `train()` mode
            [InternalGuidance]; not used without such a head.
    """

    contrastive_weight, inner_weight = 0.0, 0.5  # for subclasses that do not set them

    def __init__(self, contrastive_weight: float = 0.0, inner_weight: float = 0.5):
        if not 0 <= contrastive_weight < 1:
            raise ValueError(f"diffusion.loss.contrastive_weight={contrastive_weight} must be in [0, 1)")
        check_positive("diffusion.loss.inner_weight", inner_weight)
        self.contrastive_weight, self.inner_weight = contrastive_weight, inner_weight

    @abstractmethod
    def draw_t(self, num_samples: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        """Draw the times (N,)."""

    @abstractmethod
    def error(self, precond: PrecondT, F_x: Tensor, x_t: Tensor, t: Tensor, x: Tensor, eps: Tensor) -> Tensor:
        """Return the weighted error (N, C, H, W) of F_x at x_t and t (N, 1, 1, 1) against clean x and eps."""

    def __call__(
        self,
        precond: PrecondT,
        x: Tensor,
        class_labels: Tensor | None,
        *,
        t: Tensor | None = None,
        routing: Any = None,
        mask: Tensor | None = None,
        reconstruct: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return the loss (N,) of clean latents x (N, C, H, W), in fp32, as a mean over C, H, W.

        Args:
            t: (N,) times, for the loss at given noise levels; None: drawn by `draw_t`.
            routing: passed to the network.
            mask: (N, H, W) weight of each position. The mean is over all positions, so that a position counts
                the same in every sample. A sample with an empty mask has loss 0.
            reconstruct: (N, H, W) weight of the additional term |D_x - x_in|^2 at each position, where x_in
                is the network's input [MaskDiT].
            generator: used for the time, then the noise, then the network's draws.
        """
        x = x.float()
        t = self.draw_t(x.shape[0], generator, x.device) if t is None else t
        eps = torch.randn(x.shape, generator=generator, device=x.device)
        t_ = t.view(-1, 1, 1, 1)
        # x_t = alpha(t) x_0 + sigma(t) eps
        x_t = precond.path.alpha(t_) * x + precond.path.sigma(t_) * eps
        F_x, inner = precond.predict(x_t, t, class_labels, routing=routing, generator=generator)
        error = self.error(precond, F_x, x_t, t_, x, eps)  # (N, C, H, W)
        if self.contrastive_weight and precond.training:
            # |u - u_i|^2 - lambda |u - u_j|^2.
            if len(x) < 2:
                key = f"diffusion.loss.contrastive_weight={self.contrastive_weight}"
                raise ValueError(f"{key} needs micro-batches of at least 2 samples")
            others = _path_ends(precond.path, x_t, t_, x.roll(1, 0), eps.roll(1, 0))
            error = error - self.contrastive_weight * self.error(precond, F_x, x_t, t_, *others)
        if inner is not None and precond.training:
            # L = L(F_x) + lambda L(F_inner)
            error = error + self.inner_weight * self.error(precond, inner, x_t, t_, x, eps)
        if mask is not None:
            error = error * mask.unsqueeze(1)
        if reconstruct is not None:
            x_in, _ = precond.inputs(x_t, t_)
            error = error + reconstruct.unsqueeze(1) * (precond.denoised(F_x, x_t, t_) - x_in) ** 2
        return error.mean(dim=(1, 2, 3))  # (N,)


def _times(t: Tensor, x: Tensor) -> Tensor:
    """Expand t, (N,) or 0-d, to (N, 1, 1, 1) with the dtype and device of x."""
    if t.dim() == 0 and t.device != x.device:  # SYNC: a copy from the host would wait for the device
        return torch.ones(x.shape[0], 1, 1, 1, dtype=x.dtype, device=x.device) * t
    return t.to(x).flatten().expand(x.shape[0]).view(-1, 1, 1, 1)


def _path_ends(path: Path, x_t: Tensor, t: Tensor, x: Tensor, eps: Tensor) -> tuple[Tensor, Tensor]:
    """Return the data and noise whose path goes through x_t at t with the velocity of the pair x, eps."""
    alpha, sigma = path.alpha(t), path.sigma(t)
    alpha_dot, sigma_dot = path.alpha_dot(t), path.sigma_dot(t)
    # u = alpha' x + sigma' eps; solve x_t = alpha x' + sigma eps', u = alpha' x' + sigma' eps'.
    u, determinant = alpha_dot * x + sigma_dot * eps, alpha * sigma_dot - alpha_dot * sigma
    return (sigma_dot * x_t - sigma * u) / determinant, (alpha * u - alpha_dot * x_t) / determinant
