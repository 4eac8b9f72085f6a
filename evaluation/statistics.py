"""Running statistics of features, which add up over batches.

A statistic is kind(num_features, device, num_images), and takes batches in order with `update(features,
start)`, where `start` is the position of the first.
"""

import numpy as np
import torch


class FeatureStatistics:
    """Mean and covariance of features that arrive in batches, in float64."""

    def __init__(self, num_features: int, device: torch.device | str = "cpu", num_images: int | None = None):
        self.count = 0
        self.mean = torch.zeros(num_features, dtype=torch.float64, device=device)
        self._scatter = torch.zeros(num_features, num_features, dtype=torch.float64, device=device)

    def update(self, features: np.ndarray | torch.Tensor, start: int = 0) -> "FeatureStatistics":
        """Add features (N, F); return self."""
        features = torch.as_tensor(features).to(self.mean)  # (N, F)
        mean = features.mean(dim=0)
        centred = features - mean
        total = self.count + len(features)
        shift = mean - self.mean
        # Sum of (f - mean)(f - mean)^T of two parts: their own sums, and what their means differ by.
        between = torch.outer(shift, shift) * (self.count * len(features) / total)
        self._scatter += centred.T @ centred + between
        self.mean += shift * (len(features) / total)
        self.count = total
        return self

    @property
    def covariance(self) -> torch.Tensor:
        """Unbiased covariance (F, F), as numpy.cov gives it."""
        if self.count < 2:
            raise ValueError(f"the covariance of {self.count} feature(s) is not defined: 2 are needed")
        return self._scatter / (self.count - 1)


class AllFeatures:
    """The features of every image, (N, ...) in the order of the images: 8 KiB for an image of Inception's."""

    def __init__(self, num_features: int, device: torch.device | str = "cpu", num_images: int | None = None):
        self._parts: list[np.ndarray] = []

    def update(self, features: np.ndarray | torch.Tensor, start: int) -> "AllFeatures":
        """Add the features of the images that come next; return self."""
        self._parts.append(torch.as_tensor(features).cpu().numpy())
        return self

    @property
    def features(self) -> np.ndarray:
        """The features of all images."""
        if len(self._parts) > 1:
            self._parts = [np.concatenate(self._parts)]
        return self._parts[0]
