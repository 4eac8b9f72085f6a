"""The Frechet distance relative to real images of a validation set, averaged over several encoders. [FDr]"""

from evaluation.features import FeatureSet
from evaluation.metrics import Metric
from evaluation.metrics.frechet import FrechetDistance


class FrechetRatio(Metric):
    """The mean over features of FD(samples, training images) / FD(validation images, training images).

    Args:
        key: name of the score.
        of_validation: name of the detector's features -> FD(validation images, training images).
    """

    def __init__(self, key: str, of_validation: dict[str, float]):
        self.keys, self.of_validation = (key,), of_validation
        self._distances = {name: FrechetDistance(name, name) for name in of_validation}
        self.needs = tuple(need for distance in self._distances.values() for need in distance.needs)

    def __call__(self, reference: FeatureSet, samples: FeatureSet) -> dict[str, float]:
        ratios = [
            distance(reference, samples)[name] / self.of_validation[name]
            for name, distance in self._distances.items()
        ]
        return {self.keys[0]: sum(ratios) / len(ratios)}
