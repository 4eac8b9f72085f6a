"""The training loop.

A run of N steps takes N + 1 turns. Each turn first saves and evaluates the current state, so that the last
state takes the same path as the others.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from runtime.launch import Launch
from training.alignment import Alignment
from training.batches import Batches, MicroBatch
from training.checkpoint import CheckpointFolder, Part
from training.clock import Clock
from training.ema import EMA, PostHocEMA, networks_of
from training.optimizer import Optimizer
from training.recorder import Recorder, without_pictures
from training.sharding import gathered, no_sync, whole
from training.stopping import StopRequest
from training.window import NotFinite, Window, Work

SLOW_DISK = 100e6  # bytes per second; assumed until the first save is measured


@dataclass(frozen=True)
class Settings:
    """Keys of the group `train` that the loop uses."""

    total_steps: int
    log_every: int
    save_every: int
    grad_clip: float | None  # largest gradient norm; None: no clipping
    max_skipped_steps: int  # consecutive skipped steps that end the run


@dataclass(eq=False, repr=False)
class Trainer:
    """Train a preconditioned network on a stream of batches.

    Args:
        net: the network, whose weights are trained and saved.
        precond: the preconditioning around `net`, or around the wrapper of `net` that synchronises gradients.
        loss: loss(precond, x, class_labels, routing=, mask=, generator=) -> (N,).
        ema: the average of the weights; None: no average.
        route_plan: a `routing.RoutePlan`: the routing of a step, and the number of forced tokens that bypass.
        evaluators: pairs (interval in steps, evaluator); evaluator(step) -> {key: number or picture}.
        work: FLOPs of an image, for the log; None: unknown.
        alignment: its loss is added; None: there is none.
    """

    launch: Launch
    net: nn.Module
    precond: nn.Module
    loss: Callable[..., torch.Tensor]
    optimizer: Optimizer
    ema: EMA | None
    route_plan: Any
    batches: Batches
    evaluators: Sequence[tuple[int, Any]]
    recorder: Recorder
    checkpoints: CheckpointFolder
    stop: StopRequest
    settings: Settings
    work: Work | None
    alignment: Alignment | None = None

    def __post_init__(self) -> None:
        self.ema_wide = self.ema.wide if isinstance(self.ema, PostHocEMA) else None
        self.parameters = [parameter for parameter in self.net.parameters() if parameter.requires_grad]
        # Weights, their average, and two optimizer states per weight, in fp32.
        num_bytes = 4 * 4 * sum(parameter.numel() for parameter in self.net.parameters())
        self.clock = Clock(self.launch.device, num_bytes / SLOW_DISK)
        options = self.work, self.settings.log_every, self.settings.max_skipped_steps
        logged = bool(self.net.routes), self.alignment is not None
        self.window = Window(self.launch, self.clock, self.batches, *logged, *options)
        self.step = self.saved_step = self.first_step = 0

    @property
    def networks(self) -> list[nn.Module]:
        """The trained network, and the averaged ones."""
        return [self.net, *([] if self.ema is None else networks_of(self.ema))]

    @property
    def parts(self) -> dict[str, Part]:
        """The parts that a checkpoint saves."""
        names = ("net", "ema", "ema_wide", "optimizer", "clock", "window", "recorder")
        return {name: part for name in names if (part := getattr(self, name)) is not None}

    def resume_newest(self) -> None:
        """Load the newest intact checkpoint, if the run has one; all ranks load the same."""
        newest = partial(self.checkpoints.newest_intact, self.recorder.show)
        if (checkpoint := self.launch.broadcast_from_main(newest)) is None:
            return
        self.step = self.saved_step = self.first_step = self.checkpoints.load(checkpoint, self.parts)
        if self.step > (total := self.settings.total_steps):
            raise ValueError(f"total_steps={total} must be at least the {self.step} steps of {checkpoint}")

    def fit(self) -> str:
        """Train until `total_steps`, or until a stop is requested.

        Returns:
            The reason for an early stop; empty if training finished.

        Raises:
            NotFinite: too many consecutive steps were skipped.
            Moved: the run's folder was moved or removed.
            OSError: the last state cannot be saved.
        """
        batches = self.batches.from_step(self.step)
        with self.recorder.progress(self.step, self.settings.total_steps):
            self.clock.start()
            while True:
                reason = self._save_and_evaluate()
                if reason or self.step == self.settings.total_steps:
                    return reason
                self.train_step(next(batches))
                self.step += 1
                self.stop.has_trained = True
                self.recorder.bar.update()
                if self.step % self.settings.log_every == 0:
                    self.clock.pause()
                    self.log_training()
                    self.clock.resume()

    def train_step(self, micro_batches: Iterable[MicroBatch]) -> None:
        """Take one optimizer step on this rank's micro-batches; the caller increments `step`."""
        self.net.train()
        num_micro_batches = len(self.batches.indices)
        loss, sample_losses, ratios = torch.zeros((), device=self.launch.device), [], ()
        for number, batch in enumerate(micro_batches, start=1):
            # The same ratios for all micro-batches of a step.
            routing = self.route_plan.routing(self.step, batch.num_forced, batch.force_keep)
            ratios = routing.selection_ratio
            with nullcontext() if number == num_micro_batches else no_sync(self.precond.net):
                options = {"routing": routing, "mask": batch.masks, "generator": batch.generator}
                losses = self.loss(self.precond, batch.x, batch.class_labels, **options)
                if self.alignment is not None:
                    aligned = self.alignment.loss(self.net, batch.x, batch.features, self.step)
                    losses = losses + self.alignment.weight * aligned
                    self.window.add_alignment(aligned.detach().mean() / num_micro_batches)
                micro_loss = losses.mean() / num_micro_batches
                # A loss that is not finite makes all gradients NaN, so that all ranks skip the step.
                (micro_loss * torch.where(micro_loss.isfinite(), 1.0, torch.nan)).backward()
            loss += micro_loss.detach()
            sample_losses.append(losses.detach())
            if batch.masks is not None:
                self.window.add_bypassed(self.route_plan.num_forced_bypassed(batch.force_keep, ratios))
        self.window.add_step(loss, *self.update_weights(), tuple(ratios), sample_losses)

    def update_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Clip the gradient, step, and update the average. Return the gradient norm before clipping, and 1 if
        the step was skipped, else 0 (0-d each).
        """
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        grad_norm = whole(torch.nn.utils.get_total_norm(gradients))
        if self.settings.grad_clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.settings.grad_clip, grad_norm)
        # The device skips a step that is not finite. Gradients are the same on all ranks.
        skipped = (~grad_norm.isfinite()).float()
        self.optimizer.set_rates(self.step, self.settings.total_steps)
        self.optimizer.step(skipped)
        self.net.zero_grad()
        if self.ema is not None:
            self.ema.update(self.net, skipped)
        return grad_norm, skipped

    def log_training(self) -> None:
        """Log the steps since the last log point."""
        values = self.window.values()
        try:
            events = self.window.report(self.step)
        except NotFinite as error:
            self._log({**values, "skipped_steps": error.details["skipped_steps"]})
            raise
        self._log({**values, **events})
        for steps in events.values():
            for step in steps:
                what = f"loss {step['loss']:.4g}, a spike" if "loss" in step else "skipped, not finite"
                where = f"largest losses in entries {step['entries']}"
                self.recorder.show(f"step {step['step']}: {what}; {where}")
        loss = float("nan") if values["loss"] is None else values["loss"]
        self.recorder.bar.set_postfix(loss=f"{loss:.4f}", img_per_sec=f"{values['images_per_sec']:.0f}")
        self.window.start()

    def _log(self, values: dict[str, Any]) -> None:
        self.recorder.log(self.step, self.step * self.batches.batch_size, values)

    def _save_and_evaluate(self) -> str:
        """Save and evaluate if due; return the reason to stop here, or an empty string."""
        last, reason = self.step == self.settings.total_steps, self._stop_reason()
        due = [evaluator for every, evaluator in self.evaluators if self._is_due(every) or last]
        save = (self._is_due(self.settings.save_every) or last or reason) and self.step > self.saved_step
        unlogged = last and self.step % self.settings.log_every
        if self.step == 0 or not (save or due or unlogged):
            return reason
        self.clock.pause()
        if save:
            self._save(required=bool(last or reason))
        if unlogged and not reason:
            self.log_training()  # after the save, so that a longer run resumes without this line
        values = {}
        for evaluator in due:
            # After a stop, the remaining evaluators run when the run resumes.
            reason = reason or self._stop_reason(evaluation=True)
            if reason:
                if self.step > self.saved_step:
                    self._save(required=True)
                return reason
            self.recorder.check_not_moved()  # evaluators write to the folder
            self.recorder.bar.set_description("evaluate")
            with self.clock.timing("evaluation"), gathered(*self.networks):
                values |= evaluator(self.step)
            self.recorder.bar.set_description("train")
        numbers = without_pictures(values)
        if due:  # on all ranks, though only the first has pictures
            timed = {"evaluation_time_sec": self.clock.evaluation_time_sec} if numbers else {}
            self._log({**values, **timed})
        if numbers:
            text = "  ".join(f"{key} {value:.4f}" for key, value in numbers.items())
            evaluation_sec, train_sec = self.clock.evaluation_time_sec, self.clock.train_time_sec
            share = evaluation_sec / (evaluation_sec + train_sec)
            self.recorder.show(f"step {self.step}: {text}  (evaluations took {share:.0%} of the run)")
        self.clock.resume()
        return reason

    def _is_due(self, every: int) -> bool:
        return self.step > 0 and self.step % every == 0

    def _stop_reason(self, evaluation: bool = False) -> str:
        reserve_sec = self.clock.reserve_sec(self.step - self.first_step, evaluation)
        return self.stop.global_reason(reserve_sec + self.recorder.closing_sec, now=evaluation)

    def _save(self, required: bool) -> None:
        """Save; if that fails, raise if `required`, else warn and continue: the disk may have room later."""
        self.recorder.check_not_moved()
        try:
            # SYNC: all tensors are copied to the host.
            with self.clock.timing("save"):
                self.checkpoints.save(self.step, self.parts)
            self.saved_step = self.step
        except OSError as error:
            last = self.saved_step and f"the last checkpoint is step {self.saved_step}"
            message = f"cannot save step {self.step}: {error}; {last or 'the run has no checkpoint yet'}"
            if required:
                raise OSError(message) from error
            self.recorder.show(f"warning: {message}. Training continues and tries again at the next save")
