"""Draw images in parts, with options that are resolved before the first image."""

import gc
import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from joblib import cpu_count

from diffusion import Guidance, Precond, generate, random_labels
from diffusion.generate import Evaluations, cost_of_evaluations, count_evaluations, expected_times
from evaluation.features import new_cache
from models import Backbone
from runtime.launch import Launch
from runtime.machine import (
    can_compile,
    can_keep_freed_memory,
    compile_blocks,
    has_fast_bf16,
    keep_freed_memory,
)
from runtime.parts import Part, PartCache, as_json, saved_key
from runtime.provenance import flatten, source_sha256

LEFT_OPEN = {"mixed_precision": "auto", "batch_size": None, "compile": "auto"}
PATHS = ("run", "checkpoint", "encoder.name", "prompts.file")  # not in the key: hashes identify the files
TOKENS_AT_ONCE = 4096  # on a CPU; larger batches are not faster (benchmarks/LOG.md)
MAX_BATCH, MEMORY_SHARE, PROBE_BATCH = 256, 0.25, 8
# Constants instead of measurements, so that every start of a job makes the same decision to compile.
FLOPS_PER_SEC = {"cpu": 7.5e10, "cuda": 2e14}  # of uncompiled blocks, per core or GPU
SAVED_SHARE = {"cpu": 0.35, "cuda": 0.3}  # share of the time that compiled blocks save
COMPILE_SEC = {"cpu": (15, 5), "cuda": (40, 20)}  # for the first sequence length, and each further one


