"""Preconditioning and training loss of [EDM], in the paper's symbols; time is sigma."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from diffusion.objective import Loss, Precond
from diffusion.path import EDMPath, Path
from runtime.errors import check_positive


class EDMPrecond(Precond):
    """A denoiser D_x around a network whose input, output and target have unit variance.

    Args:
        sigma_data: standard deviation of the latents.
    """

    path: Path = EDMPath()

    def __init__(self, net: nn.Module, sigma_data: float = 0.5):
        check_positive("diffusion.sigma_data", sigma_data)
        super().__init__(net)
        self.sigma_data = sigma_data

    def inputs(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        _, _, c_in, c_noise = self.coefficients(t)
        return c_in * x, c_noise

    def clean(self, F_x: Tensor, x: Tensor, t: Tensor) -> Tensor:
        c_skip, c_out, _, _ = self.coefficients(t)
        # D(x; sigma) = c_skip(sigma) x + c_out(sigma) F(c_in(sigma) x; c_noise(sigma)), [EDM] eq. 7.
        return c_skip * x + c_out * F_x

    def coefficients(self, sigma: Tensor) -> tuple[Tensor, ...]:
        """Return c_skip, c_out, c_in, c_noise, each in the shape of sigma."""
        variance = sigma**2 + self.sigma_data**2
        # Preconditioning, [EDM] Table 1.
        c_skip = self.sigma_data**2 / variance
        c_out = sigma * self.sigma_data / variance.sqrt()
        c_in = 1 / variance.sqrt()
        c_noise = sigma.log() / 4
        return c_skip, c_out, c_in, c_noise


class OptimalPrecond(EDMPrecond):
    """The optimal denoiser, for data whose posterior mean is known.

    Args:
        posterior_mean: posterior_mean(x_t, alpha, sigma, class_labels) -> E[x | x_t, class].
        path: the objective's path; the objective must predict the clean latents, as edm and x0 do.
    """

    def __init__(
        self, posterior_mean: Callable[..., Tensor], sigma_data: float, path: Path = EDMPrecond.path
    ):
        super().__init__(nn.Identity(), sigma_data)
        self.posterior_mean, self.path = posterior_mean, path

    def predict(
        self,
        x: Tensor,
        t: Tensor,
        class_labels: Tensor | None,
        *,
        routing: Any = None,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, None]:
        return self.posterior_mean(x, self.path.alpha(t), self.path.sigma(t), class_labels), None  # D_x

    def clean(self, F_x: Tensor, x: Tensor, t: Tensor) -> Tensor:
        return F_x


class EDMLoss(Loss[EDMPrecond]):
    """Weighted denoising error at log-normal noise levels, [EDM] section 5.

    Args:
        P_mean, P_std: mean and standard deviation of ln(sigma).
        contrastive_weight, inner_weight: see `diffusion.objective.Loss`.
    """

    def __init__(
        self,
        P_mean: float = -1.2,
        P_std: float = 1.2,
        contrastive_weight: float = 0.0,
        inner_weight: float = 0.5,
    ):
        super().__init__(contrastive_weight, inner_weight)
        check_positive("diffusion.loss.P_std", P_std)
        self.P_mean, self.P_std = P_mean, P_std

    def draw_t(self, num_samples: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
        # ln(sigma) ~ N(P_mean, P_std^2), [EDM] Table 1.
        return (torch.randn(num_samples, generator=generator, device=device) * self.P_std + self.P_mean).exp()

    def error(
        self, precond: EDMPrecond, F_x: Tensor, x_t: Tensor, t: Tensor, x: Tensor, eps: Tensor
    ) -> Tensor:
        # lambda(sigma) (D(x_t; sigma) - x)^2 with lambda(sigma) = 1 / c_out^2, [EDM] Table 1.
        weight = (t**2 + precond.sigma_data**2) / (t * precond.sigma_data) ** 2
        return weight * (precond.denoised(F_x, x_t, t) - x) ** 2
