"""A suite: metrics of a detector's features of images against a reference."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evaluation.features import (
    COST_KEYS,
    Detector,
    FeatureSet,
    Images,
    Need,
    add_up,
    extract,
    new_cache,
    part_size,
)
from evaluation.metrics import Metric
from evaluation.reference import STATISTICS, Reference
from evaluation.statistics import FeatureStatistics
from runtime.files import sha256
from runtime.launch import Launch
from runtime.parts import PartCache, digest_of
from runtime.provenance import source_sha256


@dataclass
class Scores:
    """Metrics by name, those of which more is better, those that were left out and why, and warnings.

    images_sha256 is the hash of the hashes of the images, part by part.
    """

    num_images: int = 0
    images_sha256: str = ""
    cost_per_image: dict[str, float] | None = None  # of those that were drawn
    values: dict[str, float] = field(default_factory=dict)
    higher_is_better: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


class Suite:
    """Score images; metrics are computed on the first rank.

    Args:
        reference: what to score against; in a YAML file a path, or null: the training images of the data.
        detector, metrics: named in the YAML file.
        num_samples, labels: of the samples that a training draws; labels are `random` or `balanced`.
        batch_size: images that the detector takes at a time, on every rank; None: all of them at once, on the
            first, for small images.
        features: folder of the cached features of references and files; None: in memory.
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
        batch_size: int | None = None,
        features: Path | None = None,
    ):
        self.reference, self.detector, self.metrics = reference, detector, list(metrics.values())
        self.num_samples, self.labels, self.batch_size, self.launch = num_samples, labels, batch_size, launch
        self.detector_config: dict[str, Any] | None = None  # where one is known, its part of a YAML file
        self._folder, self._reference_features = features, None
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
        if hasattr(detector, "fit") and batch_size:
            raise ValueError("batch_size must be null for a detector that is fitted, on the first rank alone")
        if hasattr(detector, "fit") and launch.is_main:
            if reference.labels is None:
                raise ValueError(f"{reference.name} must hold images with labels, to fit a classifier on")
            (part,) = reference.images.batches(reference.images.count, [0])
            detector.fit(part.images, reference.labels)

    def check(self, num_images: int, shape: tuple[int, ...], name: str) -> None:
        """Raise a ValueError where images, called `name` in errors, cannot be scored."""
        strictest = max(self.metrics, key=lambda metric: metric.min_images)
        if num_images < strictest.min_images:
            needed = f"at least {strictest.min_images} are needed for {', '.join(strictest.keys)}"
            raise ValueError(f"{name}: {num_images} image(s) are too few: {needed}")
        if hasattr(self.detector, "fit") and shape != self.reference.images.shape:
            raise ValueError(f"{name}: images are {shape}, the reference is {self.reference.images.shape}")

    def check_labels(self, labels: np.ndarray, name: str) -> None:
        """Raise a ValueError where images, called `name` in errors, show classes that the reference lacks."""
        known = labels if self.reference.labels is None else np.unique(self.reference.labels)
        others = np.setdiff1d(labels, known)
        if len(others):
            rule = f"must be a class of the reference, from {known[0]} to {known[-1]}"
            raise ValueError(f"{name}: label {others[0]} {rule}")

    def keys(self, num_images: int) -> list[str]:
        """The keys of the scores of so many images."""
        return [self.named(key, num_images) for metric in self.metrics for key in metric.keys]

    def describe(self) -> dict[str, Any]:
        """Everything that the scores of images depend on."""
        return {
            "detector": {"name": type(self.detector).__name__, **getattr(self.detector, "record", {})},
            "metrics": [metric.describe() for metric in self.metrics],
            "batch_size": self.batch_size,
            "reference": self.reference.describe(),
        }

    def detector_key(self) -> dict[str, Any]:
        """Everything that features depend on, besides the images."""
        return {**code_of(self.detector), "detector_config": self.detector_config}

    def cache(self, kind: str, key: Mapping[str, Any], images: Images) -> PartCache | None:
        """The cache of the features of images, in a folder named by everything they depend on.

        None: in memory, for a detector that takes all images at once.
        """
        if self._folder is None or self.batch_size is None:
            return None
        key = {**key, **self.detector_key(), "part_size": part_size(images, self.batch_size)}
        return new_cache(images, self._folder / f"{kind}-{digest_of(key)}", key, self.batch_size)

    def score(
        self, images: Images, labels: np.ndarray | None = None, cache: PartCache | None = None
    ) -> Scores:
        """Return the scores of images on the first rank; collective on all of them.

        Args:
            cache: see `features.extract`.
        """
        if labels is None and any(metric.needs_labels for metric in self.metrics):
            keys = [key for metric in self.metrics if metric.needs_labels for key in metric.keys]
            raise ValueError(f"{', '.join(keys)} cannot be computed: the samples have no labels")
        if self._reference_features is None:  # first: what cannot be used shows before a sample is drawn
            self._reference_features = self._extract_reference()
        reference = self._reference_features
        needs, num_images = {need for metric in self.metrics for need in metric.needs}, images.count
        samples = self._extract(images, needs, "features of samples", cache)
        if not self.launch.is_main:
            return Scores()
        samples.labels = labels
        cost = None if samples.cost is None else dict(zip(COST_KEYS, samples.cost.tolist(), strict=True))
        warnings = self.warnings(num_images, images.shape)
        scores = Scores(num_images, samples.images_sha256, cost, warnings=warnings)
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
        """The key of a score of so many images."""
        return key

    def warnings(self, num_images: int, shape: tuple[int, ...]) -> list[str]:
        """Notes on how far scores can be compared."""
        return []

    def _why_without(self, kind: type, name: str) -> str:
        if self.reference.images is None and kind is not FeatureStatistics:
            return "the reference has no images (arr_0)"
        return f"the reference has no {' and '.join(STATISTICS.get(name, (f'statistics of {name}',)))}"

    def _extract_reference(self) -> FeatureSet:
        known, images = self.reference.statistics, self.reference.images
        needs = {need for metric in self.metrics for need in metric.needs_of_reference}
        if known:  # of all images, of which a reference may carry some
            needs = {(kind, name) for kind, name in needs if kind is not FeatureStatistics}
        if not needs or images is None:
            return FeatureSet(dict(known))
        cache = self.cache("reference", {"reference": self.reference.describe()}, images)
        found = self._extract(images, needs, "features of reference", cache)
        return FeatureSet({**known, **found.statistics})

    def _extract(
        self, images: Images, needs: set[Need], description: str, cache: PartCache | None
    ) -> FeatureSet:
        options = {"batch_size": self.batch_size, "launch": self.launch, "description": description}
        parts = extract(self.detector, images, cache, **options)
        if not self.launch.is_main:
            return FeatureSet()
        return add_up(parts, needs, images.count, self.launch.device)


def code_of(detector: Detector) -> dict[str, Any]:
    """The settings that the features of a detector depend on, beside the images."""
    own = Path(inspect.getfile(type(detector)))
    return {
        "detector": {"name": type(detector).__name__, **getattr(detector, "record", {})},
        "code": [source_sha256(), sha256(own)],
        "torch": torch.__version__,
        "device": str(getattr(detector, "device", "cpu")).partition(":")[0],
    }
