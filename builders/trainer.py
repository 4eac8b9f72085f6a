"""Build the trainer of an experiment; a run with checkpoints resumes from the newest."""

from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs
from torch.utils.flop_counter import FlopCounterMode

from builders.auto import Resolved, resolve_auto
from builders.estimate import Estimate, bytes_in_memory, estimate, free_disk, free_memory, sharing_processes
from builders.evaluators import build_evaluators, check_sweep_metric
from builders.experiment import Experiment
from builders.public import carries_configuration, num_heads_of, precond_of
from builders.schemas import OBJECTIVES_OF_OTHERS, TrainConfig
from builders.summary import check_resources, summary, warnings
from data import LatentDataset, PatchEncoder, encoder_for, entries_by_step, image_decoder, stream
from models import Backbone, cost_of
from models.cost import Cost
from runtime.config import chosen_overrides
from runtime.files import sha256
from runtime.launch import Launch
from runtime.machine import compile_blocks, keep_freed_memory
from runtime.provenance import environment, flatten
from training.alignment import Alignment
from training.batches import Batches
from training.checkpoint import CheckpointFolder, latest_checkpoint
from training.ema import networks_of
from training.recorder import Recorder
from training.run_folder import RunFolder, changes
from training.sharding import check_parallel, shard
from training.speed import fp32_slowdown, most_graphs, specified_peak
from training.stopping import StopRequest
from training.trainer import Settings, Trainer
from training.weights import LABEL_TABLE, find_mismatch, is_own_checkpoint, load_weights, read_weights
from training.window import Work

INIT_KEYS = "data.in_channels, model/size, model/block, model.num_prefix_tokens, model.learn_sigma, "
INIT_KEYS += "model.inner_head, model.head_width, model/conditioning"


def check_files(experiment: Experiment, run: RunFolder) -> None:
    """Check the files that a training needs, before any device is touched."""
    train = experiment.train
    if train.init_from and not latest_checkpoint(run.path):
        check_init_from(train.init_from, train.init_from_objective)
        check_init_shapes(experiment)
    alignment = experiment.alignment()
    if alignment and alignment.encoder and not Path(alignment.weights or "").is_file():
        rule = f"must be the safetensors file of alignment.encoder={alignment.encoder}"
        raise FileNotFoundError(f"alignment.weights={alignment.weights} {rule}")
    suite = experiment.evaluation.arguments if experiment.evaluation else {}
    for key in ("reference", "weights"):
        if (file := suite.get(key)) is not None and not Path(str(file)).exists():
            raise FileNotFoundError(f"evaluation.{key}={file} not found: see `python -m evaluation.fetch`")


def check_init_from(source: str, objective: str | None) -> None:
    """Check that the weights to start from exist, and that their objective is known."""
    try:
        is_ours = is_own_checkpoint(source) or carries_configuration(Path(source))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"train.init_from={error}") from error
    if is_ours and objective:
        rule = f"must not be given for weights of this project, {source}"
        raise ValueError(f"train.init_from_objective={objective} {rule}")
    if not is_ours and objective is None:
        rule = f"does not say what it predicts: give train.init_from_objective={OBJECTIVES_OF_OTHERS}"
        raise ValueError(f"train.init_from={source} {rule}")


def check_init_shapes(experiment: Experiment) -> None:
    """Check that the weights to start from fit the network, its heads and its classes."""
    train, num_classes, init_from = experiment.train, experiment.num_classes, str(experiment.train.init_from)
    num_heads = experiment.model_node.arguments.get("num_heads")
    source, with_labels = f"train.init_from={init_from}", train.init_from_label_table
    without = "train.init_from_label_table=false, which loads all weights except the table of labels"
    try:
        weights = read_weights(init_from, shapes_only=True)
        mismatch = find_mismatch(experiment.meta_net, weights, with_labels)
        source_heads = num_heads_of(weights, train.init_from_objective)
    except ValueError as error:
        raise ValueError(f"train.init_from={error}") from error
    if mismatch is not None:
        hint = f"{INIT_KEYS} must be the same"
        if mismatch.startswith(LABEL_TABLE):
            hint = f"data.num_classes={num_classes} must be the same, or {without}"
        raise ValueError(f"{source}: weights do not match the model: {mismatch}; {hint}")
    # Shapes do not determine heads and classes.
    if source_heads not in (None, num_heads):
        raise ValueError(f"model.num_heads={num_heads} must be {source_heads}, as in {source}")
    if weights.num_classes not in (None, num_classes) and LABEL_TABLE in weights.tensors and with_labels:
        rule = f"must be {weights.num_classes}, as {source} says, or {without}"
        raise ValueError(f"data.num_classes={num_classes} {rule}")


