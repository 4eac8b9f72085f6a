"""What scoring costs: the Frechet distance, precision and recall, and the Inception network.

    python -m benchmarks.evaluation_speed

Every way to take the Frechet distance is first checked to give the same number. The record goes to benchmarks/results/.
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from scipy.linalg import eigvals, sqrtm
from torchvision.models import inception_v3

from benchmarks.memory import peak_gib, reset_peak
from benchmarks.results import measured, write_results
from evaluation import FeatureStatistics, InceptionDetector, frechet_distance, precision_recall
from evaluation.inception import NUM_CLASSES, NUM_POOL_FEATURES
from training.machine import start_process
from training.provenance import environment
from training.speed import interleaved_seconds, speedup

REPEATS = 3
NUM_REFERENCE, NUM_SAMPLES, BATCH_SIZE, IMAGE_SIZE = 10_000, 50_000, 64, 256
CPU = torch.device("cpu")

Moments = tuple[np.ndarray, np.ndarray]


def by_square_root(mu1: np.ndarray, sigma1: np.ndarray, mu2: np.ndarray, sigma2: np.ndarray) -> float:
    """The matrix square root, as the original takes it."""
    return _distance(mu1, sigma1, mu2, sigma2, np.trace(sqrtm(sigma1 @ sigma2)).real)


def by_eigenvalues_of_product(mu1: np.ndarray, sigma1: np.ndarray, mu2: np.ndarray, sigma2: np.ndarray) -> float:
    """Eigenvalues of the product, which is not symmetric."""
    return _distance(mu1, sigma1, mu2, sigma2, np.sqrt(eigvals(sigma1 @ sigma2)).real.sum())


def by_symmetric_root(mu1: np.ndarray, sigma1: np.ndarray, mu2: np.ndarray, sigma2: np.ndarray) -> float:
    """The symmetric root of one covariance by its eigenvectors, then eigenvalues."""
    values, vectors = np.linalg.eigh(sigma1)
    root = vectors * np.sqrt(values.clip(min=0)) @ vectors.T
    return _distance(mu1, sigma1, mu2, sigma2, np.sqrt(np.linalg.eigvalsh(root @ sigma2 @ root).clip(min=0)).sum())


def by_singular_values(mu1: np.ndarray, sigma1: np.ndarray, mu2: np.ndarray, sigma2: np.ndarray) -> float:
    """Singular values of the product of both Cholesky factors; neither covariance may be singular."""
    factors = np.linalg.cholesky(sigma1).T @ np.linalg.cholesky(sigma2)
    return _distance(mu1, sigma1, mu2, sigma2, np.linalg.svd(factors, compute_uv=False).sum())


def _distance(mu1: np.ndarray, sigma1: np.ndarray, mu2: np.ndarray, sigma2: np.ndarray, trace_of_root: float) -> float:
    return float(np.square(mu1 - mu2).sum() + np.trace(sigma1) + np.trace(sigma2) - 2 * trace_of_root)


def features(count: int, seed: int) -> torch.Tensor:
    """Draw features (count, 2048) fp32 that look like the network's: not negative, correlated, of falling variances."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(256, NUM_POOL_FEATURES, generator=torch.Generator().manual_seed(0)) / 16
    noise = torch.randn(count, NUM_POOL_FEATURES, generator=generator) * torch.logspace(0, -2, NUM_POOL_FEATURES)
    return 0.4 * (torch.randn(count, 256, generator=generator) @ mixing + noise + 0.02 * seed).relu()


def moments(count: int, seed: int) -> Moments:
    """Return mean and covariance of such features."""
    statistics = FeatureStatistics(NUM_POOL_FEATURES).update(features(count, seed))
    return statistics.mean.numpy(), statistics.covariance.numpy()


def main() -> None:
    """Measure, print and record."""
    device = start_process().device
    found = environment(device)
    rows = [*time_distances(device), *time_precision_recall(device), *time_detector(device)]
    write_results("evaluation_speed", rows, found)


