"""Paths between data and noise: x_t = alpha(t) x_0 + sigma(t) eps, t = 0 is data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

Denoise = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # denoise(x, t) -> D_x


class Path(Protocol):
    """How much data and how much noise there is at each time; methods are elementwise.

    Paths that are the same compare equal.
    """

    def alpha(self, t: torch.Tensor) -> torch.Tensor: ...

    def sigma(self, t: torch.Tensor) -> torch.Tensor: ...

    def time_at(self, noise_to_signal: torch.Tensor) -> torch.Tensor:
        """Return the time at which sigma(t) / alpha(t) has a value."""
        ...


@dataclass(frozen=True)  # all are equal
class EDMPath:
    """Noise added to data, t is its standard deviation: alpha = 1, sigma = t. [EDM]"""

    def alpha(self, t: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(t)

    def sigma(self, t: torch.Tensor) -> torch.Tensor:
        return t

    def time_at(self, noise_to_signal: torch.Tensor) -> torch.Tensor:
        return noise_to_signal


def on_path(denoise: Denoise, from_path: Path, to_path: Path) -> Denoise:
    """Return a denoiser of `from_path` as one of `to_path`, so that any sampler runs any network."""
    if from_path == to_path:
        return denoise

    def denoise_on_path(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        # x / alpha = x_0 + (sigma / alpha) eps, on either path.
        from_t = from_path.time_at(to_path.sigma(t) / to_path.alpha(t))
        return denoise(from_path.alpha(from_t) * (x / to_path.alpha(t)), from_t)

    return denoise_on_path
