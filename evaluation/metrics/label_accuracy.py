"""How many images show the class that was asked for."""

from evaluation.features import FeatureSet
from evaluation.metrics import Metric
from evaluation.statistics import AllFeatures


class LabelAccuracy(Metric):
    """The share of samples in which a classifier (`classes`) sees the class of their label."""

    keys = ("label_accuracy",)
    needs = ((AllFeatures, "classes"),)
    needs_of_reference = ()
    needs_labels = True

    def __call__(self, reference: FeatureSet, samples: FeatureSet) -> dict[str, float]:
        classes = samples[AllFeatures, "classes"].features
        return {"label_accuracy": float((classes == samples.labels).mean())}