def build_trainer(experiment: Experiment, run: RunFolder, dataset: LatentDataset, launch: Launch) -> Trainer:
    """Build the parts of a run, load its newest checkpoint if it has one, and then start to write.

    The folder must be locked.
    """
    train, device = experiment.train, launch.device
    check_parallel("train.parallel", train.parallel, launch.world_size)
    resolved, memory = _resolve(experiment, run, launch), free_memory(launch)
    # Check the memory before the network takes it.
    least = Estimate(0.0, bytes_in_memory(experiment, launch.world_size), 0)
    launch.broadcast_from_main(lambda: check_resources(train, least, 0, memory, 0))

    torch.manual_seed(experiment.seed)
    net = experiment.net().to(device)
    init_from = _load_init(net, experiment, run)
    alignment = _attach_alignment(experiment, net, dataset, device)
    ema, plan = experiment.ema(net), experiment.route_plan(net)
    lengths = plan.lengths(train.masked_loss)
    lengths |= {net.num_tokens - length for length in lengths}  # model.window=separate has both
    prepared = _prepare(net, networks_of(ema), resolved.compile, len(lengths), train, launch)
    precond, bare_loss = experiment.precond(prepared), experiment.loss(net)
    loss = torch.autocast(device.type, torch.bfloat16, enabled=resolved.bf16)(bare_loss)
    optimizer = experiment.optimizer(net.named_parameters())

    recorder = Recorder(launch, run)
    evaluators = build_evaluators(experiment, run, dataset, launch, net, ema.net, bare_loss, resolved)
    check_sweep_metric(experiment.sweep_metric, evaluators)
    batches = _build_batches(experiment, resolved, dataset, recorder, alignment)
    cost = cache(partial(cost_of, net, fp32_slowdown=fp32_slowdown(net, device, resolved.bf16)))

    trainer = Trainer(
        *(launch, net, precond, loss, optimizer, ema, plan, batches, evaluators, recorder),
        CheckpointFolder(run.path / "checkpoints", train.keep_last, train.milestone_every, launch),
        StopRequest(train.max_time_sec),
        Settings(**{field.name: getattr(train, field.name) for field in fields(Settings)}),
        Work(lambda ratios: cost(ratios).routed_training_flops, specified_peak(device, resolved.bf16)),
        alignment,
    )
    trainer.resume_newest()
    launch.barrier()  # all ranks have read the files that the first rank changes
    expected = cost(mask_coverage=experiment.mask_coverage(dataset))
    start = partial(_start_writing, experiment, resolved, trainer, dataset, run, init_from, expected, memory)
    launch.broadcast_from_main(start)
    return trainer


def _attach_alignment(
    experiment: Experiment, net: Backbone, dataset: LatentDataset, device: torch.device
) -> Alignment | None:
    """Build the alignment with its projector, and its encoder if it computes features at each step."""
    if (alignment := experiment.alignment()) is None:
        return None
    shape, manifest, flops = (dataset.manifest.features or {}).get("shape"), dataset.manifest, 0
    if name := alignment.encoder:
        with torch.random.fork_rng(devices=[]):  # networks draw weights before they load them
            autoencoder = encoder_for(manifest, device, dataset.encoder)
            encoder = PatchEncoder(name, str(alignment.weights), device)
        encoder.shape(manifest.input_size * autoencoder.factor)  # refuses sides that do not fit
        decode = image_decoder(manifest, autoencoder)
        alignment.encode = lambda x: encoder(torch.from_numpy(decode(x)).permute(0, 3, 1, 2))
        with FlopCounterMode(display=False) as counted:
            shape = alignment.encode(torch.zeros(1, *net.latent_shape, device=device)).shape[1:]
        flops = counted.get_total_flops()
    with device:
        alignment.attach(net, shape, flops)
    return alignment


def _resolve(experiment: Experiment, run: RunFolder, launch: Launch) -> Resolved:
    """Resolve the open options on the first rank for all."""
    saved = run.manifest()["resolved"] if run.has_results() else {}
    resolve = partial(resolve_auto, experiment, saved, launch.device, launch.world_size)
    resolved = launch.broadcast_from_main(resolve)
    if resolved.keep_freed_memory:
        keep_freed_memory()
    return resolved


