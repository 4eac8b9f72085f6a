"""The share of images that show the requested class."""

from evaluation.features import FeatureSet
from evaluation.metrics import Metric
from evaluation.statistics import AllFeatures


class LabelAccuracy(Metric):
    """The share of samples that a classifier (`classes`) assigns to the class of their label."""

    keys = ("label_accuracy",)
    higher_is_better = True
    needs = ((AllFeatures, "classes"),)
    needs_of_reference = ()
    needs_labels = True

    def __call__(self, reference: FeatureSet, samples: FeatureSet) -> dict[str, float]:
        classes = samples[AllFeatures, "classes"].features
        return {"label_accuracy": float((classes == samples.labels).mean())}
