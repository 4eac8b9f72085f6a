"""The Frechet distance extrapolated to infinitely many samples. [FDinf]"""

import numpy as np

from evaluation.features import FeatureSet
from evaluation.metrics import Metric
from evaluation.metrics.frechet import frechet_distance
from evaluation.statistics import AllFeatures, FeatureStatistics

NUM_SIZES, MIN_SIZE = 15, 5000


class InfiniteFrechetDistance(Metric):
    """The Frechet distance at 15 sample counts, extrapolated along a line in 1 / count.

    The counts are evenly spaced from 5,000, or a tenth of the samples if that is less, to all samples. The
    subsets are drawn without replacement.

    Args:
        key: name of the score.
        features: name of the detector's features.
    """

    min_images = NUM_SIZES + 1  # counts from 2 to 16

    def __init__(self, key: str, features: str):
        self.keys, self.features, self.needs = (key,), features, ((AllFeatures, features),)

    @property
    def needs_of_reference(self) -> tuple[tuple[type, str], ...]:
        """The mean and covariance of the reference are enough."""
        return ((FeatureStatistics, self.features),)

    def __call__(self, reference: FeatureSet, samples: FeatureSet) -> dict[str, float]:
        theirs = reference[FeatureStatistics, self.features]
        features, rng = np.asarray(samples[AllFeatures, self.features].features), np.random.default_rng(0)
        counts = np.linspace(max(2, min(MIN_SIZE, len(features) // 10)), len(features), NUM_SIZES).astype(int)
        values = []
        for count in counts:
            part = features[rng.choice(len(features), count, replace=False)]
            ours = FeatureStatistics(features.shape[1]).update(part)
            values.append(frechet_distance(ours.mean, ours.covariance, theirs.mean, theirs.covariance))
        # FD(M) = FD_inf + c / M
        _, intercept = np.polyfit(1 / counts, values, 1)
        return {self.keys[0]: float(intercept)}
