"""What scoring costs: the Frechet distance, precision and recall, and the Inception network.

    python -m benchmarks.evaluation_speed

Every way to take the Frechet distance is first checked to give the same number. The record goes to
benchmarks/results/.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.linalg import eigvals, sqrtm
from torchvision.models import inception_v3

from benchmarks.memory import peak_gib, reset_peak
from benchmarks.results import markdown, measured, write_results
from evaluation import FeatureStatistics, InceptionDetector, frechet_distance, precision_recall
from evaluation.detectors.inception import NUM_CLASSES, NUM_POOL_FEATURES
from runtime.machine import start_process
from runtime.provenance import environment
from training.speed import interleaved_seconds

CPU = torch.device("cpu")
COLUMNS = {
    "setting": "{}",
    "what": "{}",
    "median": "{:.4g}",
    "unit": "{}",
    "least": "{:.4g}",
    "most": "{:.4g}",
    "n": "{}",
    "failed": "{}",
}


@dataclass(frozen=True)
class Sizes:
    """How much is scored: features of so many dimensions, images of the reference, samples, and a batch of
    the network.
    """

    num_features: int = NUM_POOL_FEATURES
    num_reference: int = 10_000
    num_samples: int = 50_000
    batch_size: int = 64
    image_size: int = 256
    repeats: int = 3


TINY = Sizes(num_features=64, num_reference=200, num_samples=400, batch_size=2, image_size=64, repeats=1)

Moments = tuple[np.ndarray, np.ndarray]


def by_square_root(mu1: np.ndarray, sigma1: np.ndarray, mu2: np.ndarray, sigma2: np.ndarray) -> float:
    """The matrix square root, as the original takes it."""
    return _distance(mu1, sigma1, mu2, sigma2, np.trace(sqrtm(sigma1 @ sigma2)).real)


def by_eigenvalues_of_product(
    mu1: np.ndarray, sigma1: np.ndarray, mu2: np.ndarray, sigma2: np.ndarray
) -> float:
    """Eigenvalues of the product, which is not symmetric."""
    return _distance(mu1, sigma1, mu2, sigma2, np.sqrt(eigvals(sigma1 @ sigma2)).real.sum())


def by_symmetric_root(mu1: np.ndarray, sigma1: np.ndarray, mu2: np.ndarray, sigma2: np.ndarray) -> float:
    """The symmetric root of one covariance by its eigenvectors, then eigenvalues."""
    values, vectors = np.linalg.eigh(sigma1)
    root = vectors * np.sqrt(values.clip(min=0)) @ vectors.T
    return _distance(
        mu1, sigma1, mu2, sigma2, np.sqrt(np.linalg.eigvalsh(root @ sigma2 @ root).clip(min=0)).sum()
    )


def by_singular_values(mu1: np.ndarray, sigma1: np.ndarray, mu2: np.ndarray, sigma2: np.ndarray) -> float:
    """Singular values of the product of both Cholesky factors; neither covariance may be singular."""
    factors = np.linalg.cholesky(sigma1).T @ np.linalg.cholesky(sigma2)
    return _distance(mu1, sigma1, mu2, sigma2, np.linalg.svd(factors, compute_uv=False).sum())


def _distance(
    mu1: np.ndarray, sigma1: np.ndarray, mu2: np.ndarray, sigma2: np.ndarray, trace_of_root: float
) -> float:
    return float(np.square(mu1 - mu2).sum() + np.trace(sigma1) + np.trace(sigma2) - 2 * trace_of_root)


def features(count: int, num_features: int, seed: int) -> torch.Tensor:
    """Draw features (count, num_features) fp32 that look like the network's: not negative, correlated, of
    falling variances.
    """
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(256, num_features, generator=torch.Generator().manual_seed(0)) / 16
    noise = torch.randn(count, num_features, generator=generator) * torch.logspace(0, -2, num_features)
    return 0.4 * (torch.randn(count, 256, generator=generator) @ mixing + noise + 0.02 * seed).relu()


def moments(count: int, num_features: int, seed: int) -> Moments:
    """Return mean and covariance of such features."""
    statistics = FeatureStatistics(num_features).update(features(count, num_features, seed))
    return statistics.mean.numpy(), statistics.covariance.numpy()


def main() -> None:
    """Measure, print and record."""
    device = start_process().device
    found = environment(device)
    rows = [
        {"setting": setting, **row}
        for setting, measure in plan(device, False, Path()).items()
        for row in measure()
    ]
    print(markdown(rows, COLUMNS))
    write_results("evaluation_speed", rows, found)


def plan(device: torch.device, tiny: bool, out: Path) -> dict[str, Callable[[], list[dict[str, Any]]]]:
    """Return what measures each part of scoring; see `benchmarks.gpu`."""
    sizes = TINY if tiny else Sizes()
    return {
        "network": partial(time_detector, device, sizes),
        "precision and recall": partial(time_precision_recall, device, sizes),
        "Frechet distance": partial(time_distances, device, sizes),
    }


def time_distances(device: torch.device, sizes: Sizes) -> list[dict[str, Any]]:
    """Time the ways to take the Frechet distance; always on the CPU, as in the suite."""
    ways: dict[str, Callable[..., float]] = {
        "evaluation.frechet_distance": frechet_distance,
        "scipy.linalg.sqrtm": by_square_root,
        "eigenvalues of the product": by_eigenvalues_of_product,
        "symmetric root": by_symmetric_root,
        "singular values": by_singular_values,
    }
    count, num_features = sizes.num_reference, sizes.num_features
    pair = (*moments(count, num_features, 1), *moments(count, num_features, 2))
    values = {name: way(*pair) for name, way in ways.items()}
    for name, value in values.items():
        assert np.isclose(value, values["scipy.linalg.sqrtm"], rtol=1e-6), (
            name,
            value,
            values["scipy.linalg.sqrtm"],
        )
    seconds = interleaved_seconds(
        {name: lambda way=way: way(*pair) for name, way in ways.items()}, device, sizes.repeats
    )
    singular = (*moments(num_features // 2, num_features, 1), *moments(count, num_features, 2))
    start = time.perf_counter()
    frechet_distance(*singular)
    once = time.perf_counter() - start
    rows = [measured(name, "s", times) for name, times in seconds.items()]
    return [*rows, measured("evaluation.frechet_distance, singular covariance", "s", once)]


def time_precision_recall(device: torch.device, sizes: Sizes) -> list[dict[str, Any]]:
    """Time precision and recall of the reference and the samples, once each way."""
    reference, samples = (
        features(count, sizes.num_features, seed)
        for seed, count in enumerate((sizes.num_reference, sizes.num_samples), 1)
    )
    rows = []
    for exact in (False, True):
        name = "distances in fp32" if exact else "distances by the fp16 rule"
        before = reset_peak(device)
        start = time.perf_counter()
        precision_recall(reference, samples, exact=exact, device=device)
        rows.append(measured(name, "s", time.perf_counter() - start))
        rows.append(measured(f"{name}, memory beside the features", "GiB", peak_gib(device) - before))
    return rows


def time_detector(device: torch.device, sizes: Sizes) -> list[dict[str, Any]]:
    """Time the network, in its default memory layout and in the other, and the resizing alone."""
    from torch_fidelity.interpolate_compat_tensorflow import interpolate_bilinear_2d_like_tensorflow1x

    shape = (sizes.batch_size, sizes.image_size, sizes.image_size, 3)
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "random.pth"
        torch.save(
            inception_v3(
                weights=None, num_classes=NUM_CLASSES, aux_logits=False, init_weights=False
            ).state_dict(),
            weights,
        )
        ours, contiguous, channels_last = (
            InceptionDetector(weights, device, allow_unpublished=True) for _ in range(3)
        )
    contiguous._network.to(memory_format=torch.contiguous_format)
    channels_last._network.to(memory_format=torch.channels_last)
    x = torch.from_numpy(images).permute(0, 3, 1, 2).to(device)
    ways = {
        "InceptionDetector": lambda: ours(images),
        "channels first": lambda: contiguous(images),
        "channels last": lambda: channels_last(images),
        "resizing alone": lambda: interpolate_bilinear_2d_like_tensorflow1x(
            x.float(), size=(299, 299), align_corners=False
        ),
    }
    seconds = interleaved_seconds(ways, device, sizes.repeats)
    return [
        measured(name, "images/s", [sizes.batch_size / t for t in times]) for name, times in seconds.items()
    ]


if __name__ == "__main__":
    main()
