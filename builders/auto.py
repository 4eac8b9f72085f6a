"""Resolve options with the value `auto` or null on this machine."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from joblib import cpu_count

from builders.experiment import Experiment
from models import resolve_attention
from runtime.launcher import check_precision
from runtime.machine import can_compile, can_keep_freed_memory, has_fast_bf16


@dataclass(frozen=True)
class Resolved:
    """The resolved options of a run.

    Args:
        attention: None: the network does not have this option.
    """

    mixed_precision: str
    compile: bool
    micro_batch_size: int
    num_workers: int
    keep_freed_memory: bool
    attention: str | None = None

    @property
    def bf16(self) -> bool:
        return self.mixed_precision == "bf16"

    def record(self) -> dict[str, Any]:
        """Return the fields for the run's manifest."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def resolve_auto(
    experiment: Experiment, saved: dict[str, Any], device: torch.device, num_processes: int
) -> Resolved:
    """Resolve the open options of an experiment.

    Args:
        saved: the options that a resumed run was started with. They are used again, except for a micro-batch
            size that does not fit the number of processes.
    """
    train, precision = experiment.train, experiment.train.mixed_precision
    if precision == "auto":
        precision = saved.get("mixed_precision") or ("bf16" if has_fast_bf16(device) else "no")
    check_precision(f"train.mixed_precision={train.mixed_precision} gives {precision} here", precision)
    compiled, keep = train.compile == "true", train.keep_freed_memory == "true"
    if train.compile == "auto":
        compiled = saved["compile"] if "compile" in saved else can_compile(device)
    if train.keep_freed_memory == "auto":
        keep = can_keep_freed_memory(device)
    micro_batch_size = train.micro_batch_size or saved.get("micro_batch_size") or train.batch_size
    if not train.micro_batch_size and train.batch_size % (micro_batch_size * num_processes):
        micro_batch_size = train.batch_size // num_processes
    attention, dtype = None, torch.bfloat16 if precision == "bf16" else torch.float32
    if (option := experiment.model_node.arguments.get("attention")) is not None:
        attention = resolve_attention(option, device.type, dtype)
    num_workers = min(train.num_workers, cpu_count())
    return Resolved(precision, compiled, micro_batch_size, num_workers, keep, attention)
