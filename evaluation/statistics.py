"""Running statistics of features, in float64, that add up over batches and over processes.

Every class takes batches with `update` and, in the end, `total`: a function that sums a tensor over all
processes.
"""

from collections.abc import Callable

import numpy as np
import torch

Total = Callable[[torch.Tensor], torch.Tensor]


class FeatureStatistics:
    """Mean and covariance of features that arrive in batches.

    Args:
        num_features: length of a feature vector.
        device: where the sums are kept.
    """

    def __init__(self, num_features: int, device: torch.device | str = "cpu"):
        self.count = 0
        self.mean = torch.zeros(num_features, dtype=torch.float64, device=device)
        self._scatter = torch.zeros(num_features, num_features, dtype=torch.float64, device=device)

    def update(self, features: np.ndarray | torch.Tensor) -> "FeatureStatistics":
        """Add features (N, F); return self."""
        features = torch.as_tensor(features).to(self.mean)  # (N, F)
        mean = features.mean(dim=0)
        centred = features - mean
        total = self.count + len(features)
        shift = mean - self.mean
        # Sum of (f - mean)(f - mean)^T of two parts: their own sums, and what their means differ by.
        self._scatter += centred.T @ centred + torch.outer(shift, shift) * (
            self.count * len(features) / total
        )
        self.mean += shift * (len(features) / total)
        self.count = total
        return self

    def merge(self, total: Total) -> "FeatureStatistics":
        """Replace the statistics of this process by those of all processes; return self."""
        count = total(torch.tensor(float(self.count), dtype=torch.float64, device=self.mean.device))
        mean = total(self.count * self.mean) / count
        shift = self.mean - mean
        self._scatter = total(self._scatter + self.count * torch.outer(shift, shift))
        self.mean, self.count = mean, int(count)
        return self

    @property
    def covariance(self) -> torch.Tensor:
        """Unbiased covariance (F, F), as numpy.cov gives it."""
        if self.count < 2:
            raise ValueError(
                f"the covariance of {self.count} feature(s) is not defined: at least 2 are needed"
            )
        return self._scatter / (self.count - 1)


class SplitScores:
    """Inception score over contiguous splits of images that come in any order, with their positions.

    Args:
        num_images: how many there are in all.
        split_size: images of a split; a short last split counts like the others.
    """

    def __init__(
        self, num_images: int, num_classes: int, split_size: int, device: torch.device | str = "cpu"
    ):
        self.split_size = split_size
        num_splits = -(-num_images // split_size)
        # Of each split: its images, the sum of p log p, and the sum of p of each class.
        self._sums = torch.zeros(num_splits, 2 + num_classes, dtype=torch.float64, device=device)

    def update(self, start: int, probs: np.ndarray | torch.Tensor) -> "SplitScores":
        """Add probabilities (N, classes) of the images from position `start` on; return self."""
        probs = torch.as_tensor(probs).to(self._sums)
        splits = torch.arange(start, start + len(probs), device=probs.device) // self.split_size
        # xlogy: 0 log 0 = 0.
        negative_entropies = torch.special.xlogy(probs, probs).sum(dim=1, keepdim=True)
        self._sums.index_add_(
            0, splits, torch.cat([torch.ones_like(negative_entropies), negative_entropies, probs], dim=1)
        )
        return self

    def merge(self, total: Total) -> "SplitScores":
        """Replace the sums of this process by those of all processes; return self."""
        self._sums = total(self._sums)
        return self

    def score(self) -> float:
        """Return the mean over the splits of exp(E KL(p(y|x) || p(y)))."""
        count, negative_entropy, probs = self._sums.split([1, 1, self._sums.shape[1] - 2], dim=1)
        marginals = probs / count
        # E KL(p(y|x) || p(y)) = E sum p(y|x) log p(y|x) - sum p(y) log p(y)
        divergences = negative_entropy / count - torch.special.xlogy(marginals, marginals).sum(
            dim=1, keepdim=True
        )
        return float(divergences.exp().mean())
