"""Standard errors of scores over the samples, from random halves of them.

The bootstrap repeats images. A repeated image is its own nearest neighbour, which biases all scores based on
neighbours. Halves are drawn without replacement (the delete-half jackknife, Shao and Wu, Annals of Statistics
1989).
"""

from collections.abc import Sequence

import numpy as np
import torch

from evaluation.features import FeatureSet
from evaluation.metrics import Metric
from evaluation.statistics import AllFeatures


def standard_errors(
    metric: Metric,
    reference: FeatureSet,
    samples: FeatureSet,
    num_halves: int,
    device: torch.device | str = "cpu",
) -> dict[str, float]:
    """Return the standard error of each score of a metric; the reference counts as exact.

    Args:
        samples: at least twice the metric's `min_images`, with AllFeatures of all features that it uses.
        num_halves: number of halves, at least 2; 20 give a relative error of about 16 %.
    """
    rng = np.random.default_rng(0)
    name = metric.needs[0][1]
    num_used = num_images = len(samples[AllFeatures, name].features)
    if max_images := getattr(metric, "max_images", None):
        num_used = min(num_images, max_images, len(reference[AllFeatures, name].features))
    size = max(num_used // 2, metric.min_images)
    rows = [
        metric(reference, _part(samples, metric.needs, np.sort(rng.permutation(num_images)[:size]), device))
        for _ in range(num_halves)
    ]
    keys = set.intersection(*map(set, rows))  # some scores need images that a half may lack
    # var = size / num_used / (1 - size / n) * the variance over parts of this size; 1 for halves
    factor = size / num_used / (1 - size / num_images)
    return {key: float(np.sqrt(factor * np.var([row[key] for row in rows], ddof=1))) for key in sorted(keys)}


def _part(
    samples: FeatureSet, needs: Sequence[tuple[type, str]], ids: np.ndarray, device: torch.device | str
) -> FeatureSet:
    part = FeatureSet(labels=None if samples.labels is None else samples.labels[ids])
    for kind, name in needs:
        features = samples[AllFeatures, name].features[ids]
        part.statistics[kind, name] = kind(features.shape[-1], device, len(ids))
        part[kind, name].update(features, 0)
    return part