def _start_writing(
    experiment: Experiment,
    resolved: Resolved,
    trainer: Trainer,
    dataset: LatentDataset,
    run: RunFolder,
    init_from: dict[str, Any] | None,
    cost: Cost,
    memory: int,
) -> None:
    """Record the start of a run, and print its summary."""
    train, launch, evaluators = experiment.train, trainer.launch, trainer.evaluators
    details = {
        "resolved": resolved.record(),
        "num_processes": launch.world_size,
        "parallel": train.parallel + (", bf16 sums" if train.reduce_dtype == "bf16" else ""),
        **environment(launch.device),
        "overrides": chosen_overrides(),
        "routes": trainer.route_plan.describe(train.masked_loss),
        "cost": asdict(cost),
        "data": dataset.describe(),
        **({"init_from": init_from} if init_from else {}),
        "scores": [evaluator.describe() for _, evaluator in evaluators],
    }
    details["changes"] = changes(run.manifest(), details) if trainer.step else []
    needs = estimate(experiment, resolved, cost, launch)
    remaining, disk = train.total_steps - trainer.step, free_disk(trainer.checkpoints.folder)
    problems = check_resources(train, needs, remaining, memory, disk)
    run.record_start(experiment.written, details, trainer.step)
    tracker = experiment.tracker and experiment.tracker.bind()()
    trainer.recorder.open(tracker, flatten(experiment.written))
    print(summary(experiment, resolved, details, cost, trainer.step, dataset.manifest, needs), flush=True)
    for line in (*warnings(train, dataset.manifest, experiment.takes_text), *problems):
        print(f"warning: {line}", flush=True)


def _load_init(net: nn.Module, experiment: Experiment, run: RunFolder) -> dict[str, Any] | None:
    train = experiment.train
    if not train.init_from or latest_checkpoint(run.path):
        return None
    label_table = train.init_from_label_table
    loaded = {**load_weights(net, train.init_from, label_table), "label_table": label_table}
    file = Path(loaded["file"])
    source, target = precond_of(file, train.init_from_objective).written, experiment.precond_node.written
    return {**loaded, "precond": source, "other_objective": source != target, "sha256": sha256(file)}


def _prepare(
    net: Backbone,
    averages: Sequence[Any],
    compiled: bool,
    num_lengths: int,
    train: TrainConfig,
    launch: Launch,
) -> nn.Module:
    # A sweep runs its jobs in one process: reset the state of the last job.
    AcceleratorState._reset_state()
    torch._dynamo.reset()
    if compiled:
        torch._dynamo.config.recompile_limit = 0
        compile_blocks(net.units, most_graphs(num_lengths))
    if train.parallel != "ddp":
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[train.reduce_dtype]
        for network in (net, *averages):
            shard(network, network.units, launch, sharing_processes(train, launch.world_size), dtype)
        return net
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    # The loss has its own autocast: the one of accelerate would stay on in evaluations.
    return Accelerator(mixed_precision="no", kwargs_handlers=[ddp]).prepare_model(net)


def _build_batches(
    experiment: Experiment,
    resolved: Resolved,
    dataset: LatentDataset,
    recorder: Recorder,
    alignment: Alignment | None,
) -> Batches:
    launch, seed, masked = recorder.launch, experiment.seed, experiment.train.masked_loss
    sizes = {"batch_size": experiment.train.batch_size, "micro_batch_size": resolved.micro_batch_size}
    masks_to_tokens = experiment.token_mask()
    read = partial(
        stream,
        dataset,
        seed=seed,
        **sizes,
        rank=launch.rank,
        world_size=launch.world_size,
        num_workers=resolved.num_workers,
        pin_memory=launch.device.type == "cuda",
        with_masks=masked,
        token_mask=masks_to_tokens if experiment.routing.force_keep_overflow == "grow" else None,
        with_features=alignment is not None and alignment.needs_features and alignment.encoder is None,
        with_text=experiment.takes_text,
    )
    entries = entries_by_step(dataset, seed, sizes["batch_size"])

    def check_std(std: torch.Tensor) -> None:
        if warning := dataset.manifest.std_warning(std):
            recorder.show(warning)

    to_latents = dataset.manifest.to_latents
    return Batches(launch, read, entries, to_latents, masks_to_tokens, check_std, seed, **sizes)
