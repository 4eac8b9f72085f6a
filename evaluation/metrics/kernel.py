"""The kernel distance. [KID]"""

import numpy as np
import torch

from evaluation.metrics import FeatureMetric


class KernelDistance(FeatureMetric):
    """The kernel distance of features, over subsets of at most half of the smaller set.

    Args:
        key: name of the score; its standard deviation over subsets is `KEY_std`.
        features: name of the detector's features.
        subset_size: features drawn from each set, without replacement.
    """

    def __init__(
        self,
        key: str = "kid",
        features: str = "pool",
        subset_size: int = 1000,
        num_subsets: int = 100,
        seed: int = 0,
    ):
        super().__init__(features)
        self.keys = (key, f"{key}_std")
        self.subset_size, self.num_subsets, self.seed = subset_size, num_subsets, seed

    def compare(self, reference: torch.Tensor, samples: torch.Tensor) -> tuple[float, float]:
        size = max(2, min(self.subset_size, min(len(reference), len(samples)) // 2))
        rng, values = np.random.default_rng(self.seed), []
        for _ in range(self.num_subsets):
            subsets = (f[rng.choice(len(f), size, replace=False)] for f in (reference, samples))
            values.append(_squared_discrepancy(*(subset.double() for subset in subsets)))
        return float(np.mean(values)), float(np.std(values))


def _squared_discrepancy(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the unbiased estimate of the squared maximum mean discrepancy of x and y, both (n, F)."""
    n = len(x)
    # k(a, b) = (a.b / F + 1)^3
    xx, yy, xy = ((a @ b.T / x.shape[1] + 1) ** 3 for a, b in ((x, x), (y, y), (x, y)))
    within = (xx.sum() - xx.trace() + yy.sum() - yy.trace()) / (n * (n - 1))
    return float(within - 2 * xy.mean())
