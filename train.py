"""Train a diffusion transformer with or without token routes.

    accelerate launch train.py model=tread
    accelerate launch train.py model=dit model/size=s_2 data=latents data.path=FOLDER
    python train.py -m model=dit,tread seed=0,1

Running the same command again resumes.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import torch
import torch.nn as nn
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs
from omegaconf import DictConfig
from tqdm import tqdm

from builders import config as configuration
from builders.auto import resolve_auto
from builders.network import (
    build_guidance,
    build_loss,
    build_net,
    build_precond,
    build_route_plan,
    build_sampler,
)
from builders.rules import FITTED_EVALUATORS
from builders.summary import summary
from data import (
    LatentDataset,
    ShardDataset,
    ShardStream,
    count_forced,
    encoder_for,
    entries_by_step,
    held_out_batches,
    image_decoder,
    mask_coverage,
    open_images,
    real_images,
    shards_by_step,
    stream,
)
from diffusion import ImageSource
from evaluation import AdmEvaluator, DenseLoss, SampleGrid
from models import cost_of, resolve_attention, token_mask
from routing import RoutePlan
from runtime.config import build_node, run_main, user_mistakes
from runtime.errors import UserError
from runtime.files import sha256
from runtime.launch import Launch, is_peer_failure, say_nothing
from runtime.lock import TRY_AGAIN, Busy
from runtime.machine import keep_freed_memory, start_process
from runtime.provenance import environment, flatten, source_sha256
from training.checkpoint import CheckpointFolder, is_own_checkpoint, latest_checkpoint, load_weights
from training.ema import EMA
from training.history import LossHistory, NotFinite
from training.run_folder import Moved, RunFolder, changes, depends_on_total_steps
from training.speed import SpeedCheck, fp32_slowdown, micro_step, most_graphs
from training.stopping import TIME_LIMIT, StopRequest
from training.trackers import BackgroundTracker, MetricsFile
from training.trainer import Trainer

GRID_SAMPLES, GRID_COLUMNS = 10, 10
EVALUATION_BATCH = 64
ENTRIES_AT_ONCE = 1024
INTERRUPTED = 130  # as shells count it: 128 + SIGINT
AGAIN = "run the same command again to go on"

configuration.register()


@hydra.main(version_base="1.3", config_path="configs", config_name="config")
def main(cfg: DictConfig) -> None:
    """Compose, validate, build, fit."""
    with user_mistakes():
        config = configuration.validate(cfg, num_processes=int(os.environ.get("WORLD_SIZE", "1")))
        run = RunFolder(config["output_dir"])
        _check_files(config, run)
        launch = start_process()
        with launch.main_first():
            dataset = build_node(config, "data")()
        if config["train"]["masked_loss"] and not dataset.manifest.conditioning_type:
            raise ValueError(
                "train.masked_loss=true needs masks: conditioning_type of the latent manifest is null, "
                "it must be mask or segmentation (data/README.md)"
            )
        launch.assert_ranks_agree(_facts(config, dataset))
        _hold(run, launch, config["wait"])
        try:
            trainer = _prepare(config, run, dataset, launch)
        except (ValueError, OSError):
            run.unlock()
            raise
    if trainer is None:
        longer = "" if depends_on_total_steps(config) else "raise train.total_steps to go on, or "
        launch.print(f"{run.path} is finished: {longer}start another with run_name=NAME")
        run.unlock()
        return
    try:
        if run_training(trainer, run):
            raise SystemExit(TRY_AGAIN)
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None  # what there is to say has been said


def _hold(run: RunFolder, launch: Launch, wait: bool) -> None:
    """Hold the folder of a run in the first process, for all; while it waits, the others hear from it every
    few seconds.

    Raises:
        Busy: another process holds it, and `wait` is false.
        OSError: it cannot be written to.
    """
    told = False
    while True:
        try:
            return launch.broadcast_from_main(partial(run.lock, launch.print))
        except Busy as error:
            if not wait:
                raise Busy(f"{error}, or wait for that with wait=true") from error
            if not told:
                launch.print(f"wait=true: {error}")
            told = True


def _prepare(
    config: dict[str, Any], run: RunFolder, dataset: LatentDataset | ShardDataset, launch: Launch
) -> Trainer | None:
    """Return what goes on with a run, or begins it; None where it is finished. The folder must be held."""
    run.check(config, dataset.describe())
    if run.is_finished(config["train"]["total_steps"]):
        return None
    saved = run.manifest()["resolved"] if run.has_results() else {}
    resolved = resolve_auto(config, saved, launch.device, launch.world_size)
    launch.assert_ranks_agree(
        {key: resolved[key] for key in ("mixed_precision", "compile", "micro_batch_size")}
    )
    if resolved["keep_freed_memory"]:
        keep_freed_memory()
    return build_trainer(config, resolved, run, dataset, launch)


def _check_files(config: dict[str, Any], run: RunFolder) -> None:
    """Check that what is read is there.

    Raises:
        FileNotFoundError, ValueError: with the key and the value.
    """
    if config["train"]["init_from"] and not latest_checkpoint(run.path):
        _check_init_from(config["train"]["init_from"], config["train"]["init_from_objective"])
    for key in ("reference", "weights"):
        file = config["evaluation"].get(key)
        if file is not None and not Path(file).exists():
            raise FileNotFoundError(
                f"evaluation.{key}={file} not found: `python -m evaluation.fetch` lists what can be "
                "downloaded"
            )


def _check_init_from(source: str, objective: str | None) -> None:
    """Check that the weights to start from are there, and that it is known what they predict."""
    if not Path(source).exists():
        raise FileNotFoundError(f"train.init_from={source} is not there: it must be a run or a weights file")
    own = is_own_checkpoint(source)
    if own and objective:
        raise ValueError(
            f"train.init_from_objective={objective} must not be given for a run of this project, {source}"
        )
    if not own and objective is None:
        raise ValueError(
            f"train.init_from={source} does not tell what it predicts: give train.init_from_objective=edm "
            "(TREAD with EDM), "
            "ddpm (DiT: noise, timesteps 0 to 999) or flow (SiT, TREAD with flow matching: velocity, times 0 "
            "to 1)"
        )


def _facts(config: dict[str, Any], dataset: LatentDataset | ShardDataset) -> dict[str, Any]:
    """Return what processes must agree on: ranks that train on different things would average nonsense."""
    data = {"fingerprint of the data": dataset.describe()["fingerprint"], "code (sha256)": source_sha256()}
    return {**flatten(config), **data, "torch": torch.__version__}


def build_trainer(
    config: dict[str, Any],
    resolved: dict[str, Any],
    run: RunFolder,
    dataset: LatentDataset | ShardDataset,
    launch: Launch,
) -> Trainer:
    """Build all that a run needs, load its newest checkpoint if it has one, and only then begin to write."""
    settings = config["train"]
    masks_to_tokens = (
        partial(token_mask, patch_size=config["model"]["patch_size"]) if settings["masked_loss"] else None
    )
    torch.manual_seed(config["seed"])
    net = build_net(config)
    plan = build_route_plan(config, net)
    num_lengths = len(plan.lengths(settings["masked_loss"]))
    accelerator = _start_accelerator(resolved["mixed_precision"], num_lengths)
    device = launch.device
    dtype = torch.bfloat16 if resolved["mixed_precision"] == "bf16" else torch.float32
    resolved = {**resolved, "attention": resolve_attention(config["model"]["attention"], device.type, dtype)}
    net.to(device)
    slowdown = fp32_slowdown(net, device, bf16=dtype == torch.bfloat16)
    coverage = _mask_coverage(plan, dataset, masks_to_tokens, settings["batch_size"])
    cost = cost_of(net, mask_coverage=coverage, fp32_slowdown=slowdown)
    init_from = None
    if settings["init_from"] and not latest_checkpoint(run.path):
        init_from = load_weights(net, settings["init_from"]) | {
            "objective": settings["init_from_objective"] or "edm"
        }
        init_from["sha256"] = sha256(Path(init_from["file"]))
    ema = EMA(net, **config["ema"])
    if resolved["compile"]:
        for block in net.blocks:
            block.compile(dynamic=False)
    precond = build_precond(config, accelerator.prepare_model(net))
    optimizer = build_node(config, "optimizer")(net.parameters(), fused=True)
    loss_fn = build_loss(config, net)
    evaluators = _evaluators(config, run, dataset, launch, net, ema.net, loss_fn)
    checkpoints = CheckpointFolder(
        run.path / "checkpoints", settings["keep_last"], settings["milestone_every"]
    )
    show = tqdm.write if launch.is_main else say_nothing
    checkpoint = launch.broadcast_from_main(partial(checkpoints.newest_whole, show))
    state = checkpoints.load(checkpoint, net, ema.net, optimizer, device) if checkpoint else None
    if state and state["step"] > settings["total_steps"]:
        raise ValueError(
            f"train.total_steps={settings['total_steps']} must be at least the {state['step']} steps of "
            f"{run.path}"
        )
    launch.barrier()  # all have read what the first process is about to change

    metrics_file = tracker = None
    if launch.is_main:
        details = {"resolved": resolved, "num_processes": launch.world_size, **environment(device)}
        details |= {
            "routes": plan.describe(settings["masked_loss"]),
            "cost": cost.describe(),
            "data": dataset.describe(),
        }
        details |= {"init_from": init_from} if init_from else {}
        details["scores"] = [
            evaluator.describe() for _, evaluator in evaluators if isinstance(evaluator, AdmEvaluator)
        ]
        metrics_file, tracker = _begin(run, config, details, net, state)
    batch_sizes = {"batch_size": settings["batch_size"], "micro_batch_size": resolved["micro_batch_size"]}
    share = {"process_index": launch.rank, "num_processes": launch.world_size}
    counting = masks_to_tokens if plan.force_keep_overflow == "grow" else None
    micro_batches, entries = _read(
        config, dataset, batch_sizes, share, device, counting, resolved["num_workers"]
    )
    places = torch.arange(settings["batch_size"]).view(-1, resolved["micro_batch_size"])
    return Trainer(
        accelerator=accelerator,
        launch=launch,
        precond=precond,
        net=net,
        ema=ema,
        optimizer=optimizer,
        loss_fn=loss_fn,
        route_plan=plan,
        token_mask=masks_to_tokens,
        micro_batches=micro_batches,
        to_latents=dataset.manifest.to_latents,
        check_std=dataset.manifest.std_warning,
        evaluators=evaluators,
        after_first_window=SpeedCheck(
            micro_step(accelerator, precond, net, loss_fn, resolved["micro_batch_size"]),
            predict=lambda ratios: cost_of(net, ratios, fp32_slowdown=slowdown).predicted_speedup,
            net=net,
            device=device,
            compiled=resolved["compile"],
            fp32_slowdown=slowdown,
            num_lengths=num_lengths,
            report=partial(_report, run, show) if launch.is_main else say_nothing,
            show=show,
        ),
        checkpoints=checkpoints,
        check_place=run.check_place,
        stop_request=StopRequest(settings["max_time_sec"]),
        history=LossHistory(
            places[launch.rank :: launch.world_size].flatten(),
            settings["log_every"],
            entries,
            settings["max_skipped_steps"],
            device,
        ),
        metrics_file=metrics_file,
        tracker=tracker,
        seed=config["seed"],
        **batch_sizes,
        **{key: settings[key] for key in ("total_steps", "grad_clip", "log_every", "save_every")},
        state=state,
    )


def _read(
    config: dict[str, Any],
    dataset: LatentDataset | ShardDataset,
    batch_sizes: dict[str, int],
    share: dict[str, int],
    device: torch.device,
    counting: Callable[[torch.Tensor], torch.Tensor] | None,
    num_workers: int,
) -> tuple[Callable[..., Any], Callable[[int], list[Any]]]:
    """Return what yields the micro-batches of this process from a step on, and what tells the entries of a
    step.
    """
    seed, order = (
        config["seed"],
        {"seed": config["seed"], **batch_sizes, **share, "pin_memory": device.type == "cuda"},
    )
    if isinstance(dataset, ShardDataset):
        entries = shards_by_step(dataset, seed, **batch_sizes, num_processes=share["num_processes"])
        return partial(ShardStream, dataset, **order), entries
    masking = {"with_masks": config["train"]["masked_loss"], "token_mask": counting}
    entries = entries_by_step(dataset, seed, batch_sizes["batch_size"])
    return partial(stream, dataset, **order, **masking, num_workers=num_workers), entries


def _report(run: RunFolder, show: Callable[[str], None], found: dict[str, Any]) -> None:
    """Write what was found into the manifest, if there is room."""
    try:
        run.update(found)
    except OSError as error:
        show(f"warning: {run.manifest_file}: {error}")


def _begin(
    run: RunFolder,
    config: dict[str, Any],
    details: dict[str, Any],
    net: nn.Module,
    state: dict[str, Any] | None,
) -> tuple[MetricsFile, BackgroundTracker | None]:
    """Write what the run is, tell it to the user, and open what the run writes to."""
    step = state["step"] if state else 0
    details["changes"] = changes(run.manifest(), details) if state else []
    run.begin(config, details, step)
    kept = (state["metrics_size"], state["metrics_waiting"]) if state else ()
    metrics_file = MetricsFile(run.path / "metrics.jsonl", *kept, show=tqdm.write)
    tracker = BackgroundTracker(build_node(config, "tracker")(), tqdm.write) if config["tracker"] else None
    print(summary(config, details, net, resumed_step=step), flush=True)
    return metrics_file, tracker


def run_training(trainer: Trainer, run: RunFolder) -> str:
    """Fit, and record in the manifest how it ended.

    Returns:
        Why it was stopped before the end; empty at the end.

    Raises:
        UserError: the run could not go on, for a reason that one line tells.
    """
    with trainer.stop_request.listening():
        try:
            reason = _fit(trainer, run)
        except Moved as error:
            raise UserError(str(error)) from error
        trainer.launch.barrier()  # a launcher ends the others where one has ended
    if reason == TIME_LIMIT and trainer.step == trainer.first_step:
        raise UserError(
            "train.max_time_sec leaves no time for a step: of what is left when the run has started, "
            f"{trainer.longest_save_sec:.0f} s are kept for saving and a few for the end of the process"
        )
    if reason:
        saved = "which is saved" if trainer.step else "before the first"
        trainer.show(f"stopped at step {trainer.step}, {saved} ({reason}): {AGAIN}")
    else:
        trainer.show(
            f"{run.path} is finished. Sample from it: accelerate launch sample.py run={run.path} "
            "num_samples=500"
        )
    return reason


def _fit(trainer: Trainer, run: RunFolder) -> str:
    reason = ""
    try:
        reason = trainer.fit()
        trainer.launch.broadcast_from_main(partial(_end, trainer, run, reason))
    except Moved:  # what failed is told nowhere else: the manifest there may be that of another start
        raise
    except KeyboardInterrupt:
        if trainer.metrics_file:
            run.update({"status": "interrupted", "step": trainer.step})
        trainer.show(
            f"interrupted at step {trainer.step}: {AGAIN} from the checkpoint of step {trainer.saved_step}"
        )
        raise
    except Exception as error:
        details = error.details if isinstance(error, NotFinite) else {}
        process, reason = trainer.launch.rank, f"{type(error).__name__}: {error}"
        if is_peer_failure(error):
            reason = f"another process is gone: {reason}"
        first = run.fail(process, reason, {"step": trainer.step, **details})
        if first["process"] != process and not isinstance(error, NotFinite):  # which ends all of them alike
            raise UserError(f"process {first['process']} failed first: {first['reason']}") from error
        if isinstance(error, NotFinite | OSError) or is_peer_failure(error):
            raise UserError(reason if is_peer_failure(error) else str(error)) from error
        raise
    finally:
        trainer.close(hurried=bool(reason))
        run.unlock()
    return reason


def _end(trainer: Trainer, run: RunFolder, reason: str) -> None:
    trainer.metrics_file.flush()
    run.update({"status": "stopped" if reason else "finished", "reason": reason, "step": trainer.step})


def _start_accelerator(mixed_precision: str, num_lengths: int) -> Accelerator:
    # A sweep runs job after job in one process: nothing of the last one may be left.
    AcceleratorState._reset_state()
    torch._dynamo.reset()
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # rather than silently running uncompiled
    torch._dynamo.config.recompile_limit = most_graphs(num_lengths)
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    accelerator = Accelerator(mixed_precision="no", kwargs_handlers=[ddp])
    accelerator.bf16 = mixed_precision == "bf16"
    return accelerator


def _mask_coverage(
    plan: RoutePlan, dataset: LatentDataset | ShardDataset, masks_to_tokens: Any, batch_size: int
) -> float:
    """Return the fraction of tokens that masks keep; refuse masks that the plan refuses."""
    if masks_to_tokens is None:
        return 0.0
    if plan.force_keep_overflow == "error":
        num_forced = np.zeros(dataset.manifest.count, dtype=int)
        for ids in np.array_split(dataset.train_ids, 1 + len(dataset.train_ids) // ENTRIES_AT_ONCE):
            num_forced[ids] = count_forced(dataset, ids, masks_to_tokens)
        plan.check_force_keep(num_forced)
    return mask_coverage(dataset, masks_to_tokens, batch_size) if plan.force_keep_overflow == "grow" else 0.0


def _evaluators(
    config: dict[str, Any],
    run: RunFolder,
    dataset: LatentDataset | ShardDataset,
    launch: Launch,
    net: nn.Module,
    ema_net: nn.Module,
    loss_fn: Any,
) -> list[tuple[int, Any]]:
    """Return (every how many steps, evaluator)."""
    settings, device = config["train"], launch.device
    share = {"process_index": launch.rank, "num_processes": launch.world_size}
    # Built anew around the bare networks: what accelerate prepared runs under autocast, evaluation does not.
    denoiser, ema_denoiser = (build_precond(config, n) for n in (net, ema_net))
    evaluators = []
    if (
        settings["sample_every"] or config["evaluation"]
    ):  # else the latents may be of an encoder that is not at hand
        try:
            official = config["decoding"] == "official"
            encoder = encoder_for(dataset.manifest, device, dataset.encoder, official=official)
        except ValueError as error:
            raise ValueError(
                f"{error}. Training goes without: train.sample_every=null evaluation=none"
            ) from error
        source = ImageSource(
            ema_denoiser,
            build_sampler(config),
            build_guidance(config),
            image_decoder(dataset.manifest, encoder, official),
            batch_size=EVALUATION_BATCH,
            launch=launch,
        )
    if settings["sample_every"]:
        grid = SampleGrid(source, run.path / "samples", GRID_SAMPLES, GRID_COLUMNS, write=launch.is_main)
        evaluators.append((settings["sample_every"], grid))
    if settings["eval_every"] and len(dataset.held_out_ids):
        with_masks = settings["masked_loss"]
        batches = partial(held_out_batches, dataset, EVALUATION_BATCH, device, **share, with_masks=with_masks)
        denoisers = {"val_loss_dense": denoiser, "val_loss_dense_ema": ema_denoiser}
        loss = DenseLoss(denoisers, loss_fn, batches, total=launch.sum)
        evaluators.append((settings["eval_every"], loss))
    if settings["eval_every"] and config["evaluation"]:
        build = build_node(config, "evaluation")
        if config["evaluation"]["_target_"] in FITTED_EVALUATORS:
            evaluator = build(reference=real_images(dataset, dataset.train_ids, encoder), source=source)
        else:
            evaluator = build(source=source, open_images=open_images, device=device, launch=launch)
        evaluators.append((settings["eval_every"], evaluator))
    return evaluators


if __name__ == "__main__":
    run_main(main)
