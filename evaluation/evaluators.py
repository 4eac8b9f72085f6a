"""Evaluators: evaluator(step) -> {key: number or picture}."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from tqdm import tqdm

from evaluation.features import extract, new_cache
from evaluation.pictures import OVER_TIME, row_height, save_grid, save_over_time, text_picture
from evaluation.suite import Suite
from runtime.launch import Launch

NUM_LEVELS, NUM_DRAWS = 5, 65536  # noise levels, equally likely in training; draws of t to find their limits


class DenseLoss:
    """Training loss on held-out entries, with all tokens in all layers.

    Every run draws the same noise for the same entries, so that steps and runs can be compared.

    Args:
        denoisers: key of the metric -> preconditioned network.
        loss_fn: the training loss.
        batches: yields this rank's held-out batches (index, latents, labels, loss masks or None); the index
            seeds the draws.
        total: sums a tensor over all ranks.
        by_level: keys whose loss is also returned for each noise level, as KEY/t=MEDIAN.
    """

    def __init__(
        self,
        denoisers: Mapping[str, nn.Module],
        loss_fn: Any,
        batches: Callable[[], Iterator[tuple[int, torch.Tensor, torch.Tensor | None, torch.Tensor | None]]],
        total: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device,
        by_level: Sequence[str] = (),
    ):
        self.denoisers, self.loss_fn, self.batches, self.total = denoisers, loss_fn, batches, total
        self.device, self.by_level = device, by_level
        generator = torch.Generator().manual_seed(0)
        t = loss_fn.draw_t(NUM_DRAWS, generator, torch.device("cpu")).double()
        shares = torch.arange(1, 2 * NUM_LEVELS) / (2 * NUM_LEVELS)
        quantiles = t.quantile(shares.double())
        self.medians, self.edges = quantiles[::2].tolist(), quantiles[1::2].contiguous().to(device)

    @property
    def keys(self) -> list[str]:
        """Keys of the losses over all noise levels."""
        return list(self.denoisers)

    def describe(self) -> dict[str, Any]:
        """Return the settings that the losses depend on."""
        return {"name": type(self).__name__, "keys": self.keys}

    @torch.no_grad()
    def __call__(self, step: int) -> dict[str, float]:
        """Return each denoiser's mean loss; leave the denoisers in eval mode."""
        means = {}
        for key, denoiser in self.denoisers.items():
            denoiser.eval()
            # Sum of losses and number of entries: first over all noise levels, then at each.
            sums = torch.zeros(1 + NUM_LEVELS, 2, dtype=torch.float64, device=self.device)
            # The blocks are compiled for the shapes of training; here they run eagerly.
            with torch.compiler.set_stance("force_eager"):
                for index, latents, labels, masks in self.batches():
                    generator = torch.Generator(latents.device).manual_seed(index)
                    t = self.loss_fn.draw_t(len(latents), generator, latents.device)
                    losses = self.loss_fn(denoiser, latents, labels, t=t, generator=generator, mask=masks)
                    sums[0] += torch.stack([losses.double().sum(), torch.tensor(len(losses)).to(losses)])
                    level = torch.bucketize(t.double(), self.edges)
                    sums[1:, 0].index_add_(0, level, losses.double())
                    sums[1:, 1] += level.bincount(minlength=NUM_LEVELS)
            overall, *per_level = self.total(sums).tolist()
            means[key] = overall[0] / overall[1]
            if key in self.by_level:
                levels = zip(self.medians, per_level, strict=True)
                means |= {f"{key}/t={t:.2g}": loss / count for t, (loss, count) in levels if count}
        return means


class ScoreSamples:
    """Draw samples and score them with a suite; print the suite's warnings the first time.

    Args:
        samples: draws the samples, see `builders.drawing.Drawing`.
        folder: for finished parts, so that an evaluation that was killed resumes.
    """

    def __init__(self, suite: Suite, samples: Any, folder: Path):
        self.suite, self.samples, self._folder, self._warned = suite, samples, folder, False
        suite.check(samples.count, samples.shape, "evaluation")

    @property
    def keys(self) -> list[str]:
        """Keys of the scores."""
        return self.suite.keys(self.samples.count)

    def describe(self) -> dict[str, Any]:
        """Return everything that the scores depend on."""
        return {**self.suite.describe(), "num_samples": self.samples.count, "labels": self.suite.labels}

    def __call__(self, step: int) -> dict[str, float]:
        """Return the scores, on the first rank."""
        key = {"step": step, **self.describe(), **self.samples.key(), **self.suite.detector_key()}
        cache = new_cache(self.samples, self._folder, key, replace=True)
        scores = self.suite.score(self.samples, self.samples.labels(), cache)
        if self.suite.launch.is_main:
            cache.remove()
        if not self._warned:
            for metric, reason in scores.left_out.items():
                tqdm.write(f"{metric} is left out: {reason}")
            for warning in scores.warnings:
                tqdm.write(f"note: {warning}")
        self._warned = True
        return scores.values


class SampleGrid:
    """Write a grid of samples and an overview of all steps as PNG; show small images in the terminal."""

    def __init__(self, samples: Any, folder: Path, columns: int, launch: Launch):
        self.samples, self.folder, self.columns, self._launch = samples, folder, columns, launch

    def describe(self) -> dict[str, Any]:
        """Return the settings that the picture depends on."""
        return {"name": type(self).__name__, "num_samples": self.samples.count}

    def __call__(self, step: int) -> dict[str, np.ndarray]:
        """Return the picture (height, width, C) uint8, on the first rank."""
        with torch.compiler.set_stance("force_eager"):  # the batch size differs from the scores'
            parts = extract(None, self.samples, launch=self._launch)
        if not self._launch.is_main:
            return {}
        images, labels = np.concatenate([part["images"] for part in parts]), self.samples.labels()
        file = self.folder / f"step_{step:08d}.png"
        try:
            captions = self.samples.captions(labels)
            grid = save_grid(images, file, self.columns, captions)
        except OSError as error:  # such as a full disk: the run continues without the picture
            tqdm.write(f"warning: {file} could not be written: {error}\n{text_picture(images)}")
            return {}
        try:
            save_over_time(self.folder, row_height(images, captions))
        except OSError as error:  # or a damaged earlier picture
            tqdm.write(f"warning: {self.folder / OVER_TIME} could not be written: {error}")
        tqdm.write(f"step {step}: samples in {file}\n{text_picture(images)}")
        return {"samples": grid}
