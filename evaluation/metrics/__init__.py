"""Metrics, one file each: metric(reference, samples) -> {key: value}."""

from typing import Any

from evaluation.features import FeatureSet, Need


class Metric:
    """A score of the features of samples against those of a reference, which may hold statistics alone.

    A subclass sets what it needs and writes `__call__`; a YAML file of `configs/evaluation/` names it.

    Attributes:
        keys: of the scores that it returns.
        needs: the statistics that it uses.
        min_images: fewer cannot be scored.
        needs_labels: True if it uses the labels of the samples.
        higher_is_better: of all its scores.
    """

    keys: tuple[str, ...] = ()
    needs: tuple[Need, ...] = ()
    min_images = 2
    needs_labels = False
    higher_is_better = False

    @property
    def needs_of_reference(self) -> tuple[Need, ...]:
        """The statistics of the reference that it uses; without them it is left out."""
        return self.needs

    def __call__(self, reference: FeatureSet, samples: FeatureSet) -> dict[str, float]:
        """Return the scores."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """The settings that the scores depend on."""
        settings = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return {"name": type(self).__name__} | {k: v for k, v in settings.items() if k != "needs"}
