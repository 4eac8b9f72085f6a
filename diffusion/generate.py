"""Generate latents, each from its own seed, and count the network evaluations that they take.

A sample depends only on its seed, and is bitwise reproducible in batches of the same size.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffusion.guidance import Branch, Guidance
from diffusion.guidance.guidance import inputs_of
from diffusion.objective import Precond

LABEL_STREAM, MASK_STREAM = 1, 2  # separate labels and masks from other draws of the same seed
# Number of evaluations for one image, by network and number of tokens that each route keeps.
Evaluations = Counter[tuple[Any, tuple[int, ...]]]


def random_labels(seeds: Sequence[int], num_classes: int) -> Tensor:
    """Draw one uniform label (N,) int64 from each seed."""
    return torch.tensor([np.random.default_rng([seed, LABEL_STREAM]).integers(num_classes) for seed in seeds])


@torch.no_grad()
def generate(
    precond: Precond,
    sampler: Callable[..., Tensor],
    guidance: Guidance,
    *,
    seeds: Sequence[int],
    class_labels: Tensor | None,
    device: torch.device,
    bf16: bool = False,
    times: list[Tensor] | None = None,
) -> Tensor:
    """Generate a batch of latents (N, C, H, W) in fp32.

    Args:
        precond: in eval mode, around a bare backbone.
        sampler: called as sampler(denoise, noise, path, randn_like=).
        seeds: one per sample; it fixes the initial noise, bitwise, and the noise that the sampler adds.
        class_labels: (N,) int64, or captions; None for an unconditional network.
        bf16: evaluate the network under bf16 autocast.
        times: list to which the times of the evaluations are appended, see `count_evaluations`.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    mask_seeds = [np.random.SeedSequence([s, MASK_STREAM]).generate_state(1, np.uint64)[0] for s in seeds]
    mask_generators = [torch.Generator().manual_seed(int(seed >> 1)) for seed in mask_seeds]
    randn_like = partial(_randn_like, generators=generators)
    noise = randn_like(torch.empty(len(generators), *precond.net.latent_shape, device=device))
    labels = None if class_labels is None else _to(class_labels, device)

    def rand(num: int) -> Tensor:
        return _to(torch.stack([torch.rand(num, generator=g) for g in mask_generators]), device)

    guided = guidance(Branch(precond, labels, rand=rand))

    def denoise(x: Tensor, t: Tensor, *, with_variance: bool = False) -> Any:
        if times is not None:
            times.append(t)
        return guided(x, t, with_variance=with_variance)

    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        return sampler(denoise, noise, precond.path, randn_like=randn_like).float()


@torch.no_grad()
def expected_times(precond: Precond, sampler: Callable[..., Tensor]) -> list[Tensor]:
    """Return the times at which a sampler evaluates the network.

    They are recorded for a network that predicts 0. With adaptive steps, other networks get other times.
    """
    times = []

    def denoise(x: Tensor, t: Tensor, *, with_variance: bool = False) -> Any:
        times.append(t)
        F_x = torch.cat([torch.zeros_like(x, dtype=precond.dtype)] * 2, dim=1)  # 2C channels: with a variance
        D_x = precond.denoised(F_x, x, t)
        return (D_x, precond.learned_variance(F_x, x)) if with_variance else D_x

    noise = torch.randn(1, *precond.net.latent_shape, generator=torch.Generator().manual_seed(0))
    sampler(denoise, noise, precond.path, randn_like=torch.zeros_like)
    return times


def count_evaluations(precond: Precond, guidance: Guidance, times: Iterable[Tensor]) -> Evaluations:
    """Count the evaluations for one image at the times of a sampler."""
    strong = Branch(precond, precond.net.null_labels(1))
    branches = ({inputs_of(b): b for b in guidance.branches_at(strong, t)[1]}.values() for t in times)
    return Counter((branch.precond.net, branch.num_kept) for branch in chain.from_iterable(branches))


def cost_of_evaluations(evaluations: Evaluations) -> dict[str, float]:
    """Return the network evaluations and the FLOPs for one image."""
    flops = sum(count * net.flops(kept).forward for (net, kept), count in evaluations.items())
    return {"network_evaluations": float(evaluations.total()), "flops": float(flops)}


def _randn_like(x: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    # Drawn on the CPU, where a seed gives the same numbers on every machine.
    noise = torch.stack([torch.randn(x.shape[1:], generator=generator) for generator in generators])
    return _to(noise, x.device).to(x.dtype)


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device without waiting for the work queued there."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
