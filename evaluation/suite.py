"""A suite: metrics of a detector's features of samples against a reference, also during training."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tqdm import tqdm

from evaluation.features import Batches, Detector, FeatureSet, Need, extract
from evaluation.metrics import Metric
from evaluation.reference import STATISTICS, Reference
from evaluation.statistics import AllFeatures, FeatureStatistics, in_order
from runtime.launch import ALONE, Launch

MANY_IMAGES = 100_000


@dataclass
class Scores:
    """Metrics by name, those of which more is better, those that were left out and why, and warnings."""

    num_images: int = 0
    values: dict[str, float] = field(default_factory=dict)
    higher_is_better: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


class Suite:
    """evaluator(step): draw samples during training and score them; `score` takes any others.

    Metrics are computed on the first rank. The reference's own images are looked at once, when they are first
    needed.

    Args:
        reference: what to score against; in a YAML file a path, or null: the training images of the data.
        detector, metrics: named in the YAML file.
        num_samples, labels: how many samples to draw during training, with labels `random` or `balanced`.
        source: gives this rank's samples: source.with_labels(labels), .batches(num_samples),
            .labels(num_samples), .image_shape. None where only `score` is called.
        batch_size: images that the detector takes at a time, on every rank; None: all of them at once, on the
            first, for small images.
    """

    def __init__(
        self,
        reference: Reference,
        *,
        detector: Detector,
        metrics: Mapping[str, Metric],
        num_samples: int,
        labels: str,
        launch: Launch,
        source: Any = None,
        batch_size: int | None = None,
    ):
        self.reference, self.detector, self.metrics = reference, detector, list(metrics.values())
        self.num_samples, self.labels, self.batch_size, self.launch = num_samples, labels, batch_size, launch
        self.source = None if source is None else source.with_labels(labels)
        self._reference_features, self._warned = None, False
        record = getattr(detector, "record", {})
        weights = record.get("tensors_sha256")
        if reference.statistics and (weights is None or reference.made_by not in (None, weights)):
            name = record.get("path", type(detector).__name__)
            raise ValueError(
                f"the statistics of the reference are of another network than {name}: give one made with it, "
                "or images"
            )
        if reference.images is not None:
            self.check(reference.images.count, reference.images.shape, "reference images")
        if source is not None:
            self.check(num_samples, source.image_shape, "evaluation")
        if hasattr(detector, "fit") and batch_size and launch.world_size > 1:
            raise ValueError("batch_size must be null for a detector that is fitted, on the first rank alone")
        if hasattr(detector, "fit") and launch.is_main:
            if reference.labels is None:
                raise ValueError(f"{reference.name} must hold images with labels, to fit a classifier on")
            ((_, images),) = reference.images.batches(reference.images.count)
            detector.fit(images, reference.labels)

    def check(self, num_images: int, shape: tuple[int, ...], name: str) -> None:
        """Raise a ValueError where images, called `name` in errors, cannot be scored."""
        strictest = max(self.metrics, key=lambda metric: metric.min_images)
        if num_images < strictest.min_images:
            needed = f"at least {strictest.min_images} are needed for {', '.join(strictest.keys)}"
            raise ValueError(f"{name}: {num_images} image(s) are too few: {needed}")
        if hasattr(self.detector, "fit") and shape != self.reference.images.shape:
            raise ValueError(f"{name}: images are {shape}, the reference is {self.reference.images.shape}")

    def describe(self) -> dict[str, Any]:
        """Return everything that the scores depend on."""
        drawn = {} if self.source is None else {"num_samples": self.num_samples, "labels": self.labels}
        return {
            "detector": {"name": type(self.detector).__name__, **getattr(self.detector, "record", {})},
            "metrics": [metric.describe() for metric in self.metrics],
            "batch_size": self.batch_size,
            "reference": self.reference.describe(),
            **drawn,
        }

    def __call__(self, step: int) -> dict[str, float]:
        """Draw samples and return their scores, on the first rank; warn the first time."""
        labels = self.source.labels(self.num_samples)
        labels = None if labels is None else labels.numpy()
        batches = self.source.batches(self.num_samples)
        scores = self.score(batches, self.num_samples, self.source.image_shape, labels)
        if not self._warned:
            for metric, reason in scores.left_out.items():
                tqdm.write(f"{metric} is left out: {reason}")
            for warning in scores.warnings:
                tqdm.write(f"note: {warning}")
        self._warned = True
        return scores.values

    def score(
        self, batches: Batches, num_images: int, shape: tuple[int, ...], labels: np.ndarray | None = None
    ) -> Scores:
        """Return the scores of images (num_images, *shape) on the first rank; collective on all of them."""
        if labels is None and any(metric.needs_labels for metric in self.metrics):
            keys = [key for metric in self.metrics if metric.needs_labels for key in metric.keys]
            raise ValueError(f"{', '.join(keys)} cannot be computed: the samples have no labels")
        if self._reference_features is None:  # first: what cannot be used shows before a sample is drawn
            self._reference_features = self._look_at_reference()
        reference = self._reference_features
        needs = {need for metric in self.metrics for need in metric.needs}
        samples = self._extract(batches, num_images, needs, "features of samples")
        if not self.launch.is_main:
            return Scores()
        samples.labels = labels
        scores = Scores(num_images, warnings=self.warnings(num_images, shape))
        for metric in self.metrics:
            lacking = [need for need in metric.needs_of_reference if need not in reference.statistics]
            if lacking:
                reason = self._why_without(*lacking[0])
                scores.left_out |= {self.named(key, num_images): reason for key in metric.keys}
            else:
                values = metric(reference, samples)
                named = {self.named(key, num_images): value for key, value in values.items()}
                scores.values |= named
                scores.higher_is_better += list(named) if metric.higher_is_better else []
        return scores

    def named(self, key: str, num_images: int) -> str:
        """Return the name of a score of so many images."""
        return key

    def warnings(self, num_images: int, shape: tuple[int, ...]) -> list[str]:
        """Return notes on how far scores can be compared."""
        return []

    def _why_without(self, kind: type, name: str) -> str:
        if self.reference.images is None and kind is not FeatureStatistics:
            return "the reference has no images (arr_0)"
        return f"the reference has no {' and '.join(STATISTICS.get(name, (f'statistics of {name}',)))}"

    def _look_at_reference(self) -> FeatureSet:
        known, images = self.reference.statistics, self.reference.images
        needs = {need for metric in self.metrics for need in metric.needs_of_reference}
        if known:  # of all images, of which a reference may carry some
            needs = {(kind, name) for kind, name in needs if kind is not FeatureStatistics}
        if not needs or images is None:
            return FeatureSet(statistics=dict(known))
        needs_all = any(kind is AllFeatures for kind, _ in needs)
        if needs_all and images.count > MANY_IMAGES and self.launch.is_main:
            tqdm.write(
                f"note: precision and recall compare with all {images.count:,} images of the reference, "
                "which takes memory and hours: a reference made by mode=reference carries 10,000 of them"
            )
        batches = images.batches(self.batch_size or images.count, self.launch)
        found = self._extract(batches, images.count, needs, "features of reference")
        return FeatureSet(images.count, {**known, **found.statistics})

    def _extract(self, batches: Batches, num_images: int, needs: set[Need], description: str) -> FeatureSet:
        launch = self.launch
        if self.batch_size is None:
            parts = launch.gather_items(list(batches))
            if not launch.is_main:
                return FeatureSet()
            batches, launch = [(0, np.concatenate(in_order(parts)))], ALONE
        options = {"batch_size": self.batch_size, "launch": launch, "description": description}
        return extract(self.detector, batches, num_images, needs, **options)
