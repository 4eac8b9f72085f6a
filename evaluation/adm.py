"""The ADM suite: FID, sFID, inception score, precision and recall of images against a reference, and the
kernel distance.

What is computed from all images is computed on the first process. [ADM]
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from evaluation.detectors.inception import NUM_POOL_FEATURES, InceptionDetector
from evaluation.extraction import SPLIT_SIZE, Batches, Images, ImageSetStatistics, extract
from evaluation.files import fingerprint
from evaluation.metrics.frechet import frechet_distance
from evaluation.metrics.kernel import kernel_distance
from evaluation.metrics.precision_recall import precision_recall
from evaluation.reference import STATISTICS, open_reference
from evaluation.statistics import FeatureStatistics
from runtime.launch import Launch

NEIGHBOURS = 3
KID_SUBSET_SIZE, KID_NUM_SUBSETS, KID_SEED = 1000, 100, 0
NUM_PUBLISHED_SAMPLES = 50_000
MANY_IMAGES = 100_000


@dataclass
class Gaussian:
    """Mean (F,) and covariance (F, F) of features."""

    mu: np.ndarray | torch.Tensor
    sigma: np.ndarray | torch.Tensor


@dataclass
class Reference:
    """What images are compared with; None is not known."""

    pool: Gaussian
    spatial: Gaussian | None
    features: np.ndarray | None


@dataclass
class Scores:
    """Metrics by name, the metrics that were left out and why, and what to keep in mind."""

    values: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def with_count(metric: str, num_samples: int) -> str:
    """Return a metric's name with its sample count: fid50k, fid512."""
    return f"{metric}{num_samples // 1000}k" if num_samples % 1000 == 0 else f"{metric}{num_samples}"


