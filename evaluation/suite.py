"""A suite: a detector and the metrics that compare its features with a reference."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evaluation.features import (
    COST_KEYS,
    ArrayImages,
    Detector,
    FeatureSet,
    Images,
    Need,
    add_up,
    extract,
    new_cache,
    part_size,
)
from evaluation.intervals import standard_errors
from evaluation.metrics import Metric
from evaluation.reference import STATISTICS, Reference
from evaluation.statistics import AllFeatures, FeatureStatistics
from runtime.files import sha256
from runtime.launch import Launch
from runtime.parts import PartCache, digest_of
from runtime.provenance import source_sha256


@dataclass
class Scores:
    """The scores of a set of images."""

    num_images: int = 0
    images_sha256: str = ""  # hash of the parts' image hashes
    cost_per_image: dict[str, float] | None = None  # None: the images were not sampled
    values: dict[str, float] = field(default_factory=dict)
    standard_errors: dict[str, float] = field(default_factory=dict)  # over the samples, see intervals.py
    higher_is_better: list[str] = field(default_factory=list)  # names of scores
    left_out: dict[str, str] = field(default_factory=dict)  # name of a score -> reason
    warnings: list[str] = field(default_factory=list)

    def notes(self) -> list[str]:
        """Return a line for each reason why scores are left out, and for each warning."""
        keys: dict[str, list[str]] = {}
        for key, reason in self.left_out.items():
            keys.setdefault(reason, []).append(key)
        notes = [f"{', '.join(names)} left out: {reason}" for reason, names in keys.items()]
        return notes + [f"note: {warning}" for warning in self.warnings]


class Suite:
    """Score images against a reference; metrics are computed on the first rank.

    Args:
        reference: in a YAML file a path, or null for the training images of the data.
        detector, metrics: each with its own `_target_` in the YAML file.
        num_samples: number of samples to draw during training.
        labels: of these samples, `random` (from the seeds) or `balanced` (the classes in turn).
        batch_size: images that the detector takes at a time, on each rank; None: all images at once, on the
            first rank, for small images.
        features: folder for cached features; None: keep them in memory.
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
        self.detector_config: dict[str, Any] | None = None  # its part of the YAML file, if there is one
        for metric in self.metrics:
            metric.device = launch.device
        self._check_metrics(getattr(detector, "num_features", None))
        self._folder, self._reference_features = features, None
        record = getattr(detector, "record", {})
        weights = record.get("tensors_sha256")
        if reference.statistics and (weights is None or reference.weights_hash not in (None, weights)):
            name = record.get("path", type(detector).__name__)
            rule = "give a reference made with it, or images"
            raise ValueError(f"the statistics of the reference were not made with {name}: {rule}")
        if reference.images is not None:
            self.check(reference.images.count, reference.images.shape, "reference images")
        if hasattr(detector, "fit") and batch_size:
            raise ValueError(f"batch_size={batch_size} must be null for a detector that is fitted")
        if hasattr(detector, "fit") and launch.is_main:
            if reference.labels is None:
                raise ValueError(f"{reference.name} must hold images with labels, to fit the classifier")
            (part,) = reference.images.batches(reference.images.count, [0])
            detector.fit(part.images, reference.labels)

    def _check_metrics(self, num_features: Mapping[str, int] | None) -> None:
        """Check that metrics have different names, and features that the detector has."""
        keys = [key for metric in self.metrics for key in metric.keys]
        if twice := sorted({key for key in keys if keys.count(key) > 1}):
            raise ValueError(f"evaluation.metrics: several metrics have the name {', '.join(twice)}")
        for metric in self.metrics:
            missing = {name for _, name in metric.needs} - {*(num_features or ())}
            if num_features is not None and missing:
                rule = f"the detector has {', '.join(num_features)}"
                raise ValueError(f"{metric.keys[0]} needs the features {', '.join(sorted(missing))}: {rule}")

    def check(self, num_images: int, shape: tuple[int, ...], name: str) -> None:
        """Raise a ValueError if images cannot be scored; `name` starts the message."""
        strictest = max(self.metrics, key=lambda metric: metric.min_images)
        if num_images < strictest.min_images:
            needed = f"at least {strictest.min_images} are needed for {', '.join(strictest.keys)}"
            raise ValueError(f"{name}: {num_images} image(s) are too few: {needed}")
        if hasattr(self.detector, "fit") and shape != self.reference.images.shape:
            expected = self.reference.images.shape
            raise ValueError(f"{name}: images are {shape}, must be {expected} as in the reference")

    def check_labels(self, labels: np.ndarray, name: str) -> None:
        """Raise a ValueError if a label is not a class of the reference; `name` starts the message."""
        if _are_captions(labels):
            needing = [m.keys[0] for m in self.metrics if m.needs_labels and not m.needs_captions]
            if needing:
                raise ValueError(f"{name}: {needing[0]} needs classes, but the labels are prompts")
            return
        known = labels if self.reference.labels is None else np.unique(self.reference.labels)
        unknown = np.setdiff1d(labels, known)
        if len(unknown):
            rule = f"must be a class of the reference, from {known[0]} to {known[-1]}"
            raise ValueError(f"{name}: label {unknown[0]} {rule}")

    def keys(self, num_images: int) -> list[str]:
        """Return the names of the scores of `num_images` images."""
        return [self.score_name(key, num_images) for metric in self.metrics for key in metric.keys]

    def describe(self) -> dict[str, Any]:
        """Return everything that scores depend on, besides the images."""
        return {
            "detector": {"name": type(self.detector).__name__, **getattr(self.detector, "record", {})},
            "metrics": [metric.describe() for metric in self.metrics],
            "batch_size": self.batch_size,
            "reference": self.reference.describe(),
        }

    def detector_key(self) -> dict[str, Any]:
        """Return everything that features depend on, besides the images."""
        return {**code_of(self.detector), "detector_config": self.detector_config}

    def cache(self, kind: str, key: Mapping[str, Any], images: Images) -> PartCache | None:
        """Return a cache for the features of images; its folder name hashes everything they depend on.

        None: keep the features in memory, as for a detector that takes all images at once.
        """
        if self._folder is None or self.batch_size is None:
            return None
        key = {**key, **self.detector_key(), "part_size": part_size(images, self.batch_size)}
        return new_cache(images, self._folder / f"{kind}-{digest_of(key)}", key, self.batch_size)

    def score(
        self,
        images: Images,
        labels: np.ndarray | None = None,
        cache: PartCache | None = None,
        num_halves: int = 0,
    ) -> Scores:
        """Return the scores of images, on the first rank. Collective.

        Args:
            cache: see `features.extract`.
            num_halves: number of random halves for standard errors, see `intervals.py`; 0: none.
        """
        if labels is None and any(metric.needs_labels for metric in self.metrics):
            keys = [key for metric in self.metrics if metric.needs_labels for key in metric.keys]
            raise ValueError(f"{', '.join(keys)} cannot be computed: the samples have no labels")
        if labels is not None and _are_captions(labels):
            self.check_labels(labels, "samples")
            for metric in self.metrics:
                metric.prepare(labels)
        if self._reference_features is None:  # first: a damaged reference fails before a sample is drawn
            self._reference_features = self._extract_reference(), self._extract_held_out()
        reference, held_out = self._reference_features
        needs, num_images = {need for metric in self.metrics for need in metric.needs}, images.count
        needs |= {(AllFeatures, name) for _, name in needs} if num_halves else set()
        samples = self._extract(images, needs, "features of samples", cache)
        if not self.launch.is_main:
            return Scores()
        samples.labels = labels
        cost = None if samples.cost is None else dict(zip(COST_KEYS, samples.cost.tolist(), strict=True))
        warnings = self.warnings(num_images, images.shape)
        scores = Scores(num_images, samples.images_sha256, cost, warnings=warnings)
        for metric in self.metrics:
            target = held_out if metric.held_out else reference
            if reason := self._reason_left_out(metric, target, labels):
                scores.left_out |= self._with_names(dict.fromkeys(metric.keys, reason), num_images)
                continue
            values = self._with_names(metric(target, samples), num_images)
            scores.values |= values
            scores.higher_is_better += list(values) if metric.higher_is_better else []
            if num_halves and num_images >= 2 * metric.min_images:
                errors = standard_errors(metric, target, samples, num_halves, self.launch.device)
                scores.standard_errors |= self._with_names(errors, num_images)
        return scores

    def score_name(self, key: str, num_images: int) -> str:
        """Return the name of a score; subclasses may append the sample count."""
        return key

    def _with_names(self, values: Mapping[str, Any], num_images: int) -> dict[str, Any]:
        return {self.score_name(key, num_images): value for key, value in values.items()}

    def warnings(self, num_images: int, shape: tuple[int, ...]) -> list[str]:
        """Return notes on how comparable the scores are."""
        return []

    def _reason_left_out(self, metric: Metric, target: FeatureSet, labels: np.ndarray | None) -> str:
        """Return why a metric cannot be computed; empty if it can."""
        if metric.needs_captions and not _are_captions(labels):
            return "the samples were not drawn from prompts"
        missing = [need for need in metric.needs_of_reference if need not in target.statistics]
        if not missing:
            return ""
        if metric.held_out:
            return "the reference has no held-out images"
        kind, name = missing[0]
        if self.reference.images is None and kind is not FeatureStatistics:
            return "the reference has no images (arr_0)"
        return f"the reference has no {' and '.join(STATISTICS.get(name, (f'statistics of {name}',)))}"

    def _extract_reference(self) -> FeatureSet:
        known, images = self.reference.statistics, self.reference.images
        needs = self._needs_of_reference(held_out=False)
        if known:  # of the whole data set; the images may be a part of it
            needs = {(kind, name) for kind, name in needs if kind is not FeatureStatistics}
        if not needs or images is None:
            return FeatureSet(dict(known))
        cache = self.cache("reference", {"reference": self.reference.describe()}, images)
        features = self._extract(images, needs, "features of reference", cache)
        return FeatureSet({**known, **features.statistics})

    def _extract_held_out(self) -> FeatureSet:
        needs, held_out = self._needs_of_reference(held_out=True), self.reference.held_out
        if not needs or held_out is None:
            return FeatureSet()
        return self._extract(ArrayImages(held_out[0]), needs, "features of held-out images", None)

    def _needs_of_reference(self, held_out: bool) -> set[Need]:
        metrics = (metric for metric in self.metrics if metric.held_out == held_out)
        return {need for metric in metrics for need in metric.needs_of_reference}

    def _extract(
        self, images: Images, needs: set[Need], description: str, cache: PartCache | None
    ) -> FeatureSet:
        options = {"batch_size": self.batch_size, "launch": self.launch, "description": description}
        parts = extract(self.detector, images, cache, **options)
        if not self.launch.is_main:
            return FeatureSet()
        return add_up(parts, needs, images.count, self.launch.device)


def _are_captions(labels: np.ndarray | None) -> bool:
    return labels is not None and labels.dtype.kind == "U"


def code_of(detector: Detector) -> dict[str, Any]:
    """Return the detector, its code and the platform, which its features depend on."""
    file = Path(inspect.getfile(type(detector)))
    return {
        "detector": {"name": type(detector).__name__, **getattr(detector, "record", {})},
        "code": [source_sha256(), sha256(file)],
        "torch": torch.__version__,
        "device": str(getattr(detector, "device", "cpu")).partition(":")[0],
    }
