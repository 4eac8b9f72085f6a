"""Generate latents, each from its own seed, and decode them to images, in parts.

A sample depends on its seed alone: bitwise in parts of the same size, whichever process draws it.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from copy import copy
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from diffusion.guidance import Branch, Evaluations, Guidance
from diffusion.objective import Precond
from runtime.launch import Launch

LABEL_STREAM, MASK_STREAM = 1, 2  # separate labels and masks from other draws of the same seed


def random_labels(seeds: Sequence[int], num_classes: int) -> torch.Tensor:
    """Draw a label uniformly from each seed alone."""
    return torch.tensor([np.random.default_rng([seed, LABEL_STREAM]).integers(num_classes) for seed in seeds])


@torch.no_grad()
def generate(
    precond: Precond,
    sampler: Callable[..., torch.Tensor],
    guidance: Guidance,
    *,
    seeds: Sequence[int],
    class_labels: torch.Tensor | None,
    device: torch.device,
    bf16: bool = False,
    evaluations: Evaluations | None = None,
    counting_only: bool = False,
) -> torch.Tensor:
    """Generate a batch of latents (N, C, H, W) in fp32.

    Args:
        precond: in eval mode, around a bare backbone.
        sampler: called as sampler(denoise, noise, path, randn_like=).
        seeds: one for each sample; it fixes the initial noise, bitwise, and the noise added by the sampler.
        class_labels: (N,) int64; None for an unconditional network.
        bf16: evaluate the network under bf16 autocast.
        evaluations: counts the forwards of images: a forward of a batch of n counts n times.
        counting_only: no network runs, all predict 0.
    """
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    mask_seeds = [np.random.SeedSequence([s, MASK_STREAM]).generate_state(1, np.uint64)[0] for s in seeds]
    mask_generators = [torch.Generator().manual_seed(int(seed >> 1)) for seed in mask_seeds]
    randn_like = partial(_randn_like, generators=generators)
    noise = randn_like(torch.empty(len(generators), *precond.net.latent_shape, device=device))
    labels = None if class_labels is None else _to(class_labels, device)
    rand = partial(_rand, generators=mask_generators, device=device)
    counted: Evaluations = Counter()
    branch = Branch(precond, labels, rand=rand, evaluations=counted, counting_only=counting_only)
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        latents = sampler(guidance(branch), noise, precond.path, randn_like=randn_like)
    if evaluations is not None:
        evaluations.update({key: count * len(latents) for key, count in counted.items()})
    return latents.float()


class ImageSource:
    """Draw images from the seeds first_seed, first_seed + 1, ..., in parts of one batch.

    The last part is drawn whole and cut: a longer set begins with the shorter one, bit for bit, if both fill
    a batch.

    Args:
        decode: turns latents into images (n, H, W, channels) uint8.
        labels: `balanced`: the classes in turn; `random`: drawn from the seeds.
        class_label: this class alone, in place of `labels`.
        batch_size: number of images drawn together, a part.
        class_names: for captions; None: their numbers.
        classes: the trained classes, from which `labels` are taken; None: all.
        The other arguments are documented in `generate`.
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
        class_names: Sequence[str] | None = None,
        classes: Sequence[int] | None = None,
    ):
        self.precond, self.sampler, self.guidance, self.decode = precond.eval(), sampler, guidance, decode
        self.batch_size, self.launch, self.first_seed, self.bf16 = batch_size, launch, first_seed, bf16
        self._labels, self._class_label, self._class_names = labels, class_label, class_names
        self._classes = torch.as_tensor(range(precond.net.num_classes) if classes is None else classes)
        self._evaluations: Evaluations = Counter()
        self._cost: dict[str, float] | None = None
        self._stream: Any = None  # of the decoder, on a GPU

    def with_labels(self, labels: str) -> "ImageSource":
        other = copy(self)
        other._labels, other._evaluations, other._cost = labels, Counter(), None
        return other

    @cached_property
    def image_shape(self) -> tuple[int, ...]:
        """(H, W, channels) of an image."""
        latent = torch.zeros(1, *self.precond.net.latent_shape, device=self.launch.device)
        return self.decode(latent).shape[1:]

    def seeds(self, num_samples: int) -> range:
        return range(self.first_seed, self.first_seed + num_samples)

    def labels(self, num_samples: int, start: int = 0) -> torch.Tensor | None:
        """Labels of the samples from `start` to `num_samples`; None for an unconditional network."""
        if self._class_label is not None:
            return torch.full((num_samples - start,), self._class_label)
        if not len(self._classes):
            return None
        if self._labels == "random":
            return self._classes[random_labels(self.seeds(num_samples)[start:], len(self._classes))]
        return self._classes[torch.arange(start, num_samples) % len(self._classes)]

    def captions(self, labels: Iterable[int] | None) -> list[str] | None:
        """The class names of labels (N,); None for an unconditional network."""
        if labels is None:
            return None
        return [self._class_names[label] if self._class_names else str(label) for label in labels]

    def images(self, num_samples: int) -> "DrawnImages":
        return DrawnImages(self, num_samples)

    def part_size(self, num_samples: int) -> int:
        return min(self.batch_size, num_samples)

    def latents(self, start: int, batch_size: int, counting_only: bool = False) -> torch.Tensor:
        """The latents (batch_size, C, H, W) of the samples from `start` on."""
        end = start + batch_size
        return generate(
            self.precond,
            self.sampler,
            self.guidance,
            seeds=self.seeds(end)[start:],
            class_labels=self.labels(end, start),
            device=self.launch.device,
            bf16=self.bf16,
            evaluations=self._evaluations,
            counting_only=counting_only,
        )

    def batches(
        self, num_samples: int, batch_size: int, parts: Iterable[int]
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (part, images); on a GPU, one part is decoded while the next is drawn.

        Raises:
            ValueError: a sample is not finite.
        """
        drawn: tuple[int, Future, dict[str, float]] | None = None

        def finished() -> tuple[int, np.ndarray]:
            part, images, self._cost = drawn
            return part, images.result()

        with ThreadPoolExecutor(1) as pool:
            for part in parts:
                start = part * batch_size
                self._evaluations.clear()
                latents = self.latents(start, batch_size)
                cost = cost_of_evaluations(self._evaluations, batch_size)
                if drawn is not None:
                    yield finished()
                wanted = latents[: num_samples - start]
                computed = (
                    torch.cuda.current_stream(latents.device).record_event() if latents.is_cuda else None
                )
                drawn = part, pool.submit(self._decoded, wanted, start, computed), cost
                if not latents.is_cuda:  # already computed: a delay would risk two parts
                    yield finished()
                    drawn = None
            if drawn is not None:
                yield finished()

    @torch.no_grad()
    def _decoded(self, latents: torch.Tensor, start: int, event: Any) -> np.ndarray:
        with self._beside(event, latents.device):
            bad = ~latents.flatten(1).isfinite().all(dim=1).cpu()  # SYNC: with the draws before
            if bad.any():
                seed, rest = self.first_seed + start + int(bad.nonzero()[0]), int(bad.sum()) - 1
                others = f" and {rest} more of its part" if rest else ""
                precision = "bf16" if self.bf16 else "fp32"
                raise ValueError(
                    f"the sample of seed {seed}{others} is not finite (the network ran in {precision}): try "
                    "mixed_precision=no, another sampler or another checkpoint, and overwrite=true"
                )
            return self.decode(latents)

    def describe(self) -> dict[str, Any]:
        """Everything that the samples depend on, except settings of sampler, guidance and labels."""
        weights = hashlib.sha256()
        for net in dict.fromkeys(net for net, _ in self.count_evaluations()):
            for _, tensor in sorted(net.state_dict().items()):
                weights.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return {"weights": weights.hexdigest(), "first_seed": self.first_seed, "bf16": self.bf16}

    def _beside(self, event: Any, device: torch.device) -> Any:
        """A context whose work waits for an event alone, not for work queued after it."""
        if event is None:
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # this thread has no current device
        self._stream.wait_event(event)
        return torch.cuda.stream(self._stream)

    def count_evaluations(self) -> Evaluations:
        """Count the evaluations of one image by taking its steps without the network."""
        other = self.with_labels(self._labels)
        other.latents(0, 1, counting_only=True)
        return other._evaluations

    @torch.no_grad()
    def one_evaluation(self, batch_size: int) -> None:
        """Evaluate the network once for both branches of guidance, to measure memory and time."""
        device, shape = self.launch.device, self.precond.net.latent_shape
        labels = self.labels(1)
        labels = None if labels is None else labels.expand(2 * batch_size).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.bf16):
            t = torch.tensor(self.precond.path.t_max / 2, dtype=torch.float64)
            self.precond.predict(torch.zeros(2 * batch_size, *shape, device=device), t, labels)

    def cost(self) -> dict[str, float] | None:
        """Network evaluations and FLOPs of an image of the last part; None before the first."""
        return self._cost

    def __call__(self, num_samples: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Draw all images (num_samples, H, W, channels) and labels (num_samples,), on every rank."""
        size, launch = self.part_size(num_samples), self.launch
        mine = range(launch.rank, -(-num_samples // size), launch.world_size)
        parts = dict(launch.gather_items([*self.batches(num_samples, size, mine)]))
        labels = self.labels(num_samples)
        return np.concatenate([parts[i] for i in sorted(parts)]), None if labels is None else labels.numpy()


class DrawnImages:
    """Images drawn by a source, see `evaluation.features.Images`; `cost`: evaluations and FLOPs of one."""

    def __init__(self, source: ImageSource, count: int):
        self._source, self.count = source, count
        self.shape, self.part_size = source.image_shape, source.part_size(count)

    def batches(self, batch_size: int, parts: Iterable[int]) -> Iterator[tuple[int, np.ndarray]]:
        return self._source.batches(self.count, batch_size, parts)

    def cost(self) -> np.ndarray:
        return np.array([*self._source.cost().values()])


def cost_of_evaluations(evaluations: Evaluations, num_images: int) -> dict[str, float]:
    """Mean network evaluations and FLOPs of an image."""
    flops = sum(count * net.flops(kept).forward for (net, kept), count in evaluations.items())
    return {"network_evaluations": evaluations.total() / num_images, "flops": flops / num_images}


def _rand(num: int, generators: Sequence[torch.Generator], device: torch.device) -> torch.Tensor:
    return _to(torch.stack([torch.rand(num, generator=generator) for generator in generators]), device)


def _randn_like(x: torch.Tensor, generators: Sequence[torch.Generator]) -> torch.Tensor:
    # Drawn on the CPU, where a seed gives the same numbers on every machine.
    noise = torch.stack([torch.randn(x.shape[1:], generator=generator) for generator in generators])
    return _to(noise, x.device).to(x.dtype)


def _to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to a device without waiting for the work queued there."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