def time_distances(device: torch.device) -> list[dict[str, Any]]:
    """Time the ways to take the Frechet distance at 2048 dimensions; always on the CPU, as in the suite."""
    ways: dict[str, Callable[..., float]] = {
        "evaluation.frechet_distance": frechet_distance,
        "scipy.linalg.sqrtm": by_square_root,
        "eigenvalues of the product": by_eigenvalues_of_product,
        "symmetric root": by_symmetric_root,
        "singular values": by_singular_values,
    }
    pair = (*moments(NUM_REFERENCE, 1), *moments(NUM_REFERENCE, 2))
    values = {name: way(*pair) for name, way in ways.items()}
    for name, value in values.items():
        assert np.isclose(value, values["scipy.linalg.sqrtm"], rtol=1e-6), (name, value, values["scipy.linalg.sqrtm"])
    seconds = interleaved_seconds({name: lambda way=way: way(*pair) for name, way in ways.items()}, device, REPEATS)
    ours = seconds["evaluation.frechet_distance"]
    print(f"| Frechet distance, {NUM_POOL_FEATURES} features | seconds | ours is faster by |\n|---|--:|--:|")
    for name, times in seconds.items():
        print(f"| {name} | {median(times):.2f} | {speedup(times, ours):.1f}x |")
    singular = (*moments(NUM_POOL_FEATURES // 2, 1), *moments(NUM_REFERENCE, 2))
    start = time.perf_counter()
    frechet_distance(*singular)
    once = time.perf_counter() - start
    rows = [measured(f"Frechet distance: {name}", "s", times) for name, times in seconds.items()]
    return [*rows, measured("Frechet distance: evaluation.frechet_distance, singular covariance", "s", once)]


def time_precision_recall(device: torch.device) -> list[dict[str, Any]]:
    """Time precision and recall of 10,000 reference images and 50,000 samples, once each way."""
    reference, samples = features(NUM_REFERENCE, 1), features(NUM_SAMPLES, 2)
    rows = []
    for exact in (False, True):
        name = f"precision and recall: {'fp32' if exact else 'fp16 rule'}"
        before = reset_peak(CPU)
        start = time.perf_counter()
        precision, recall = precision_recall(reference, samples, exact=exact, device=device)
        rows.append(measured(name, "s", time.perf_counter() - start))
        rows.append(measured(f"{name}, beside the features", "GiB", peak_gib(CPU) - before))
        print(f"{name}, {NUM_REFERENCE:,} and {NUM_SAMPLES:,}: {precision} {recall}, {rows[-2]['median']:.0f} s")
    return rows


def time_detector(device: torch.device) -> list[dict[str, Any]]:
    """Time the network, in its default memory layout and in the other, and the resizing alone."""
    from torch_fidelity.interpolate_compat_tensorflow import interpolate_bilinear_2d_like_tensorflow1x

    images = np.random.default_rng(0).integers(0, 256, (BATCH_SIZE, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "random.pth"
        torch.save(
            inception_v3(weights=None, num_classes=NUM_CLASSES, aux_logits=False, init_weights=False).state_dict(), weights
        )
        ours, contiguous, channels_last = (InceptionDetector(weights, device, allow_unpublished=True) for _ in range(3))
    contiguous._network.to(memory_format=torch.contiguous_format)
    channels_last._network.to(memory_format=torch.channels_last)
    x = torch.from_numpy(images).permute(0, 3, 1, 2).to(device)
    ways = {
        "InceptionDetector": lambda: ours(images),
        "channels first": lambda: contiguous(images),
        "channels last": lambda: channels_last(images),
        "resizing alone": lambda: interpolate_bilinear_2d_like_tensorflow1x(x.float(), size=(299, 299), align_corners=False),
    }
    seconds = interleaved_seconds(ways, device, REPEATS)
    rows = [measured(f"detector: {name}", "images/s", [BATCH_SIZE / t for t in times]) for name, times in seconds.items()]
    print(f"| network, fp32, batch {BATCH_SIZE}, {IMAGE_SIZE}x{IMAGE_SIZE} | images per second |\n|---|--:|")
    for row in rows:
        print(f"| {row['what']} | {row['median']:.1f} |")
    return rows


if __name__ == "__main__":
    main()
