"""Running statistics of features, updated batch by batch.

A statistic is built as kind(num_features, device, num_images). It takes the batches in order, by
`update(features, start)`, where `start` is the index of the batch's first image.
"""

import numpy as np
import torch


class FeatureStatistics:
    """Running mean and covariance of features, in float64."""

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
        # Scatter of the union: the scatter of each set, and a term for the difference of their means.
        between = torch.outer(shift, shift) * (self.count * len(features) / total)
        self._scatter += centred.T @ centred + between
        self.mean += shift * (len(features) / total)
        self.count = total
        return self

    @property
    def covariance(self) -> torch.Tensor:
        """Unbiased covariance (F, F), as numpy.cov computes it."""
        if self.count < 2:
            raise ValueError(f"the covariance of {self.count} feature(s) is not defined: 2 are needed")
        return self._scatter / (self.count - 1)


class AllFeatures:
    """The features of all images (N, ...), in order; the Inception pool features take 8 KiB an image."""

    def __init__(self, num_features: int, device: torch.device | str = "cpu", num_images: int | None = None):
        self._parts: list[np.ndarray] = []

    def update(self, features: np.ndarray | torch.Tensor, start: int) -> "AllFeatures":
        """Add the features of the next images; return self."""
        self._parts.append(torch.as_tensor(features).cpu().numpy())
        return self

    @property
    def features(self) -> np.ndarray:
        """The features of all images, as one array."""
        if len(self._parts) > 1:
            self._parts = [np.concatenate(self._parts)]
        return self._parts[0]
