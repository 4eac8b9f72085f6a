"""A suite: metrics of a detector's features of samples against a reference, also during training."""

import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from evaluation.features import (
    COST,
    COST_KEYS,
    DIGEST,
    Detector,
    FeatureSet,
    Images,
    Need,
    add_up,
    digest_of_images,
    features_of,
    look,
)
from evaluation.metrics import Metric
from evaluation.reference import STATISTICS, Reference
from evaluation.statistics import FeatureStatistics
from runtime.files import sha256
from runtime.launch import Launch
from runtime.parts import PartFolder
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
    """evaluator(step): draw samples during training and score them; `score` takes any others.

    Metrics are computed on the first rank. The reference's own images are looked at once, when they are first
    needed.

    Args:
        reference: what to score against; in a YAML file a path, or null: the training images of the data.
        detector, metrics: named in the YAML file.
        num_samples, labels: how many samples to draw during training, with labels `random` or `balanced`.
        source: draws samples: source.with_labels(labels), .images(num_samples), .labels(num_samples),
            .image_shape, .describe(). None where only `score` is called.
        batch_size: images that the detector takes at a time, on every rank; None: all of them at once, on the
            first, for small images.
        kept_in: folder for finished parts, of references and of the samples of a training; None: they stay
            in memory.
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
        kept_in: Path | None = None,
    ):
        self.reference, self.detector, self.metrics = reference, detector, list(metrics.values())
        self.num_samples, self.labels, self.batch_size, self.launch = num_samples, labels, batch_size, launch
        self.source = None if source is None else source.with_labels(labels)
        self.detector_config: dict[str, Any] | None = None  # where one is known, its part of a YAML file
        self._kept_in, self._reference_features, self._warned = kept_in, None, False
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
        if hasattr(detector, "fit") and batch_size:
            raise ValueError("batch_size must be null for a detector that is fitted, on the first rank alone")
        if hasattr(detector, "fit") and launch.is_main:
            if reference.labels is None:
                raise ValueError(f"{reference.name} must hold images with labels, to fit a classifier on")
            ((_, images),) = reference.images.batches(reference.images.count, [0])
            detector.fit(images, reference.labels)

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

    @property
    def keys(self) -> list[str]:
        """The keys of what it returns."""
        return [self.named(key, self.num_samples) for metric in self.metrics for key in metric.keys]

    def describe(self) -> dict[str, Any]:
        """Everything that the scores depend on."""
        drawn = {} if self.source is None else {"num_samples": self.num_samples, "labels": self.labels}
        return {
            "detector": {"name": type(self.detector).__name__, **getattr(self.detector, "record", {})},
            "metrics": [metric.describe() for metric in self.metrics],
            "batch_size": self.batch_size,
            "reference": self.reference.describe(),
            **drawn,
        }

    def __call__(self, step: int) -> dict[str, float]:
        """Draw samples and return their scores, on the first rank; warn the first time.

        Finished parts of the same weights are used again: those of an evaluation that was killed.
        """
        labels, kept = self.source.labels(self.num_samples), None
        labels = None if labels is None else labels.numpy()
        images = self.source.images(self.num_samples)
        if self._kept_in is not None:
            about = {"step": step, **self.describe(), **self.source.describe(), **self.looks_with()}
            kept = self.parts_in(self._kept_in / "samples", about, images)
        scores = self.score(images, labels, kept, replace=True)
        if kept is not None and self.launch.is_main:
            kept.remove()
        if not self._warned:
            for metric, reason in scores.left_out.items():
                tqdm.write(f"{metric} is left out: {reason}")
            for warning in scores.warnings:
                tqdm.write(f"note: {warning}")
        self._warned = True
        return scores.values

    def part_size(self, images: Images) -> int:
        """Number of images in a part."""
        return images.part_size or self.batch_size or images.count

    def looks_with(self) -> dict[str, Any]:
        """The settings that features depend on, beside the images."""
        return {**code_of(self.detector), "detector_config": self.detector_config}

    def parts_in(self, path: Path, about: dict[str, Any], images: Images) -> PartFolder:
        """A folder for the parts of images."""
        part_size = self.part_size(images)
        about = json.loads(json.dumps({**about, "part_size": part_size, "num_images": images.count}))
        return PartFolder(path, about, -(-images.count // part_size))

    def parts_named(self, kind: str, about: dict[str, Any], images: Images) -> PartFolder | None:
        """A folder for the features of images that is named by all that they depend on."""
        if self._kept_in is None or self.batch_size is None:
            return None
        about = {**about, **self.looks_with(), "part_size": self.part_size(images)}
        return self.parts_in(self._kept_in / f"{kind}-{digest_of(about)}", about, images)

    def score(
        self,
        images: Images,
        labels: np.ndarray | None = None,
        kept: PartFolder | None = None,
        replace: bool = False,
    ) -> Scores:
        """Return the scores of images on the first rank; collective on all of them.

        Args:
            kept, replace: see `features.look`.
        """
        if labels is None and any(metric.needs_labels for metric in self.metrics):
            keys = [key for metric in self.metrics if metric.needs_labels for key in metric.keys]
            raise ValueError(f"{', '.join(keys)} cannot be computed: the samples have no labels")
        if self._reference_features is None:  # first: what cannot be used shows before a sample is drawn
            self._reference_features = self._look_at_reference()
        reference = self._reference_features
        needs, num_images = {need for metric in self.metrics for need in metric.needs}, images.count
        samples, digest = self._extract(images, needs, "features of samples", kept, replace)
        if not self.launch.is_main:
            return Scores()
        samples.labels = labels
        cost = None if samples.cost is None else dict(zip(COST_KEYS, samples.cost.tolist(), strict=True))
        scores = Scores(num_images, digest, cost, warnings=self.warnings(num_images, images.shape))
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

    def _look_at_reference(self) -> FeatureSet:
        known, images = self.reference.statistics, self.reference.images
        needs = {need for metric in self.metrics for need in metric.needs_of_reference}
        if known:  # of all images, of which a reference may carry some
            needs = {(kind, name) for kind, name in needs if kind is not FeatureStatistics}
        if not needs or images is None:
            return FeatureSet(statistics=dict(known))
        kept = self.parts_named("reference", {"reference": self.reference.describe()}, images)
        found, _ = self._extract(images, needs, "features of reference", kept)
        return FeatureSet(images.count, statistics={**known, **found.statistics})

    def _extract(
        self,
        images: Images,
        needs: set[Need],
        description: str,
        kept: PartFolder | None,
        replace: bool = False,
    ) -> tuple[FeatureSet, str]:
        detector = None if self.batch_size is None else self.detector
        options = {"batch_size": self.batch_size, "launch": self.launch, "description": description}
        parts = look(detector, images, **options, kept=kept, replace=replace)
        if not self.launch.is_main:
            return FeatureSet(), ""
        if detector is not None:
            return add_up(parts, needs, images.count, self.launch.device)
        drawn = [*parts]  # all images at once
        whole = np.concatenate([arrays["images"] for arrays in drawn])
        together = {DIGEST: digest_of_images(whole), **features_of(self.detector, whole, None)}
        found, digest = add_up([together], needs, images.count, self.launch.device)
        costs = [arrays[COST] for arrays in drawn if COST in arrays]
        found.cost = np.mean(costs, axis=0) if costs else None
        return found, digest


def code_of(detector: Detector) -> dict[str, Any]:
    """The settings that the features of a detector depend on, beside the images."""
    own = Path(inspect.getfile(type(detector)))
    return {
        "detector": {"name": type(detector).__name__, **getattr(detector, "record", {})},
        "code": [source_sha256(), sha256(own)],
        "torch": torch.__version__,
        "device": str(getattr(detector, "device", "cpu")).partition(":")[0],
    }


def digest_of(about: dict[str, Any]) -> str:
    """A short hash that names the folder of parts."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