@dataclass(frozen=True, eq=False)
class ImageModel:
    """A network with its sampler, guidance and decoder.

    Args:
        precond: the preconditioned backbone, without DDP; it is set to eval mode.
        decode: turns latents into images (n, H, W, channels) uint8.
        classes: the trained classes, or prompts; labels are drawn from them.
        class_names: for captions; None: use the numbers of the classes.
        encode_labels: turns labels (N,), or prompts, into the network's condition.
    """

    precond: Precond
    sampler: Callable[..., torch.Tensor]
    guidance: Guidance
    decode: Callable[[torch.Tensor], np.ndarray]
    device: torch.device
    classes: Sequence[int] | np.ndarray
    class_names: Sequence[str] | None = None
    encode_labels: Callable[[np.ndarray], torch.Tensor] = torch.from_numpy

    def __post_init__(self) -> None:
        self.precond.eval()

    @cached_property
    def image_shape(self) -> tuple[int, ...]:
        """(H, W, channels) of an image."""
        return self.decode(torch.zeros(1, *self.precond.net.latent_shape, device=self.device)).shape[1:]

    @cached_property
    def evaluations(self) -> Evaluations:
        """Network evaluations per image; an expected number for samplers with adaptive steps."""
        return count_evaluations(self.precond, self.guidance, expected_times(self.precond, self.sampler))

    @property
    def networks(self) -> list[Backbone]:
        """The networks that the sampler evaluates."""
        return [*dict.fromkeys(net for net, _ in self.evaluations)]

    @property
    def num_lengths(self) -> int:
        """Number of different sequence lengths in the blocks."""
        return len({length for net, kept in self.evaluations for length in (net.num_tokens, *kept)} - {0})

    @cached_property
    def compiled(self) -> "ImageModel":
        """This model with the blocks of its networks compiled in place."""
        gc.collect()  # compiled networks of earlier jobs of a sweep form reference cycles
        for net in self.networks:
            # One graph per length, with and without the second branch of guidance.
            compile_blocks(net.units, 2 * self.num_lengths)
        return self

    def is_worth_compiling(self, num_samples: int) -> bool:
        """True if compiled blocks save more time than the compilation takes."""
        kind = self.device.type
        if kind not in FLOPS_PER_SEC or not can_compile(self.device):
            return False
        flops = cost_of_evaluations(self.evaluations)["flops"] * num_samples
        sec = flops / FLOPS_PER_SEC[kind] / (cpu_count() if kind == "cpu" else 1)
        first, further = COMPILE_SEC[kind]
        return SAVED_SHARE[kind] * sec > first + further * (self.num_lengths - 1)

    def default_batch_size(self, bf16: bool) -> int:
        """Choose a batch size that fits the caches of a CPU, or a quarter of a GPU's memory."""
        if self.device.type != "cuda":
            return max(1, TOKENS_AT_ONCE // self.precond.net.num_tokens)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        net, t = self.precond.net, torch.tensor(self.precond.path.t_max / 2, dtype=torch.float64)
        x = torch.zeros(2 * PROBE_BATCH, *net.latent_shape, device=self.device)  # both branches of guidance
        labels = net.null_labels(len(x))
        with torch.no_grad(), torch.autocast(self.device.type, torch.bfloat16, enabled=bf16):
            self.precond.predict(x, t, labels)
        per_image = max(1, torch.cuda.max_memory_allocated(self.device) - before) / PROBE_BATCH
        room = MEMORY_SHARE * torch.cuda.get_device_properties(self.device).total_memory
        return min(MAX_BATCH, 2 ** int(np.log2(max(1, room / per_image))))


@dataclass(frozen=True)
class DrawOptions:
    """Options of drawing images. Sample i is drawn from seed first_seed + i.

    Args:
        batch_size: number of images that are drawn together, as one part.
        labels: `balanced`: the trained classes, or prompts, in turn; `random`: drawn from the seeds; None:
            class_label.
        class_label: draw images of this class only.
        mixed_precision: precision of the network, `bf16` or `no` (fp32).
        compile: compile the blocks.
    """

    num_samples: int
    batch_size: int
    first_seed: int = 0
    labels: str | None = "balanced"
    class_label: int | None = None
    mixed_precision: str = "no"
    compile: bool = False

    @classmethod
    def resolve(
        cls, request: Mapping[str, Any], model: ImageModel, saved: Mapping[str, Any], launch: Launch
    ) -> "DrawOptions":
        """Resolve a request; the result does not depend on the number of ranks.

        Args:
            request: values of the fields; the fields in LEFT_OPEN may be open.
            saved: the options of a job that resumes; they fill open fields.
        """
        values: dict[str, Any] = {key: request[key] for key in cls.__dataclass_fields__}
        for key, left_open in LEFT_OPEN.items():
            if values[key] == left_open:
                values[key] = saved.get(key)

        def decide() -> DrawOptions:
            precision = values["mixed_precision"] or ("bf16" if has_fast_bf16(model.device) else "no")
            batch_size = values["batch_size"] or model.default_batch_size(precision == "bf16")
            compiled = values["compile"]
            if compiled is None:
                compiled = model.is_worth_compiling(values["num_samples"])
            resolved: dict[str, Any] = {"mixed_precision": precision, "batch_size": batch_size}
            resolved["compile"] = compiled in (True, "true")
            return cls(**{**values, **resolved})

        if can_keep_freed_memory(launch.device):
            keep_freed_memory()
        return launch.broadcast_from_main(decide)

    @property
    def bf16(self) -> bool:
        return self.mixed_precision == "bf16"


class Drawing:
    """The images that a model draws with given options; implements `evaluation.features.Images`."""

    def __init__(self, model: ImageModel, options: DrawOptions):
        self.model, self.options = model, options
        self.count, self.part_size = options.num_samples, min(options.batch_size, options.num_samples)
        self._precision = "bf16" if options.bf16 else "fp32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.model.image_shape

    def __str__(self) -> str:
        return f"{self.count} images, {self.part_size} at a time, the network in {self._precision}"

    def labels(self, start: int = 0, end: int | None = None) -> np.ndarray | None:
        """Return the labels or prompts of samples `start` to `end`; None for an unconditional network."""
        end, classes, first = end or self.count, np.asarray(self.model.classes), self.options.first_seed
        if self.options.class_label is not None:
            return np.full(end - start, self.options.class_label)
        if not len(classes):
            return None
        if self.options.labels == "random":
            return classes[random_labels(range(first + start, first + end), len(classes)).numpy()]
        return classes[np.arange(start, end) % len(classes)]

    def captions(self, labels: np.ndarray | None) -> list[str] | None:
        """Return the class names of labels (N,), or the prompts; None for an unconditional network."""
        names = self.model.class_names
        return None if labels is None else [str(names[i] if names else i) for i in labels.tolist()]

    def key(self) -> dict[str, Any]:
        """Collect everything that the images depend on, except sampler, guidance and labels."""
        weights = hashlib.sha256()
        for net in self.model.networks:
            # state_dict would reshard gathered weights, and numpy would keep their memory.
            tensors: list[tuple[str, Any]] = [*net.named_parameters(), *net.named_buffers()]
            for _, tensor in sorted(tensors):
                copy = tensor.detach().to("cpu", copy=True).contiguous()
                weights.update(copy.reshape(-1).view(torch.uint8).numpy())
        options = {"first_seed": self.options.first_seed, "bf16": self.options.bf16}
        return {"weights": weights.hexdigest(), **options}

    def batches(self, batch_size: int, parts: Iterable[int]) -> Iterator[Part]:
        """Draw parts. On a GPU, a part is decoded while the next one is drawn.

        The last part is drawn in full size and cut: a longer set starts with the same images, bit for bit, if
        both sets fill a batch.

        Raises:
            ValueError: a sample is not finite.
        """
        device, decoding = self.model.device, deque[Future[Part]]()
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        with ThreadPoolExecutor(1) as pool:
            for part in parts:
                latents, cost = self.latents(part)
                event = None if stream is None else torch.cuda.current_stream(device).record_event()
                decoding.append(pool.submit(self._decode, part, latents, cost, stream, event))
                # On a CPU the latents are ready, and waiting would risk losing two parts.
                if len(decoding) > 1 or stream is None:
                    yield decoding.popleft().result()
            while decoding:
                yield decoding.popleft().result()

    def latents(self, part: int) -> tuple[torch.Tensor, np.ndarray]:
        """Draw the latents (part_size, C, H, W) of a part; return them with the cost per image."""
        model = self.model.compiled if self.options.compile else self.model
        start, end, first = part * self.part_size, (part + 1) * self.part_size, self.options.first_seed
        labels, times = self.labels(start, end), []
        latents = generate(
            model.precond,
            model.sampler,
            model.guidance,
            seeds=range(first + start, first + end),
            class_labels=None if labels is None else model.encode_labels(labels),
            device=model.device,
            bf16=self.options.bf16,
            times=times,
        )
        cost = cost_of_evaluations(count_evaluations(model.precond, model.guidance, times))
        return latents, np.array([*cost.values()])

    @torch.no_grad()
    def _decode(self, part: int, latents: torch.Tensor, cost: np.ndarray, stream: Any, event: Any) -> Part:
        # Runs in a thread; on a GPU in a separate stream, which waits for this part only.
        start = part * self.part_size
        if stream is not None:
            stream.wait_event(event)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            latents = latents[: self.count - start]
            bad = ~latents.flatten(1).isfinite().all(dim=1).cpu()  # SYNC: waits for the latents
            if not bad.any():
                return Part(part, self.model.decode(latents), cost)
        seed, rest = self.options.first_seed + start + int(bad.nonzero()[0]), int(bad.sum()) - 1
        others = f" and {rest} more of its part" if rest else ""
        what = f"the sample of seed {seed}{others} is not finite (the network ran in {self._precision})"
        remedy = "try mixed_precision=no, another sampler or another checkpoint, and overwrite=true"
        raise ValueError(f"{what}: {remedy}")


def cache_key(record: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Collect everything that a part of the samples depends on."""
    flat = {key: value for key, value in flatten(record).items() if key not in PATHS}
    return flat | {"code": source_sha256(), "torch": torch.__version__, "device": device.type}


def start_drawing(
    model: ImageModel,
    record: dict[str, Any],
    folder: Path,
    key: dict[str, Any],
    launch: Launch,
    overwrite: bool | None = None,
) -> tuple[Drawing, PartCache]:
    """Resolve the options of a record; return its images and the cache of their parts.

    Args:
        record: the request; the resolved options are added to it.
        folder: the folder of the parts; a job that was started there keeps its options.
        key: what the parts depend on, besides the resolved options.
        overwrite: replace parts with another key; None: the program has no key `overwrite` for them.
    """

    def read_saved() -> dict[str, Any]:
        with suppress(ValueError):  # damaged: `PartCache.start` refuses or replaces it
            saved, same = saved_key(folder), as_json(key)
            if all(saved.get(name) == same[name] for name in same.keys() - LEFT_OPEN.keys()):
                return saved
        return {}

    options = DrawOptions.resolve(record, model, launch.broadcast_from_main(read_saved), launch)
    record |= asdict(options)
    images, key = Drawing(model, options), key | {name: record[name] for name in LEFT_OPEN}
    hint = "remove the folder" if overwrite is None else "overwrite=true starts again"
    return images, new_cache(images, folder, key, None, hint, bool(overwrite))
