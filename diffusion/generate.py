"""Generate latents, each from a seed of its own: a sample does not depend on its batch or its rank."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import partial

import numpy as np
import torch

from diffusion.guidance import Branch, Evaluations, Guidance
from diffusion.objective import Precond
from runtime.launch import Launch

LABEL_STREAM, MASK_STREAM = 1, 2  # separate labels and masks from other draws of the same seed


def balanced_labels(num_samples: int, num_classes: int) -> torch.Tensor | None:
    """Return the classes in turn, (num_samples,); None for an unconditional network."""
    return torch.arange(num_samples) % num_classes if num_classes else None


def random_labels(seeds: Sequence[int], num_classes: int) -> torch.Tensor | None:
    """Return a label drawn uniformly from each seed alone; None for an unconditional network."""
    if not num_classes:
        return None
    return torch.tensor([np.random.default_rng([seed, LABEL_STREAM]).integers(num_classes) for seed in seeds])


@torch.no_grad()
def generate(
    precond: Precond,
    sampler: Callable[..., torch.Tensor],
    guidance: Guidance,
    *,
    seeds: Sequence[int],
    class_labels: torch.Tensor | None,
    batch_size: int,
    launch: Launch,
    bf16: bool = False,
    evaluations: Evaluations | None = None,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (position of the first seed, latents (n, C, H, W) in fp32), n <= batch_size, of this rank.

    Args:
        precond: in eval mode, around a bare backbone.
        sampler: called as sampler(denoise, noise, path, randn_like=).
        seeds: one for each sample; it fixes the initial noise, bitwise, and the noise that the sampler adds.
        class_labels: (len(seeds),) int64; None for an unconditional network.
        bf16: evaluate the network under bf16 autocast.
        evaluations: counts the forwards of images: one of a batch of n counts n times.
    """
    device = launch.device
    for start in range(launch.rank * batch_size, len(seeds), launch.world_size * batch_size):
        batch_seeds = seeds[start : start + batch_size]
        generators = [torch.Generator().manual_seed(seed) for seed in batch_seeds]
        mask_generators = [torch.Generator().manual_seed(_stream(seed, MASK_STREAM)) for seed in batch_seeds]
        randn_like = partial(_randn_like, generators=generators)
        noise = randn_like(torch.empty(len(generators), *precond.net.latent_shape, device=device))
        labels = None if class_labels is None else class_labels[start : start + batch_size].to(device)
        rand = partial(_rand, generators=mask_generators, device=device)
        counted: Evaluations = Counter()
        denoise = guidance(Branch(precond, labels, rand=rand, evaluations=counted))
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            latents = sampler(denoise, noise, precond.path, randn_like=randn_like).float()
        if evaluations is not None:
            evaluations.update({key: count * len(latents) for key, count in counted.items()})
        yield start, latents


class ImageSource:
    """Generate images on all ranks, from the seeds first_seed, first_seed + 1, ...

    Args:
        decode: turns latents into images (n, H, W, channels) uint8.
        labels: `balanced`: the classes in turn; `random`: drawn from the seeds.
        class_label: this class alone, in place of `labels`.
        The others are those of `generate`.
    """

    def __init__(
        self,
        precond: Precond,
        sampler: Callable[..., torch.Tensor],
        guidance: Guidance,
        decode: Callable[[torch.Tensor], np.ndarray],
        *,
        batch_size: int,
        launch: Launch,
        labels: str = "balanced",
        class_label: int | None = None,
        first_seed: int = 0,
        bf16: bool = False,
    ):
        self.precond, self.sampler, self.guidance, self.decode = precond.eval(), sampler, guidance, decode
        self.batch_size, self.launch, self.first_seed, self.bf16 = batch_size, launch, first_seed, bf16
        self._labels, self._class_label = labels, class_label
        self._evaluations, self._num_images = Counter(), 0

    def with_labels(self, labels: str) -> "ImageSource":
        """Return the same source with other labels."""
        other = copy(self)
        other._labels, other._evaluations, other._num_images = labels, Counter(), 0
        return other

    @property
    def image_shape(self) -> tuple[int, ...]:
        """(H, W, channels) of an image."""
        latent = torch.zeros(1, *self.precond.net.latent_shape, device=self.launch.device)
        return self.decode(latent).shape[1:]

    def seeds(self, num_samples: int) -> range:
        """Return the seed of each sample."""
        return range(self.first_seed, self.first_seed + num_samples)

    def labels(self, num_samples: int) -> torch.Tensor | None:
        """Return the label (num_samples,) of each sample; None for an unconditional network."""
        num_classes = self.precond.net.num_classes
        if self._class_label is not None:
            return torch.full((num_samples,), self._class_label)
        if self._labels == "random":
            return random_labels(self.seeds(num_samples), num_classes)
        return balanced_labels(num_samples, num_classes)

    @torch.no_grad()
    def batches(self, num_samples: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (position of the first, images) of this rank's batches."""
        batches = generate(
            self.precond,
            self.sampler,
            self.guidance,
            seeds=self.seeds(num_samples),
            class_labels=self.labels(num_samples),
            batch_size=self.batch_size,
            launch=self.launch,
            bf16=self.bf16,
            evaluations=self._evaluations,
        )
        for start, latents in batches:
            self._num_images += len(latents)
            yield start, self.decode(latents)

    def cost(self) -> dict[str, float] | None:
        """Return what an image of this rank cost so far, on average: evaluations of networks, and their
        FLOPs.

        None where this rank has drawn none.
        """
        if not self._num_images:
            return None
        num = self._evaluations.total()
        flops = sum(count * net.flops(kept).forward for (net, kept), count in self._evaluations.items())
        return {"network_evaluations": num / self._num_images, "flops": flops / self._num_images}

    def __call__(self, num_samples: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return all images (num_samples, H, W, channels) and labels (num_samples,), on every rank."""
        parts = self.launch.gather_items(list(self.batches(num_samples)))
        images = np.concatenate([part for _, part in sorted(parts, key=lambda part: part[0])])
        labels = self.labels(num_samples)
        return images, None if labels is None else labels.numpy()


def _stream(seed: int, stream: int) -> int:
    return int(np.random.SeedSequence([seed, stream]).generate_state(1, np.uint64)[0] >> 1)


def _rand(num: int, generators: Sequence[torch.Generator], device: torch.device) -> torch.Tensor:
    return torch.stack([torch.rand(num, generator=generator) for generator in generators]).to(device)


def _randn_like(x: torch.Tensor, generators: Sequence[torch.Generator]) -> torch.Tensor:
    # Drawn on the CPU, where a seed gives the same numbers on every machine.
    return torch.stack([torch.randn(x.shape[1:], generator=generator) for generator in generators]).to(x)
