"""The distance of CLIP features by a Gaussian kernel. [CMMD]"""

import torch

from evaluation.metrics import FeatureMetric
from evaluation.metrics.neighbours import distances

SIGMA, SCALE = 10.0, 1000.0


class Cmmd(FeatureMetric):
    """The maximum mean discrepancy of unit features with a Gaussian kernel, biased, times 1,000."""

    keys = ("cmmd",)

    def compare(self, reference: torch.Tensor, samples: torch.Tensor) -> tuple[float]:
        x, y = (torch.nn.functional.normalize(part.double(), dim=1) for part in (reference, samples))
        # MMD^2 = E k(x, x') + E k(y, y') - 2 E k(x, y), pairs of an image with itself included
        return (SCALE * (_mean_kernel(x, x) + _mean_kernel(y, y) - 2 * _mean_kernel(x, y)),)


def _mean_kernel(a: torch.Tensor, b: torch.Tensor) -> float:
    # k(a, b) = exp(-|a - b|^2 / (2 sigma^2))
    sums = (block.square().div(-2 * SIGMA**2).exp().sum() for block in distances(a, b))
    return sum(map(float, sums)) / (len(a) * len(b))
