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

# Index, latents, labels, loss masks.
Batch = tuple[int, torch.Tensor, torch.Tensor | None, torch.Tensor | None]
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

    num_values = 1  # V, of `measure`

    def __init__(
        self,
        denoisers: Mapping[str, nn.Module],
        loss_fn: Any,
        batches: Callable[[], Iterator[Batch]],
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
            sums = torch.zeros(1 + NUM_LEVELS, self.num_values + 1, dtype=torch.float64, device=self.device)
            # The blocks are compiled for the shapes of training; here they run eagerly.
            with torch.compiler.set_stance("force_eager"):
                for batch in self.batches():
                    index, latents, *_ = batch
                    generator = torch.Generator(latents.device).manual_seed(index)
                    t = self.loss_fn.draw_t(len(latents), generator, latents.device)
                    values = self.measure(denoiser, batch, t, generator).double()  # (N, V)
                    values = torch.cat([values, torch.ones_like(values[:, :1])], dim=1)
                    level = torch.bucketize(t.double(), self.edges)
                    per_level = values.new_zeros(NUM_LEVELS, values.shape[1]).index_add_(0, level, values)
                    sums += torch.cat([values.sum(dim=0, keepdim=True), per_level])
            overall, *per_level = self.total(sums).tolist()
            means |= self.scores(key, overall)
            levels = zip(self.medians, per_level, strict=True) if key in self.by_level else ()
            for t, level_sums in levels:
                if level_sums[-1]:
                    means |= {f"{k}/t={t:.2g}": value for k, value in self.scores(key, level_sums).items()}
        return means

    def measure(
        self, denoiser: Any, batch: Batch, t: torch.Tensor, generator: torch.Generator
    ) -> torch.Tensor:
        """Return the values (N, V) to sum over entries."""
        _, latents, labels, masks = batch
        return self.loss_fn(denoiser, latents, labels, t=t, generator=generator, mask=masks).unsqueeze(1)

    def scores(self, key: str, sums: Sequence[float]) -> dict[str, float]:
        """Return the scores from V sums and the number of entries."""
        return {key: sums[0] / sums[-1]}


class ExcessLoss(DenseLoss):
    """Compare a denoiser D with the optimal one, D*, on held-out entries with the noise of DenseLoss.

    `excess` is the mean loss against D* instead of the data. It estimates the loss minus the optimal loss,
    without the noise of the data. `sharpening` is <D - D*, g> / <g, g> in latents, with sums over entries and
    g = D*(class) - D*(no class): 0 for D*, and w - 1 for guidance of scale w.

    Args:
        posterior_mean: posterior_mean(x_t, alpha, sigma, class_labels or None) -> D*.
        others: loss_fn, batches, total and device, see DenseLoss.
    """

    num_values = 3

    def __init__(self, posterior_mean: Callable[..., torch.Tensor], denoiser: nn.Module, *others: Any):
        super().__init__({"excess": denoiser}, *others, by_level=["excess"])
        self.posterior_mean = posterior_mean

    @property
    def keys(self) -> list[str]:
        return ["excess", "sharpening"]

    def measure(
        self, denoiser: Any, batch: Batch, t: torch.Tensor, generator: torch.Generator
    ) -> torch.Tensor:
        _, latents, labels, _ = batch
        eps = torch.randn(latents.shape, generator=generator, device=latents.device)
        t_, path = t.view(-1, 1, 1, 1), denoiser.path
        alpha, sigma = path.alpha(t_), path.sigma(t_)
        x_t = alpha * latents.float() + sigma * eps
        best, any_class = (self.posterior_mean(x_t, alpha, sigma, classes) for classes in (labels, None))
        F_x = denoiser.predicted(denoiser.predict(x_t, t, labels)[0], x_t)
        # w |D - D*|^2: the loss whose target is D*, and the noise that leads from D* to x_t.
        error = self.loss_fn.error(denoiser, F_x, x_t, t_, best, (x_t - alpha * best) / sigma)
        off, g = denoiser.denoised(F_x, x_t, t) - best, best - any_class
        return torch.stack([error, off * g, g * g], dim=1).mean(dim=(2, 3, 4))  # (N, 3)

    def scores(self, key: str, sums: Sequence[float]) -> dict[str, float]:
        excess, along, squares, count = sums
        # <D - D*, g> / <g, g>, not defined with one class
        return {"excess": excess / count} | ({"sharpening": along / squares} if squares else {})


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
            for note in scores.notes():
                tqdm.write(note)
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
            save_over_time(self.folder, row_height(images, captions, self.columns))
        except OSError as error:  # or a damaged earlier picture
            tqdm.write(f"warning: {self.folder / OVER_TIME} could not be written: {error}")
        tqdm.write(f"step {step}: samples in {file}\n{text_picture(images)}")
        return {"samples": grid}
