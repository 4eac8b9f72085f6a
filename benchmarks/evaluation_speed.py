"""Time the Inception network, precision and recall; the stage `score` of `python -m benchmarks.gpu`."""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.results import Rows, measured
from evaluation import InceptionDetector, precision_recall
from evaluation.detectors.inception import NUM_POOL_FEATURES
from evaluation.detectors.random_weights import write_random_weights
from runtime.memory import peak_gib, reset_peak
from training.speed import interleaved_seconds

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


def plan(device: torch.device, tiny: bool) -> dict[str, Callable[[], Rows]]:
    """What measures each part of scoring; see `benchmarks.gpu`."""
    length, num_reference, num_samples = (64, 200, 400) if tiny else (NUM_POOL_FEATURES, 10_000, 50_000)
    batch_size, image_size, repeats = (2, 64, 1) if tiny else (64, 256, 3)
    return {
        "network": partial(time_detector, batch_size, image_size, device, repeats),
        "precision and recall": partial(time_precision_recall, num_reference, num_samples, length, device),
    }


def features(count: int, length: int, seed: int) -> torch.Tensor:
    """Draw features (count, length) like the network's: not negative, correlated, of falling variances."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(256, length, generator=torch.Generator().manual_seed(0)) / 16
    noise = torch.randn(count, length, generator=generator) * torch.logspace(0, -2, length)
    return 0.4 * (torch.randn(count, 256, generator=generator) @ mixing + noise + 0.02 * seed).relu()


def random_detectors(*devices: torch.device) -> list[InceptionDetector]:
    """The network with the same random weights on each device."""
    with tempfile.TemporaryDirectory() as folder:
        file = write_random_weights(Path(folder) / "random.pth")
        return [InceptionDetector(file, device, allow_unpublished=True) for device in devices]


def time_precision_recall(num_reference: int, num_samples: int, length: int, device: torch.device) -> Rows:
    """Time precision and recall of the reference and the samples, once each way."""
    reference, samples = features(num_reference, length, 1), features(num_samples, length, 2)
    rows = []
    for name, exact in (("distances by the fp16 rule", False), ("distances in fp32", True)):
        before, start = reset_peak(device), time.perf_counter()
        precision_recall(reference, samples, exact=exact, device=device)
        rows.append(measured(name, "s", time.perf_counter() - start))
        rows.append(measured(f"{name}, memory beside the features", "GiB", peak_gib(device) - before))
    return rows


def time_detector(batch_size: int, image_size: int, device: torch.device, repeats: int) -> Rows:
    """Time the network."""
    shape = (batch_size, image_size, image_size, 3)
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    (detector,) = random_detectors(device)
    (seconds,) = interleaved_seconds({"network": lambda: detector(images)}, device, repeats).values()
    return [measured("InceptionDetector", "images/s", *(batch_size / sec for sec in seconds))]
