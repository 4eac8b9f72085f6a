"""How many images show the class that was asked for."""

from evaluation.features import FeatureSet
from evaluation.metrics import Metric
from evaluation.statistics import AllFeatures


class LabelAccuracy(Metric):
    """The share of samples in which a classifier (`classes`) sees the class of their label."""

    keys = ("label_accuracy",)
    needs = ((AllFeatures, "classes"),)
    needs_of_reference = ()

    def __call__(self, reference: FeatureSet, samples: FeatureSet) -> dict[str, float]:
        if samples.labels is None:
            raise ValueError("label_accuracy needs a label of each sample (arr_1 of an .npz)")
        classes = samples[AllFeatures, "classes"].features
        return {"label_accuracy": float((classes == samples.labels).mean())}
