"""The Frechet distance extrapolated to infinitely many samples. [FDinf]"""

import numpy as np

from evaluation.features import FeatureSet
from evaluation.metrics import Array, Metric
from evaluation.metrics.frechet import frechet_distance
from evaluation.statistics import AllFeatures, FeatureStatistics

NUM_SIZES, MIN_SIZE = 15, 5000


class InfiniteFrechetDistance(Metric):
    """The Frechet distance at 15 sample counts, extrapolated along a line in 1 / count.

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
        distance = infinite_frechet_distance(
            theirs.mean, theirs.covariance, samples[AllFeatures, self.features].features
        )
        return {self.keys[0]: distance}


def infinite_frechet_distance(mean: Array, covariance: Array, features: Array) -> float:
    """Return the Frechet distance of samples (M, F) to a Gaussian, extrapolated to infinite M.

    The counts go from 5,000, or a tenth of M if that is less, to M; the samples of each are drawn without
    replacement.
    """
    features, rng = np.asarray(features), np.random.default_rng(0)
    counts = np.linspace(max(2, min(MIN_SIZE, len(features) // 10)), len(features), NUM_SIZES).astype(int)
    values = []
    for count in counts:
        part = features[rng.choice(len(features), count, replace=False)]
        statistics = FeatureStatistics(features.shape[1]).update(part)
        values.append(frechet_distance(statistics.mean, statistics.covariance, mean, covariance))
    # FD(M) = FD_inf + c / M
    _, intercept = np.polyfit(1 / counts, values, 1)
    return float(intercept)
