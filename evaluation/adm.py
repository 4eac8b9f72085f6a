"""The ADM suite: FID, sFID, inception score, precision and recall, and the kernel distance. [ADM]"""

from collections.abc import Mapping
from pathlib import Path

from evaluation.detectors.encoders import Detectors, EncoderDetector
from evaluation.detectors.inception import NUM_POOL_FEATURES, RANDOM_WEIGHTS, InceptionDetector
from evaluation.metrics import Metric
from evaluation.metrics.frechet import FrechetDistance
from evaluation.metrics.inception_score import InceptionScore
from evaluation.metrics.kernel import KernelDistance
from evaluation.metrics.precision_recall import PrecisionRecall
from evaluation.reference import Reference
from evaluation.suite import Suite
from runtime.launch import Launch

NUM_PUBLISHED_SAMPLES = 50_000


def with_count(metric: str, num_samples: int) -> str:
    """Append the sample count to the name of a metric: fid50k, fid512."""
    return f"{metric}{num_samples // 1000}k" if num_samples % 1000 == 0 else f"{metric}{num_samples}"


class AdmSuite(Suite):
    """The ADM suite, which most papers quote; see Suite for the other arguments.

    Args:
        weights: file of the Inception network's weights.
        precision_recall, kid: also compute these scores, which need the features of all images.
        exact_distances: compute the distances of precision and recall in fp32; the original uses fp16.
        encoders: names of encoders whose features are computed in the same pass, see detectors/encoders.py.
        encoder_weights: folder of their weights.
        metrics: further metrics.
    """

    def __init__(
        self,
        reference: Reference,
        *,
        num_samples: int,
        labels: str,
        weights: str,
        batch_size: int,
        precision_recall: bool,
        exact_distances: bool,
        kid: bool,
        allow_unpublished_weights: bool,
        encoders: list[str],
        encoder_weights: str,
        metrics: Mapping[str, Metric],
        launch: Launch,
        features: Path | None = None,
    ):
        detector = InceptionDetector(weights, launch.device, allow_unpublished_weights)
        others = {name: EncoderDetector(name, encoder_weights, launch.device) for name in encoders}
        adm_metrics: dict[str, Metric] = {
            "fid": FrechetDistance("fid", "pool"),
            "sfid": FrechetDistance("sfid", "spatial"),
            "is": InceptionScore(),
        }
        if precision_recall:
            adm_metrics["precision_recall"] = PrecisionRecall(exact_distances)
        if kid:
            adm_metrics["kid"] = KernelDistance()
        options = {"num_samples": num_samples, "labels": labels, "batch_size": batch_size}
        options |= {"launch": launch, "features": features}
        detector = Detectors(detector, others) if others else detector
        super().__init__(reference, detector=detector, metrics=adm_metrics | dict(metrics), **options)

    def check(self, num_images: int, shape: tuple[int, ...], name: str) -> None:
        if len(shape) != 3 or shape[-1] != 3:
            raise ValueError(f"{name}: images are {shape}, must be (H, W, 3)")
        super().check(num_images, shape, name)

    def score_name(self, key: str, num_images: int) -> str:
        """Return the name of a score, with its sample count."""
        name = with_count(key, num_images)
        return f"{name}_of_random_weights" if self.detector.record["checked"] == RANDOM_WEIGHTS else name

    def warnings(self, num_images: int, shape: tuple[int, ...]) -> list[str]:
        warnings, weights, images = [], self.detector.record, self.reference.images
        if weights["checked"] == RANDOM_WEIGHTS:
            warnings.append(f"the weights {weights['path']} are random: these scores mean nothing")
        elif weights["checked"] != "sha256":
            how = f"{weights['checked']} only, not by a published hash"
            warnings.append(f"the weights {weights['path']} were checked by {how}")
        if num_images < NUM_PUBLISHED_SAMPLES:
            warnings.append(
                f"published scores use {NUM_PUBLISHED_SAMPLES:,} samples, these use {num_images:,}: "
                "fewer samples give a larger FID and sFID, and a smaller inception score"
            )
        if num_images <= NUM_POOL_FEATURES:
            warnings.append(
                f"{num_images:,} images for {NUM_POOL_FEATURES:,} features: the covariance is singular, and "
                "the distances depend more on the sample count than on the images"
            )
        if images is not None and images.shape != shape:
            warnings.append(f"samples are {shape}, reference images {images.shape}: size changes the scores")
        if images is not None and self.reference.statistics and "encoders" in weights:
            warnings.append(
                f"scores of other encoders compare with the {images.count:,} images of the reference, not "
                "with the data set of its statistics: authenticity overlooks copies of other images"
            )
        return warnings
