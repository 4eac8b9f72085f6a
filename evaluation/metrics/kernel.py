"""The kernel distance. [KID]"""

import numpy as np
import torch

from evaluation.metrics import Array, FeatureMetric, comparable


class KernelDistance(FeatureMetric):
    """The kernel distance of features, over subsets of at most half of the smaller set.

    Args:
        key: name of the score; its standard deviation over subsets is `KEY_std`.
        features: name of the detector's features.
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
        subset_size = max(2, min(self.subset_size, min(len(reference), len(samples)) // 2))
        return kernel_distance(reference, samples, subset_size, self.num_subsets, self.seed)


def kernel_distance(
    reference_features: Array,
    sample_features: Array,
    subset_size: int = 1000,
    num_subsets: int = 100,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the kernel distance (KID): mean and standard deviation over random subsets. [KID]

    Args:
        reference_features, sample_features: (N, F) and (M, F).
        subset_size: features drawn from each set, without replacement; at most the size of the smaller set.

    Raises:
        ValueError: fewer than 2 features, different feature lengths, or features that are not finite.
    """
    reference, samples = comparable(reference_features, sample_features, at_least=2)
    subset_size = min(subset_size, len(reference), len(samples))
    rng = np.random.default_rng(seed)
    values = []
    for _ in range(num_subsets):
        subsets = (f[rng.choice(len(f), subset_size, replace=False)] for f in (reference, samples))
        values.append(_squared_discrepancy(*(subset.double() for subset in subsets)))
    return float(np.mean(values)), float(np.std(values))


def _squared_discrepancy(x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the unbiased estimate of the squared maximum mean discrepancy of x and y, both (n, F)."""
    n = len(x)
    # k(a, b) = (a.b / F + 1)^3
    xx, yy, xy = ((a @ b.T / x.shape[1] + 1) ** 3 for a, b in ((x, x), (y, y), (x, y)))
    within = (xx.sum() - xx.trace() + yy.sum() - yy.trace()) / (n * (n - 1))
    return float(within - 2 * xy.mean())
