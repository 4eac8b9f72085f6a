"""What a user wants to see before a run starts, and what keeps it from starting."""

from dataclasses import replace
from typing import Any

import torch.nn as nn

from builders.estimate import COMPILED_AFTER_SEC, KEPT_AT_LEAST, LONG_SEC, TOO_LONG_SEC, Estimate
from data.classes import class_warnings, first_classes
from data.manifest import LatentManifest

GIB = 2**30


def summary(
    config: dict[str, Any],
    details: dict[str, Any],
    net: nn.Module,
    resumed_step: int,
    manifest: LatentManifest,
    takes: Estimate,
) -> str:
    """Describe a run before it starts."""
    train, resolved, cost = config["train"], details["resolved"], details["cost"]
    num_parameters = f"{sum(parameter.numel() for parameter in net.parameters()) / 1e6:.2f}M parameters"
    resumed = f", resumed at step {resumed_step}" if resumed_step else ""
    lines = [
        f"run        {config['output_dir']}{resumed}",
        *([f"recipe     {config['recipe']}"] if config["recipe"] else []),
        f"network    {num_parameters}, {len(net.blocks)} blocks, {net.num_tokens} tokens",
        f"cost       {cost['dense_forward_flops'] / 2e9:.3g} GMAC for one image and forward pass",
        *(f"route      {line}" for line in details["routes"]),
    ]
    if net.routes:
        lines.append(f"saving     {_saving(cost)}")
    if cost["fp32_slowdown"] != 1:
        lines.append(f"fp32 block {_fp32_block(cost)}")
    processes = f"{details['num_processes']} process(es) on {details['device']}"
    batch = f"{train['batch_size']} images, micro-batches of {resolved['micro_batch_size']}"
    lines += [
        f"batch      {batch}, {processes}, {resolved['num_workers']} reading ahead",
        f"precision  {_precision(resolved, details['tf32'])}",
    ]
    if details["device"] == "cpu":
        freed = "kept for the next one" if resolved["keep_freed_memory"] else "given back to the system"
        lines.append(f"memory     what a step frees is {freed} (train.keep_freed_memory)")
    if "note" in details["data"]:
        lines.append(f"data       {details['data']['note']}")
    if train["eval_every"] and not manifest.num_held_out:
        lines.append("evaluation no val_loss_dense: the data have no held-out entries (num_held_out)")
    lines += [f"changed    {change}" for change in details["changes"]]
    if "init_from" in details:
        lines.append(f"start      {_start(details['init_from'])}")
    if manifest.class_names:
        lines.append(f"classes    {first_classes(manifest)}")
    lines += _length(train, manifest, resumed_step, takes, resolved["compile"])
    lines.append(
        f"needs      {_gib(takes.weights)} of memory for weights, gradients, optimizer and average, at most "
        f"{_gib(takes.activations)} for activations, beside the program; {_gib(takes.checkpoints)} of disk "
        "for checkpoints"
    )
    lines.append(f'watch      python -m reports "runs=[{config["output_dir"]}]" refresh_sec=15')
    return "\n".join(lines)


def warnings(
    config: dict[str, Any],
    manifest: LatentManifest,
    takes: Estimate,
    steps: int,
    memory: int,
    disk: int,
) -> list[str]:
    """Warn of `steps` more steps with `memory` and `disk` bytes free."""
    train, found, num_trained = config["train"], class_warnings(manifest), manifest.num_trained
    if train["batch_size"] > num_trained:
        rule = f"a step sees some of the {num_trained} entries more than once"
        found.append(f"train.batch_size={train['batch_size']}: {rule}")
    found += shortages(train, takes, steps, memory, disk)
    return [f"warning: {line}" for line in found]


def check_resources(train: dict[str, Any], takes: Estimate, steps: int, memory: int, disk: int) -> None:
    """Check that `steps` more steps have the memory, the disk and the time that they take at least.

    Raises:
        ValueError: they do not, and `train.check_resources` is true.
    """
    surely = replace(takes, activations=int(takes.activations * KEPT_AT_LEAST))
    if shortages(train, surely, steps, memory, disk, TOO_LONG_SEC) and train["check_resources"]:
        found = "; ".join(shortages(train, takes, steps, memory, disk, TOO_LONG_SEC))
        raise ValueError(f"{found} (train.check_resources=false starts it all the same)")


