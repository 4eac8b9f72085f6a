"""The share of samples that are copies of training images."""

import torch

from evaluation.features import FeatureSet
from evaluation.metrics import Metric, comparable
from evaluation.statistics import AllFeatures

MAX_RATIO = 1 / 3  # of the distances to the nearest and the second nearest training image


class Memorised(Metric):
    """The share of samples that are less than a third as far from a training image as from any other one.

    Args:
        features: name of the detector's features.
    """

    keys = ("memorised",)

    def __init__(self, features: str):
        self.features, self.max_ratio = features, MAX_RATIO
        self.needs = ((AllFeatures, features),)

    def __call__(self, reference: FeatureSet, samples: FeatureSet) -> dict[str, float]:
        sets = (stats[AllFeatures, self.features].features for stats in (reference, samples))
        theirs, ours = (features.double() for features in comparable(*sets, at_least=2))
        nearest = torch.cdist(ours, theirs).topk(2, largest=False).indices  # (M, 2)
        # cdist rounds; the difference of equal images is exactly 0.
        first, second = (theirs[nearest] - ours[:, None]).norm(dim=2).unbind(dim=1)
        # |x - x_1| < |x - x_2| / 3, and x = x_1 = x_2 counts too
        memorised = (first < self.max_ratio * second) | (first == 0)
        return {"memorised": memorised.double().mean().item()}
