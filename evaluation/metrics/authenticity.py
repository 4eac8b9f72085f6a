"""The share of samples that are not close copies of real images. [AuthPct]"""

import torch

from evaluation.metrics import FeatureMetric
from evaluation.metrics.neighbours import nearest


class Authenticity(FeatureMetric):
    """The share of samples that are farther from the nearest real image than this image from any other.

    This is AuthPct / 100: 0 for copies of the reference, about 0.5 for new images of its distribution.
    """

    keys = ("authenticity",)
    higher_is_better = True

    def compare(self, reference: torch.Tensor, samples: torch.Tensor) -> tuple[float]:
        closest, to_reference = (values[:, 0] for values in nearest(samples, reference, 1))
        # The nearest neighbour of a real image, after itself.
        within = nearest(reference[closest], reference, 2)[1][:, 1]
        return (float((to_reference > within).double().mean()),)
