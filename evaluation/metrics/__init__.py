"""Metrics, one per file: metric(reference, samples) -> {key: value}."""

from typing import Any

import numpy as np
import torch

from evaluation.features import FeatureSet, Need
from evaluation.statistics import AllFeatures


class Metric:
    """Base class of metrics, which compare the features of samples with a reference's features or statistics.

    A subclass sets the attributes and implements `__call__`; a YAML file in `configs/evaluation/` names it.

    Attributes:
        keys: names of the scores.
        needs: the statistics that the metric uses, as (kind, name of features).
        min_images: minimum number of images.
        needs_labels: True if the metric uses the labels of the samples.
        needs_captions: True if these labels must be captions.
        higher_is_better: True if a higher value is better, for all scores of the metric.
        held_out: True to compare with the reference's held-out images instead of the reference.
        device: where to compute; the suite sets it.
    """

    keys: tuple[str, ...] = ()
    needs: tuple[Need, ...] = ()
    min_images = 2
    needs_labels = False
    needs_captions = False
    higher_is_better = False
    held_out = False
    device: torch.device | None = None

    @property
    def needs_of_reference(self) -> tuple[Need, ...]:
        """The statistics of the reference that the metric uses; if one is missing, the metric is left out."""
        return self.needs

    def __call__(self, reference: FeatureSet, samples: FeatureSet) -> dict[str, float]:
        """Return the scores."""
        raise NotImplementedError

    def prepare(self, labels: np.ndarray) -> None:
        """Check captions and compute what depends only on them, before images are drawn."""

    def describe(self) -> dict[str, Any]:
        """Return the settings that the scores depend on."""
        hidden = {name for name in vars(self) if name.startswith("_")} | {"needs", "device"}
        return {"name": type(self).__name__, **{k: v for k, v in vars(self).items() if k not in hidden}}


class FeatureMetric(Metric):
    """Base class of metrics that compare all features of samples with all features of a reference.

    Args:
        features: name of the detector's features.
        max_images: use random subsets of equal size, at most this many images each; None: all images.
    """

    def __init__(self, features: str, max_images: int | None = None):
        self.features, self.max_images, self.needs = features, max_images, ((AllFeatures, features),)

    def __call__(self, reference: FeatureSet, samples: FeatureSet) -> dict[str, float]:
        sets = [stats[AllFeatures, self.features].features for stats in (reference, samples)]
        if self.max_images is not None:
            size = min(self.max_images, *map(len, sets))
            # The same subset in every call.
            sets = [x[np.sort(np.random.default_rng(0).permutation(len(x))[:size])] for x in sets]
        tensors = [torch.as_tensor(x, device=self.device) for x in sets]
        for name, x in zip(("reference", "samples"), tensors, strict=True):
            if x.ndim != 2 or len(x) < self.min_images or not x.isfinite().all():
                rule = f"must be (at least {self.min_images} images, number of features), and finite"
                raise ValueError(f"features {tuple(x.shape)} of the {name} {rule}")
        return dict(zip(self.keys, self.compare(*tensors), strict=True))

    def compare(self, reference: torch.Tensor, samples: torch.Tensor) -> tuple[float, ...]:
        """Return the scores of finite features (M, F) for a reference (N, F), in the order of `keys`."""
        raise NotImplementedError
