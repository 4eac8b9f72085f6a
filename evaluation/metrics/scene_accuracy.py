"""The share of images that show exactly what their caption says, by kind of caption. [GenEval]"""

import numpy as np

from evaluation.detectors.scenes import things_of
from evaluation.features import FeatureSet
from evaluation.metrics import Metric
from evaluation.statistics import AllFeatures
from runtime.scenes import KINDS, is_shown, parse


class SceneAccuracy(Metric):
    """The share of correct images for each kind of caption, and the mean of these shares as `accuracy`."""

    keys = ("accuracy", *(f"accuracy_{kind}" for kind in KINDS))
    higher_is_better = True
    needs = ((AllFeatures, "things"),)
    needs_of_reference = ()
    needs_labels = needs_captions = True

    def prepare(self, labels: np.ndarray) -> None:
        for text in np.unique(labels).tolist():
            parse(text)

    def __call__(self, reference: FeatureSet, samples: FeatureSet) -> dict[str, float]:
        things, shown = samples[AllFeatures, "things"].features, {kind: [] for kind in KINDS}
        for row, text in zip(things, samples.labels.tolist(), strict=True):
            caption = parse(text)
            shown[caption.kind].append(is_shown(caption, things_of(np.asarray(row))))
        shares = {f"accuracy_{kind}": float(np.mean(values)) for kind, values in shown.items() if values}
        return {"accuracy": float(np.mean([*shares.values()])), **shares}
