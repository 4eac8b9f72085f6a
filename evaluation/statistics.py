"""Running mean and covariance of features, in float64."""

import numpy as np
import torch


class FeatureStatistics:
    """Mean and covariance of features that arrive in batches.

    Args:
        num_features: length of a feature vector.
    """

    def __init__(self, num_features: int):
        self.count = 0
        self.mean = np.zeros(num_features)
        self._scatter = np.zeros((num_features, num_features))  # sum of (f - mean)(f - mean)^T

    def update(self, features: np.ndarray | torch.Tensor) -> "FeatureStatistics":
        """Add features (N, F); return self."""
        features = np.asarray(features, dtype=np.float64)
        mean = features.mean(axis=0)
        centred = features - mean
        total = self.count + len(features)
        shift = mean - self.mean
        # Pairwise update of a scatter matrix: the parts, and what their means differ by.
        self._scatter += centred.T @ centred + np.outer(shift, shift) * self.count * len(features) / total
        self.mean += shift * len(features) / total
        self.count = total
        return self

    @property
    def covariance(self) -> np.ndarray:
        """Unbiased covariance (F, F), as numpy.cov gives it."""
        return self._scatter / (self.count - 1)
