"""Density and coverage. [PRDC]"""

import torch

from evaluation.metrics import FeatureMetric
from evaluation.metrics.neighbours import distances, nearest
from runtime.errors import check_positive

ROUNDING = 1e-9  # of distances, relative


class DensityCoverage(FeatureMetric):
    """The number of balls around a sample, averaged and divided by k, and the share of balls with a sample.

    The ball of a real image reaches to its k-th nearest neighbour among the real images. Unlike recall,
    coverage does not use balls of samples, which outliers enlarge.

    Args:
        features, max_images: see FeatureMetric.
    """

    keys = ("density", "coverage")
    higher_is_better = True

    def __init__(self, features: str, k: int = 5, max_images: int | None = None):
        super().__init__(features, max_images)
        check_positive("evaluation.metrics: k", k)
        self.k, self.min_images = k, k + 1

    def compare(self, reference: torch.Tensor, samples: torch.Tensor) -> tuple[float, float]:
        radii = nearest(reference, reference, self.k + 1)[1][:, self.k]  # the first is the image itself
        radii = radii * (1 - ROUNDING)  # despite rounding, a sample on the border is outside
        num_inside, is_covered = 0, torch.zeros_like(radii, dtype=torch.bool)
        for block in distances(samples, reference):
            inside = block < radii  # (rows, N)
            num_inside += int(inside.sum())
            is_covered |= inside.any(dim=0)
        # density = sum_j sum_i 1[|y_j - x_i| < r_i] / (k M)
        return num_inside / (self.k * len(samples)), float(is_covered.double().mean())
