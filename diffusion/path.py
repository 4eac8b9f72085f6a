"""Paths between data and noise: x_t = alpha(t) x_0 + sigma(t) eps, t = 0 is data."""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor


class Denoise(Protocol):
    """A denoiser that already includes class labels and guidance."""

    def __call__(self, x: Tensor, t: Tensor, *, with_variance: bool = False) -> Any:
        """Return D_x (N, C, H, W) at time t, 0-d; with_variance: D_x and v, see `diffusion.ddpm`."""


class Path(Protocol):
    """Amounts of data and noise at each time. Methods are elementwise; equal paths compare equal.

    Args:
        t_max: end of the path, where the noise level is highest.
    """

    @property
    def t_max(self) -> float: ...

    def alpha(self, t: Tensor) -> Tensor: ...

    def sigma(self, t: Tensor) -> Tensor: ...

    def alpha_dot(self, t: Tensor) -> Tensor: ...  # d alpha / dt

    def sigma_dot(self, t: Tensor) -> Tensor: ...  # d sigma / dt

    def time_at(self, noise_to_signal: Tensor) -> Tensor: ...  # the inverse of sigma / alpha


@dataclass(frozen=True)
class EDMPath:
    """Added noise of standard deviation t: alpha = 1, sigma = t. [EDM]"""

    t_max: float = 80.0

    def alpha(self, t: Tensor) -> Tensor:
        return torch.ones_like(t)

    def sigma(self, t: Tensor) -> Tensor:
        return t

    def alpha_dot(self, t: Tensor) -> Tensor:
        return torch.zeros_like(t)

    def sigma_dot(self, t: Tensor) -> Tensor:
        return torch.ones_like(t)

    def time_at(self, noise_to_signal: Tensor) -> Tensor:
        return noise_to_signal


@dataclass(frozen=True)
class FlowPath(EDMPath):
    """Straight path: alpha = 1 - t, sigma = t. [SiT]"""

    t_max: float = 1.0

    def alpha(self, t: Tensor) -> Tensor:
        return 1 - t

    def alpha_dot(self, t: Tensor) -> Tensor:
        return -torch.ones_like(t)

    def time_at(self, noise_to_signal: Tensor) -> Tensor:
        return 1 / (1 + 1 / noise_to_signal)  # r / (1 + r), written so that r = inf gives 1


@dataclass(frozen=True)
class VPPath:
    """Variance-preserving path: alpha = exp(-B / 2), sigma^2 = 1 - alpha^2, B = beta_d t^2/2 + beta_min t."""

    t_max: float = 1.0
    beta_d, beta_min = 19.9, 0.1  # [EDM] Table 1

    def alpha(self, t: Tensor) -> Tensor:
        return (-self._B(t) / 2).exp()

    def sigma(self, t: Tensor) -> Tensor:
        return (-torch.expm1(-self._B(t))).sqrt()

    def alpha_dot(self, t: Tensor) -> Tensor:
        return -(self.beta_d * t + self.beta_min) / 2 * self.alpha(t)

    def sigma_dot(self, t: Tensor) -> Tensor:
        return (self.beta_d * t + self.beta_min) / 2 * self.alpha(t) ** 2 / self.sigma(t)

    def time_at(self, noise_to_signal: Tensor) -> Tensor:
        B = (noise_to_signal**2).log1p()
        return ((self.beta_min**2 + 2 * self.beta_d * B).sqrt() - self.beta_min) / self.beta_d

    def _B(self, t: Tensor) -> Tensor:
        return self.beta_d / 2 * t**2 + self.beta_min * t


@dataclass(frozen=True)
class VEPath(EDMPath):
    """Variance-exploding path: alpha = 1, sigma = sqrt(t). [EDM]"""

    t_max: float = 1e4

    def sigma(self, t: Tensor) -> Tensor:
        return t.sqrt()

    def sigma_dot(self, t: Tensor) -> Tensor:
        return 0.5 / t.sqrt()

    def time_at(self, noise_to_signal: Tensor) -> Tensor:
        return noise_to_signal**2


EDM_PATH, FLOW_PATH = EDMPath(), FlowPath()
PATHS = {"edm": EDM_PATH, "flow": FLOW_PATH, "vp": VPPath(), "ve": VEPath()}


def on_path(denoise: Denoise, from_path: Path, to_path: Path) -> Denoise:
    """Convert a denoiser from one path to another, so that any sampler runs any network."""
    if from_path == to_path:
        return denoise

    def denoise_on_path(x: Tensor, t: Tensor, *, with_variance: bool = False) -> Any:
        # x / alpha = x_0 + (sigma / alpha) eps, on either path.
        from_t = from_path.time_at(to_path.sigma(t) / to_path.alpha(t))
        from_x = from_path.alpha(from_t) * (x / to_path.alpha(t))
        return denoise(from_x, from_t, with_variance=True) if with_variance else denoise(from_x, from_t)

    return denoise_on_path


def solve_on(denoise: Denoise, from_path: Path, to_path: EDMPath | VPPath) -> tuple[Denoise, Path]:
    """Convert a denoiser to `to_path`; return it and the path, cut at `from_path`'s highest noise level."""
    if from_path == to_path:
        return denoise, to_path
    end = torch.tensor(from_path.t_max, dtype=torch.float64)
    t_max = float(to_path.time_at(from_path.sigma(end) / from_path.alpha(end)))
    return on_path(denoise, from_path, to_path), replace(to_path, t_max=min(t_max, to_path.t_max))
