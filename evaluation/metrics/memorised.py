"""The share of samples that are copies of training images."""

import torch

from evaluation.metrics import FeatureMetric
from evaluation.metrics.neighbours import nearest

MAX_RATIO = 1 / 3  # of the distances to the nearest and the second nearest training image


class Memorised(FeatureMetric):
    """The share of samples that are less than a third as far from a training image as from any other one."""

    keys = ("memorised",)

    def __init__(self, features: str):
        super().__init__(features)
        self.max_ratio = MAX_RATIO

    def compare(self, reference: torch.Tensor, samples: torch.Tensor) -> tuple[float]:
        first, second = nearest(samples, reference, 2)[1].unbind(dim=1)
        # |x - x_1| < |x - x_2| / 3, and x = x_1 = x_2 counts too
        memorised = (first < self.max_ratio * second) | (first == 0)
        return (memorised.double().mean().item(),)