class AdmSuite:
    """Scores images against a reference; the reference's own images are looked at once, when they are first
    needed.

    Args:
        statistics: mu, sigma, and mu_s, sigma_s if known; empty where the images are to give them. `weights`,
            if there, is the hash of the tensors that gave them.
        images: of the reference, for precision, recall and the kernel distance, or for its statistics; None
            if not there.
        precision_recall, kid: whether to give them; they need the features of all images.
        exact_distances: precision and recall with distances in fp32; the original's are fp16.
    """

    def __init__(
        self,
        detector: InceptionDetector,
        statistics: dict[str, np.ndarray],
        images: Images | None,
        *,
        launch: Launch,
        batch_size: int,
        precision_recall: bool,
        exact_distances: bool,
        kid: bool,
    ):
        self.detector, self.statistics, self.images = detector, statistics, images
        self.launch, self.batch_size = launch, batch_size
        self.precision_recall, self.exact_distances, self.kid = precision_recall, exact_distances, kid
        self._reference = None
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} of the detector must be at least 1")
        if images is not None:
            self.check(images.count, images.shape, "reference images")
        made_by = statistics.get("weights")
        if made_by is not None and made_by != detector.record["tensors_sha256"]:
            raise ValueError(
                f"the reference was made with other weights than {detector.record['path']}: its scores would "
                "mean nothing"
            )

    def check(self, num_images: int, shape: tuple[int, ...], name: str) -> None:
        """Raise a ValueError where images, which errors call `name`, cannot be scored."""
        if len(shape) != 3 or shape[-1] != 3:
            raise ValueError(f"{name}: images are {shape}, must be (H, W, 3), in colour")
        least = NEIGHBOURS + 1 if self.precision_recall else 2
        if num_images < least:
            hint = "; precision_recall=false needs 2" if self.precision_recall else ""
            raise ValueError(f"{name}: {num_images} image(s) are too few: at least {least} are needed{hint}")

    @property
    def protocol(self) -> dict[str, Any]:
        """Everything about the suite that moves a number."""
        precision_recall = {"k": NEIGHBOURS, "distances": "fp32" if self.exact_distances else "fp16"}
        kid = {"subset_size": KID_SUBSET_SIZE, "num_subsets": KID_NUM_SUBSETS, "seed": KID_SEED}
        kid["where there are fewer"] = "subsets of half of the smaller set"
        return {
            "network": "Inception of 2015-12-05 in fp32 without TF32, its own bilinear resizing to 299x299",
            "weights": self.detector.record,
            "moments": "fp64",
            "inception_score": f"contiguous splits of {SPLIT_SIZE} in the order of the samples",
            "precision_recall": precision_recall if self.precision_recall else None,
            "kid": kid if self.kid else None,
            "batch_size": self.batch_size,
            "reference_moments": "its statistics" if self.statistics else "all of its images",
            "reference_images": self.images and {"count": self.images.count, "shape": self.images.shape},
            "reference_features": len(self._keep_of_reference()),
        }

    def score(self, batches: Batches, num_images: int, shape: tuple[int, ...]) -> Scores:
        """Return the scores of images (num_images, *shape) on the first process; the others take part and
        return none.
        """
        if (
            self._reference is None
        ):  # first, so that an image that cannot be used shows before any sample is drawn
            self._reference = self._look_at_reference()
        keep = np.arange(num_images) if self._needs_features else None
        samples = self._extract(batches, num_images, keep, "features of samples")
        if not self.launch.is_main:
            return Scores()
        scores = self._compare(samples, self._reference, num_images)
        if self.images is not None and self.images.shape != shape:
            scores.warnings.append(
                f"samples are {shape}, reference images {self.images.shape}: sizes move the scores"
            )
        return scores

    @property
    def _needs_features(self) -> bool:
        return self.precision_recall or self.kid

    def _keep_of_reference(self) -> np.ndarray:
        return np.arange(self.images.count if self._needs_features and self.images else 0)

    def _look_at_reference(self) -> Reference:
        keep, found = self._keep_of_reference(), None
        if len(keep) > MANY_IMAGES and self.launch.is_main:
            tqdm.write(
                f"note: precision and recall compare with all {len(keep):,} images of the reference, which "
                "takes memory and "
                "hours: a reference made by mode=reference carries 10,000 of them"
            )
        if len(keep) or not self.statistics:
            batches = self.images.batches(self.batch_size, self.launch)
            found = self._extract(
                batches, self.images.count, keep if len(keep) else None, "features of reference"
            )
        features = found.features if found else None
        if not self.statistics:
            pool, spatial = (Gaussian(part.mean, part.covariance) for part in (found.pool, found.spatial))
            return Reference(pool, spatial, features)
        pool, spatial = (
            Gaussian(self.statistics[mu], self.statistics[mu.replace("mu", "sigma")])
            if mu in self.statistics
            else None
            for mu in STATISTICS
        )
        return Reference(pool, spatial, features)

    def _extract(
        self, batches: Batches, num_images: int, keep: np.ndarray | None, description: str
    ) -> ImageSetStatistics:
        options = {
            "batch_size": self.batch_size,
            "keep": keep,
            "launch": self.launch,
            "description": description,
        }
        return extract(self.detector, batches, num_images, **options)

    def _compare(self, samples: ImageSetStatistics, reference: Reference, num_images: int) -> Scores:
        values, left_out = {"fid": _distance(samples.pool, reference.pool)}, {}
        if reference.spatial:
            values["sfid"] = _distance(samples.spatial, reference.spatial)
        else:
            left_out["sfid"] = "the reference has no mu_s and sigma_s"
        values["is"] = samples.split_scores.score()
        measures = {}
        if self.precision_recall:
            options = {"k": NEIGHBOURS, "exact": self.exact_distances, "device": self.detector.device}
            measures["precision", "recall"] = partial(precision_recall, **options)
        if self.kid:
            smaller = min(num_images, 0 if reference.features is None else len(reference.features))
            subset_size = max(2, min(KID_SUBSET_SIZE, smaller // 2))
            options = {"subset_size": subset_size, "num_subsets": KID_NUM_SUBSETS, "seed": KID_SEED}
            measures["kid", "kid_std"] = partial(kernel_distance, **options)
        for metrics, measure in measures.items():
            if reference.features is None:
                left_out |= dict.fromkeys(metrics, "the reference has no images (arr_0)")
            else:
                values |= zip(metrics, measure(reference.features, samples.features), strict=True)
        values, left_out = (
            {with_count(metric, num_images): x for metric, x in d.items()} for d in (values, left_out)
        )
        return Scores(values, left_out, _warnings(num_images, self.detector.record))


def _distance(samples: FeatureStatistics, reference: Gaussian) -> float:
    return frechet_distance(samples.mean, samples.covariance, reference.mu, reference.sigma)


def _warnings(num_images: int, weights: dict[str, str]) -> list[str]:
    warnings = []
    if weights["checked"] != "sha256":
        warnings.append(
            f"the weights {weights['path']} were checked by {weights['checked']} alone, not by a published "
            "hash"
        )
    if num_images < NUM_PUBLISHED_SAMPLES:
        warnings.append(
            f"published scores are of {NUM_PUBLISHED_SAMPLES:,} samples, these are of {num_images:,}: "
            "fewer samples give a larger FID and sFID, and a smaller inception score"
        )
    if num_images <= NUM_POOL_FEATURES:
        warnings.append(
            f"{num_images:,} images are no more than the {NUM_POOL_FEATURES:,} features: the covariance is "
            "singular, "
            "the distances hang on the sample count more than on the images"
        )
    return warnings


class AdmEvaluator:
    """The ADM suite during a training, on samples of the averaged weights from all processes.

    Args:
        num_samples: how many are drawn and scored.
        labels: of the samples, `random` or `balanced`.
        reference: what `open_reference` takes.
        weights: file of the Inception network's weights.
        batch_size: images that the Inception network takes at a time.
        source: gives this process's samples: source.with_labels(labels).batches(num_samples),
            source.image_shape.
        open_images: opens the images of the reference.
        The others are those of AdmSuite and InceptionDetector.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        labels: str,
        reference: str,
        weights: str,
        batch_size: int,
        precision_recall: bool,
        exact_distances: bool,
        kid: bool,
        allow_unpublished_weights: bool,
        source: Any,
        open_images: Callable[[Path], Images],
        device: torch.device,
        launch: Launch,
    ):
        self.num_samples, self.labels, self.source, self._told = (
            num_samples,
            labels,
            source.with_labels(labels),
            False,
        )
        self.reference = Path(reference)
        statistics, images = open_reference(self.reference, open_images)
        self._suite = AdmSuite(
            InceptionDetector(weights, device, allow_unpublished_weights),
            statistics,
            images,
            launch=launch,
            batch_size=batch_size,
            precision_recall=precision_recall,
            exact_distances=exact_distances,
            kid=kid,
        )
        self._suite.check(num_samples, source.image_shape, "evaluation")

    def describe(self) -> dict[str, Any]:
        """Return everything about the scores that moves a number."""
        reference = {"path": str(self.reference), "sha256": fingerprint(self.reference)}
        return {
            **self._suite.protocol,
            "num_samples": self.num_samples,
            "labels": self.labels,
            "reference": reference,
        }

    def run(self, step: int) -> Iterator[tuple[str, float]]:
        """Draw, score, and yield the scores on the first process; warn the first time."""
        scores = self._suite.score(
            self.source.batches(self.num_samples), self.num_samples, self.source.image_shape
        )
        if not self._told:
            for metric, reason in scores.left_out.items():
                tqdm.write(f"{metric} is left out: {reason}")
            for warning in scores.warnings:
                tqdm.write(f"note: {warning}")
        self._told = True
        yield from scores.values.items()