def shortages(
    train: dict[str, Any], takes: Estimate, steps: int, memory: int, disk: int, long_sec: float = LONG_SEC
) -> list[str]:
    """Return a line for each of memory, disk and time that does not suffice for `steps` more steps.

    Args:
        memory: free bytes.
        disk: free bytes.
        long_sec: the most time.
    """
    found = []
    if takes.memory > memory:
        needed = f"about {_gib(takes.memory)} of memory are needed, {_gib(memory)} are free"
        found.append(f"{needed}: lower train.micro_batch_size, or choose a smaller model/size")
    if takes.checkpoints > disk:
        needed = f"about {_gib(takes.checkpoints)} of disk are needed for checkpoints, {_gib(disk)} are free"
        fewer = " or raise train.milestone_every" if train["milestone_every"] else ""
        found.append(f"{needed}: lower train.keep_last{fewer}")
    if (sec := steps * takes.step_sec) > long_sec:
        found.append(
            f"this would take about {duration(sec)} here: choose a smaller model/size or fewer steps"
        )
    return found


def duration(sec: float) -> str:
    """A time as one number for people."""
    for unit, size in (("days", 24 * 3600), ("h", 3600), ("min", 60)):
        if sec >= 2 * size:
            return f"{sec / size:.0f} {unit}"
    return f"{sec:.0f} s"


def _gib(num_bytes: int) -> str:
    size = num_bytes / GIB
    return f"{size:.0f} GiB" if size >= 10 else f"{size:.2g} GiB"


def _length(
    train: dict[str, Any], manifest: LatentManifest, resumed_step: int, takes: Estimate, compiled: bool
) -> list[str]:
    total_steps, batch_size = train["total_steps"], train["batch_size"]
    classes = f"{manifest.num_classes} classes" if manifest.num_classes else "no classes"
    entries = f"{manifest.num_trained} entries are trained on, {manifest.num_held_out} held out, {classes}"
    entries += ", mirror images, too" if manifest.hflip else ""
    epochs = f"{total_steps * batch_size / manifest.num_trained:.3g} epochs"
    start = COMPILED_AFTER_SEC * compiled
    left = total_steps - resumed_step
    time = f"about {duration(start + left * takes.step_sec)}"
    if train["sample_every"]:
        steps = min(left, train["sample_every"] - resumed_step % train["sample_every"])
        time += f", the first pictures after {duration(start + steps * takes.step_sec)}"
    return [
        f"data       {entries}",
        f"length     {total_steps} steps, {epochs}, checkpoint every {train['save_every']}: {time}",
        *(["           (the first step compiles the blocks: this can take a minute)"] if compiled else []),
    ]


def _precision(resolved: dict[str, Any], tf32: bool) -> str:
    autocast = "bf16 autocast" if resolved["mixed_precision"] == "bf16" else "no autocast"
    parts = ["fp32 weights", autocast, *(["TF32 for what is in fp32"] if tf32 else [])]
    parts.append(f"{'compiled' if resolved['compile'] else 'uncompiled'} blocks")
    parts += [f"{resolved['attention']} attention"] if "attention" in resolved else []
    return ", ".join(parts)


def _saving(cost: dict[str, float]) -> str:
    if cost["routed_training_flops"] == cost["dense_training_flops"]:
        return "none: the blocks of the windows process all tokens"
    ceiling = f"(if all tokens that may bypass these blocks did: {cost['ceiling']:.2f}x)"
    return (
        f"{cost['routed_forward_flops'] / 2e9:.3g} GMAC with routes: training steps can be "
        f"{cost['predicted_speedup']:.2f}x as fast by their FLOPs {ceiling}"
    )


def _fp32_block(cost: dict[str, float]) -> str:
    without = cost["dense_training_flops"] / cost["routed_training_flops"]
    return (
        f"outside autocast products take {cost['fp32_slowdown']:.1f}x as long here: without "
        f"model.fp32_after_route the steps could be {without:.2f}x as fast"
    )


def _start(init_from: dict[str, Any]) -> str:
    entry = f" ({init_from['entry']})" if init_from["entry"] else ""
    warning = (
        f". warning: they were trained as {init_from['precond']}: what time and output mean is learnt again"
    )
    table = "" if init_from["label_table"] else ", all but the table of labels"
    return f"weights of {init_from['file']}{entry}{table}" + (warning if init_from["other_objective"] else "")
