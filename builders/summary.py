"""The summary that is printed when a run starts, its warnings, and the check of free resources."""

from typing import Any

from builders.auto import Resolved
from builders.estimate import Estimate
from builders.experiment import Experiment
from builders.schemas import TrainConfig
from data.manifest import LatentManifest, class_warnings, first_classes
from models.cost import Cost

GIB = 2**30
TOO_LONG_SEC = 30 * 24 * 3600


def summary(
    experiment: Experiment,
    resolved: Resolved,
    details: dict[str, Any],
    cost: Cost,
    resumed_step: int,
    manifest: LatentManifest,
    needs: Estimate,
) -> str:
    """Describe a run that starts or resumes; `details` is the content of its manifest."""
    train, net = experiment.train, experiment.meta_net
    num_parameters = f"{cost.num_parameters / 1e6:.2f}M parameters"
    resumed = f", resumed at step {resumed_step}" if resumed_step else ""
    lines = [
        f"run        {experiment.output_dir}{resumed}",
        f"network    {num_parameters}, {len(net.blocks)} blocks, {net.num_tokens} tokens",
        f"condition  {_condition(experiment)}",
        f"cost       {cost.dense_forward_flops / 2e9:.3g} GMAC per image and forward pass",
        *(f"route      {line}" for line in details["routes"]),
        *([f"speedup    {_speedup(cost)}"] if net.routes else []),
    ]
    processes = f"{details['num_processes']} process(es) on {details['device']}"
    processes += " that share the weights" if train.parallel != "ddp" else ""
    batch = f"{train.batch_size} images, micro-batches of {resolved.micro_batch_size}"
    lines += [
        f"batch      {batch}, {processes}, {resolved.num_workers or 'no'} data workers",
        f"precision  {_precision(resolved, details['tf32'])}",
    ]
    if details["device"] == "cpu":
        freed = "retained for the next step" if resolved.keep_freed_memory else "returned to the system"
        lines.append(f"memory     freed memory is {freed} (train.keep_freed_memory)")
    if train.eval_every and not manifest.num_held_out:
        lines.append("evaluation no val_loss_dense: the data have no held-out entries (num_held_out)")
    lines += [f"changed    {change}" for change in details["changes"]]
    if "init_from" in details:
        lines.append(f"start      {_start(details['init_from'])}")
    if manifest.class_names:
        lines.append(f"classes    {first_classes(manifest)}")
    lines += _length(train, manifest, resumed_step, needs)
    memory = f"{_gib(needs.memory)} of memory for weights, gradients, optimizer and average"
    lines.append(f"needs      {memory}; {_gib(needs.checkpoints)} of disk for checkpoints")
    lines.append(f'watch      python -m reports "runs=[{experiment.output_dir}]" refresh_sec=15')
    return "\n".join(lines)


def warnings(train: TrainConfig, manifest: LatentManifest, reads_text: bool) -> list[str]:
    """Warn about classes without images, captions that are not used, and batches larger than the data."""
    lines, num_trained = class_warnings(manifest), manifest.num_trained
    if manifest.text and not manifest.num_classes and not reads_text:
        lines.append("the captions of the data are not used: set model/conditioning=prefix or cross")
    if train.batch_size > num_trained:
        rule = f"each step uses some of the {num_trained} training entries more than once"
        lines.append(f"train.batch_size={train.batch_size}: {rule}")
    return lines


def check_resources(train: TrainConfig, needs: Estimate, steps: int, memory: int, disk: int) -> list[str]:
    """Return a line per resource that is too small: free bytes of memory and disk, or 30 days for `steps`.

    Raises:
        ValueError: a resource is too small, and `train.check_resources` is true.
    """
    problems = []
    if needs.memory > memory:
        needed = f"about {_gib(needs.memory)} of memory are needed, {_gib(memory)} are free"
        problems.append(f"{needed}: choose a smaller model/size")
    if needs.checkpoints > disk:
        needed = f"about {_gib(needs.checkpoints)} of disk are needed for checkpoints, {_gib(disk)} are free"
        fewer = " or raise train.milestone_every" if train.milestone_every else ""
        problems.append(f"{needed}: lower train.keep_last{fewer}")
    if (sec := steps * needs.step_sec) > TOO_LONG_SEC:
        rule = "choose a smaller model/size or fewer steps"
        problems.append(f"this would take about {duration(sec)} here: {rule}")
    if problems and train.check_resources:
        raise ValueError(f"{'; '.join(problems)} (train.check_resources=false starts the run anyway)")
    return problems


def duration(sec: float) -> str:
    """Format a time in the largest unit that is at least 2."""
    for unit, size in (("days", 24 * 3600), ("h", 3600), ("min", 60)):
        if sec >= 2 * size:
            return f"{sec / size:.0f} {unit}"
    return f"{sec:.0f} s"


def _gib(num_bytes: int) -> str:
    size = num_bytes / GIB
    return f"{size:.0f} GiB" if size >= 10 else f"{size:.2g} GiB"


def _condition(experiment: Experiment) -> str:
    """Describe what conditions the network."""
    net = experiment.meta_net
    if net.text is None:
        return f"{net.num_classes} classes" if net.num_classes else "none"
    is_prefix = experiment.written["model"]["conditioning"] == "prefix"
    way = "a prefix" if is_prefix else "keys of cross-attention"
    return f"captions of {net.text.num_tokens} tokens as {way}"


def _length(train: TrainConfig, manifest: LatentManifest, resumed_step: int, needs: Estimate) -> list[str]:
    total_steps = train.total_steps
    entries = f"{manifest.num_trained} training entries, {manifest.num_held_out} held out"
    entries += f", {manifest.contents}" + (", with horizontal flips" if manifest.hflip else "")
    epochs = f"{total_steps * train.batch_size / manifest.num_trained:.3g} epochs"
    time = duration((total_steps - resumed_step) * needs.step_sec)
    length = f"{total_steps} steps, {epochs}, a checkpoint every {train.save_every} steps: "
    length += f"about {time}, without compilation and pictures"
    return [f"data       {entries}", f"length     {length}"]


def _precision(resolved: Resolved, tf32: bool) -> str:
    autocast = "bf16 autocast" if resolved.bf16 else "no autocast"
    parts = ["fp32 weights", autocast, *(["TF32 for fp32 products"] if tf32 else [])]
    parts.append(f"{'compiled' if resolved.compile else 'uncompiled'} blocks")
    parts += [f"{resolved.attention} attention"] if resolved.attention else []
    return ", ".join(parts)


def _speedup(cost: Cost) -> str:
    if cost.routed_training_flops == cost.dense_training_flops:
        return "none: the blocks of the windows process all tokens"
    routed = f"a forward pass with routes takes {cost.routed_forward_flops / 2e9:.3g} GMAC"
    return f"{cost.predicted_speedup:.2f}x per step by FLOPs; {routed}"


def _start(init_from: dict[str, Any]) -> str:
    entry = f" ({init_from['entry']})" if init_from["entry"] else ""
    line = f"weights of {init_from['file']}{entry}"
    line += "" if init_from["label_table"] else ", without the table of labels"
    if init_from["other_objective"]:
        line += f". warning: they were trained as {init_from['precond']} and must learn time and output again"
    return line
