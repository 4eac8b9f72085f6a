"""Evaluators: evaluator.run(step) yields (key, number or picture). What they look at is given to them; they
build nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from tqdm import tqdm

from evaluation.detectors import DigitJudge, GlyphJudge
from evaluation.metrics import frechet_distance
from evaluation.pictures import save_grid, text_picture
from evaluation.statistics import FeatureStatistics

ImageSource = Callable[[int], tuple[np.ndarray, np.ndarray | None]]


class DenseLoss:
    """Training loss on held-out entries with all tokens in all layers: to watch a run, not to judge routed
    against dense.

    Every run draws the same noise for the same entries, so that steps and runs can be compared.

    Args:
        denoisers: key of the metric -> preconditioned network.
        loss_fn: the training loss.
        batches: gives this process's held-out batches: (index, latents, labels, loss masks or None), where
            the index seeds the draws.
        total: sums a tensor over all processes.
    """

    def __init__(
        self,
        denoisers: Mapping[str, nn.Module],
        loss_fn: Callable[..., torch.Tensor],
        batches: Callable[[], Iterator[tuple[int, torch.Tensor, torch.Tensor | None, torch.Tensor | None]]],
        total: Callable[[torch.Tensor], torch.Tensor],
    ):
        self.denoisers, self.loss_fn, self.batches, self.total = denoisers, loss_fn, batches, total

    @torch.no_grad()
    def run(self, step: int) -> Iterator[tuple[str, float]]:
        """Yield each denoiser's mean loss; it is in eval mode from then on."""
        for key, denoiser in self.denoisers.items():
            # and left so: a training step sets its network's mode itself, the average has no other
            denoiser.eval()
            sums = torch.zeros(
                2, dtype=torch.float64, device=next(denoiser.parameters()).device
            )  # of losses, of entries
            # The blocks are compiled for the shapes of training; here they run as they are written.
            with torch.compiler.set_stance("force_eager"):
                for index, latents, labels, masks in self.batches():
                    generator = torch.Generator(latents.device).manual_seed(index)
                    losses = self.loss_fn(denoiser, latents, labels, generator=generator, mask=masks)
                    sums[0] += losses.double().sum()
                    sums[1] += len(losses)
            loss, count = self.total(sums).tolist()
            yield key, loss / count


class SampleGrid:
    """Write a grid of samples as a PNG, and show the first of them in the terminal where they are small
    enough.

    Args:
        write: on the first process; the others only take part in the sampling.
    """

    def __init__(self, source: ImageSource, folder: Path, num_samples: int, columns: int, write: bool):
        self.source, self.folder, self.num_samples, self.columns, self.write = (
            source,
            folder,
            num_samples,
            columns,
            write,
        )

    def run(self, step: int) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the picture (height, width, C) uint8."""
        images, _ = self.source(self.num_samples)
        if self.write:
            file = self.folder / f"step_{step:08d}.png"
            try:
                yield "samples", save_grid(images, file, self.columns)
                tqdm.write(f"step {step}: samples in {file}\n{text_picture(images)}")
            except OSError as error:  # a full disk, say: a picture is no reason to end a training
                tqdm.write(f"warning: {file} could not be written: {error}\n{text_picture(images)}")


class FittedEvaluator:
    """Scores by a judge that is fitted on real images: distance in its features, and how many show the class
    of their label.

    A sibling says which judge: judge(images, labels) is fitted on them, and then gives (features (N, F),
    classes (N,)) of images; and the name of the distance.

    Args:
        reference: real training images (N, H, W, C) uint8 and their labels.
        source: gives images and labels.
        num_samples: how many `run` scores; None where only `score` and `compare` are asked.
        labels: of the samples, `random` or `balanced`.
    """

    judge: Callable[[np.ndarray, np.ndarray], Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]]
    distance: str

    def __init__(
        self,
        reference: tuple[np.ndarray, np.ndarray],
        source: Any = None,
        num_samples: int | None = None,
        labels: str = "random",
    ):
        self.source = None if source is None else source.with_labels(labels)
        self.num_samples = num_samples
        self._judge = self.judge(*reference)
        self._images_of_reference, self._labels_of_reference = reference
        self._reference = self._statistics(self._judge(reference[0])[0])

    def run(self, step: int) -> Iterator[tuple[str, float]]:
        """Generate and yield the scores."""
        yield from self.score(*self.source(self.num_samples)).items()

    def score(self, images: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """Return the scores of images (N, H, W, C) uint8 with labels (N,)."""
        features, classes = self._judge(images)
        statistics = self._statistics(features)
        distance = frechet_distance(
            statistics.mean, statistics.covariance, self._reference.mean, self._reference.covariance
        )
        return {self.distance: distance, "label_accuracy": float((classes == labels).mean())}

    def compare(
        self, images: np.ndarray, labels: np.ndarray, held_out: tuple[np.ndarray, np.ndarray] | None
    ) -> dict[str, dict[str, float]]:
        """Return the scores of samples, of class means and of real held-out images, each with its count."""
        rows = {"samples": (images, labels), "class means": self.class_means(len(images))}
        if held_out is not None:
            rows["held-out real"] = held_out
        return {name: {"n": len(row[0]), **self.score(*row)} for name, row in rows.items()}

    def class_means(self, num_samples: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the mean image of each class in turn: what a model that knows the classes and nothing else
        would draw.
        """
        images, labels = self._images_of_reference, self._labels_of_reference
        num_classes = labels.max() + 1
        means = np.stack(
            [images[labels == label].mean(axis=0).round().astype(np.uint8) for label in range(num_classes)]
        )
        classes = np.arange(num_samples) % num_classes
        return means[classes], classes

    def _statistics(self, features: np.ndarray) -> FeatureStatistics:
        return FeatureStatistics(features.shape[1]).update(features)


class DigitsEvaluator(FittedEvaluator):
    """Scores of generated digits, by their pixels and a support vector classifier."""

    judge, distance = DigitJudge, "fd_pixel"


class GlyphsEvaluator(FittedEvaluator):
    """Scores of generated glyphs, by a small convolutional classifier and its last hidden layer."""

    judge, distance = GlyphJudge, "fd_classifier"
