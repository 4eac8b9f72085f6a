"""What `auto` and null resolve to on this machine."""

from typing import Any

import torch
from joblib import cpu_count

from builders.experiment import Experiment
from models import resolve_attention
from runtime.launcher import check_precision
from runtime.machine import bf16_speedup, can_compile, can_keep_freed_memory, has_fast_bf16


def resolve_auto(
    experiment: Experiment, saved: dict[str, Any], device: torch.device, num_processes: int
) -> dict[str, Any]:
    """Resolve what the configuration leaves open.

    Args:
        saved: what a resumed run was started with; it wins, except for micro-batches that the processes
            cannot share.
    """
    train, model, measured = experiment.train, experiment.model_node.arguments, {}
    precision, compiled = train.mixed_precision, train.compile
    if precision == "auto":
        if device.type == "cpu":
            measured["bf16_speedup"] = saved.get("bf16_speedup") or round(bf16_speedup(device), 2)
        precision = saved.get("mixed_precision") or ("bf16" if has_fast_bf16(device) else "no")
    if compiled == "auto":
        compiled = saved["compile"] if "compile" in saved else can_compile(device)
    micro_batch_size = train.micro_batch_size or saved.get("micro_batch_size") or train.batch_size
    if not train.micro_batch_size and train.batch_size % (micro_batch_size * num_processes):
        micro_batch_size = train.batch_size // num_processes
    if "attention" in model:
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        measured["attention"] = resolve_attention(model["attention"], device.type, dtype)
    keep = train.keep_freed_memory
    check_precision(f"train.mixed_precision={train.mixed_precision} gives {precision} here", precision)
    return {
        "mixed_precision": precision,
        "compile": compiled in (True, "true"),
        "micro_batch_size": micro_batch_size,
        "num_workers": min(train.num_workers, cpu_count()),
        "keep_freed_memory": can_keep_freed_memory(device) if keep == "auto" else keep == "true",
        **measured,
    }
