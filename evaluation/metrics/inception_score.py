"""The inception score, over contiguous splits of the samples. [ADM]"""

import numpy as np
import torch

from evaluation.features import FeatureSet
from evaluation.metrics import Metric

SPLIT_SIZE = 5000  # images in a split


class InceptionScore(Metric):
    """The inception score of the samples' class probabilities (`probs`); it uses no reference."""

    keys = ("is",)
    higher_is_better = True
    needs_of_reference = ()

    def __init__(self):
        self.needs, self.split_size = ((SplitScores, "probs"),), SPLIT_SIZE

    def __call__(self, reference: FeatureSet, samples: FeatureSet) -> dict[str, float]:
        return {"is": samples[SplitScores, "probs"].score()}


class SplitScores:
    """Inception score over contiguous splits, computed from batches in order.

    Args:
        split_size: images in a split; a short last split counts like the others. None: SPLIT_SIZE.
    """

    def __init__(
        self, num_classes: int, device: torch.device | str, num_images: int, split_size: int | None = None
    ):
        self.split_size = split_size or SPLIT_SIZE
        num_splits = -(-num_images // self.split_size)
        # For each split: number of images, sum of p log p, and sum of p for each class.
        self._sums = torch.zeros(num_splits, 2 + num_classes, dtype=torch.float64, device=device)

    def update(self, probs: np.ndarray | torch.Tensor, start: int) -> "SplitScores":
        """Add probabilities (N, classes) of the images that start at index `start`; return self."""
        probs = torch.as_tensor(probs).to(self._sums)
        splits = torch.arange(start, start + len(probs), device=probs.device) // self.split_size
        # xlogy: 0 log 0 = 0.
        negative_entropies = torch.special.xlogy(probs, probs).sum(dim=1, keepdim=True)
        sums = torch.cat([torch.ones_like(negative_entropies), negative_entropies, probs], dim=1)
        self._sums.index_add_(0, splits, sums)
        return self

    def score(self) -> float:
        """Return the mean over the splits of exp(E KL(p(y|x) || p(y)))."""
        count, negative_entropy, probs = self._sums.split([1, 1, self._sums.shape[1] - 2], dim=1)
        marginals = probs / count
        # E KL(p(y|x) || p(y)) = E sum p(y|x) log p(y|x) - sum p(y) log p(y)
        entropies = torch.special.xlogy(marginals, marginals).sum(dim=1, keepdim=True)
        divergences = negative_entropy / count - entropies
        return float(divergences.exp().mean())
