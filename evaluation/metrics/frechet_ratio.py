"""The Frechet distance relative to real images of a validation set, averaged over several encoders. [FDr]"""

from evaluation.features import FeatureSet
from evaluation.metrics import Metric
from evaluation.metrics.frechet import FrechetDistance
from runtime.errors import check_positive


class FrechetRatio(Metric):
    """The mean over features of FD(samples, training images) / FD(validation images, training images), and
    the Frechet distances.

    Args:
        key: name of the score.
        of_validation: name of the detector's features -> FD(validation images, training images).
    """

    def __init__(self, key: str, of_validation: dict[str, float]):
        if not of_validation:
            raise ValueError("evaluation.metrics: of_validation must have a distance for each encoder")
        for name, distance in of_validation.items():
            check_positive(f"evaluation.metrics: of_validation.{name}", distance)
        self.keys, self.of_validation = (key, *(f"fd_{name}" for name in of_validation)), of_validation
        self._distances = {name: FrechetDistance(name, name) for name in of_validation}
        self.needs = tuple(need for distance in self._distances.values() for need in distance.needs)

    def __call__(self, reference: FeatureSet, samples: FeatureSet) -> dict[str, float]:
        values = {name: metric(reference, samples)[name] for name, metric in self._distances.items()}
        ratios = [value / self.of_validation[name] for name, value in values.items()]
        return dict(zip(self.keys, (sum(ratios) / len(ratios), *values.values()), strict=True))
