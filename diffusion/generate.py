"""Generate latents from seeds: one seed per sample, so that a sample does not depend on its batch or its process."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn as nn

from diffusion.guidance import guided_denoiser


def balanced_labels(num_samples: int, num_classes: int) -> torch.Tensor | None:
    """Return labels (num_samples,) that run through the classes in turn; None for an unconditional network."""
    return torch.arange(num_samples) % num_classes if num_classes else None


@torch.no_grad()
def generate(
    precond: nn.Module,
    sampler: Callable[..., torch.Tensor],
    *,
    seeds: Sequence[int],
    class_labels: torch.Tensor | None,
    batch_size: int,
    device: torch.device,
    guidance_scale: float = 1.0,
    process_index: int = 0,
    num_processes: int = 1,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (position of the first seed, latents (n, C, H, W) in fp32), n <= batch_size, for this process's batches.

    Args:
        precond: denoiser in eval mode; precond.net tells the shape of the latents and the null class.
        sampler: called as sampler(denoise, noise, randn_like=).
        seeds: one for each sample; it fixes the initial noise, bitwise, and the churn noise.
        class_labels: (len(seeds),) int64; None for an unconditional network.
    """
    net = precond.net
    shape = (net.in_channels, net.input_size, net.input_size)
    for start in range(process_index * batch_size, len(seeds), num_processes * batch_size):
        generators = [torch.Generator().manual_seed(seed) for seed in seeds[start : start + batch_size]]
        randn_like = partial(_randn_like, generators=generators)
        noise = randn_like(torch.empty(len(generators), *shape, device=device))  # (n, C, H, W)
        labels = None if class_labels is None else class_labels[start : start + batch_size].to(device)
        denoise = guided_denoiser(precond, labels, net.num_classes, guidance_scale)
        yield start, sampler(denoise, noise, randn_like=randn_like).float()


class ImageSource:
    """Generate images on all processes: source(num_samples) -> images (n, H, W, C) uint8 and balanced labels (n,).

    Args:
        decode: turns latents into images.
        gather: puts lists from all processes together.
        The others are those of `generate`.
    """

    def __init__(
        self,
        precond: nn.Module,
        sampler: Callable[..., torch.Tensor],
        decode: Callable[[torch.Tensor], np.ndarray],
        *,
        batch_size: int,
        device: torch.device,
        guidance_scale: float,
        process_index: int,
        num_processes: int,
        gather: Callable[[list], list],
    ):
        self.precond, self.sampler, self.decode, self.gather = precond.eval(), sampler, decode, gather
        self.batch_size, self.device, self.guidance_scale = batch_size, device, guidance_scale
        self.process_index, self.num_processes = process_index, num_processes

    def __call__(self, num_samples: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Return samples of the seeds 0..num_samples - 1, on every process."""
        labels = balanced_labels(num_samples, self.precond.net.num_classes)
        batches = generate(
            self.precond,
            self.sampler,
            seeds=range(num_samples),
            class_labels=labels,
            batch_size=self.batch_size,
            device=self.device,
            guidance_scale=self.guidance_scale,
            process_index=self.process_index,
            num_processes=self.num_processes,
        )
        parts = self.gather([(start, self.decode(latents)) for start, latents in batches])
        images = np.concatenate([part for _, part in sorted(parts, key=lambda part: part[0])])
        return images, None if labels is None else labels.numpy()


def _randn_like(x: torch.Tensor, generators: Sequence[torch.Generator]) -> torch.Tensor:
    # Drawn on the CPU, where a seed gives the same numbers on every machine.
    return torch.stack([torch.randn(x.shape[1:], generator=generator) for generator in generators]).to(x)
