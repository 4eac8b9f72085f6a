"""The training loop.

A run of N steps takes N + 1 turns: each first saves and evaluates the state that it finds, so that the last
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
from training.batches import Batches, MicroBatch
from training.checkpoint import CheckpointFolder, Part
from training.clock import Clock
from training.ema import EMA
from training.optimizer import Optimizer
from training.recorder import Recorder, without_pictures
from training.speed import no_sync
from training.stopping import StopRequest
from training.window import NotFinite, Window, Work

SLOW_DISK = 100e6  # bytes per second, assumed until the first save


@dataclass(frozen=True)
class Settings:
    """Keys of the group train."""

    total_steps: int
    log_every: int
    save_every: int
    grad_clip: float | None  # largest norm of the gradient
    max_skipped_steps: int  # in a row, that end the run


@dataclass(eq=False, repr=False)
class Trainer:
    """Fit a preconditioned network to a stream of batches.

    Args:
        net: the network itself, whose weights are trained and saved.
        precond: the preconditioning around the network, or around what synchronises its gradients.
        loss: loss(precond, x, class_labels, routing=, mask=, generator=) -> (N,).
        ema: the average of the weights; None: there is none.
        route_plan: a `routing.RoutePlan`: the routing of a step, and the tokens that bypass although forced.
        evaluators: (interval in steps, evaluator): evaluator(step) -> {key: number or picture}.
        speed_check: called with the ratios of the last step, at the first log point after a save where tokens
            bypass: everything is compiled, and nothing is lost by a stop.
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
    speed_check: Callable[[tuple[float, ...]], None] | None = None

    def __post_init__(self) -> None:
        self.parameters = [parameter for parameter in self.net.parameters() if parameter.requires_grad]
        # The weights, their average, and two numbers of the optimizer for each.
        num_bytes = 4 * 4 * sum(parameter.numel() for parameter in self.net.parameters())
        self.clock = Clock(self.launch.device, num_bytes / SLOW_DISK)
        options = self.work, self.settings.log_every, self.settings.max_skipped_steps
        self.window = Window(self.launch, self.clock, self.batches, bool(self.net.routes), *options)
        self.step = self.saved_step = self.first_step = 0

    @property
    def parts(self) -> dict[str, Part]:
        """What a checkpoint keeps."""
        names = ("net", "ema", "optimizer", "clock", "window", "recorder")
        return {name: part for name in names if (part := getattr(self, name)) is not None}

    def resume_newest(self) -> None:
        """Continue from the newest intact checkpoint, if there is one; the ranks agree on it."""
        newest = partial(self.checkpoints.newest_intact, self.recorder.show)
        if (checkpoint := self.launch.broadcast_from_main(newest)) is None:
            return
        self.step = self.saved_step = self.first_step = self.checkpoints.load(checkpoint, self.parts)
        if self.step > (total_steps := self.settings.total_steps):
            raise ValueError(
                f"total_steps={total_steps} must be at least the {self.step} steps of {checkpoint}"
            )

    def fit(self) -> str:
        """Train until `total_steps`, or until asked to stop.

        Returns:
            Why it stopped before the end; empty at the end.

        Raises:
            NotFinite: too many steps in a row were skipped.
            Moved: the folder of the run was moved or removed.
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
                    self._check_speed()
                    self.clock.resume()

    def train_step(self, micro_batches: Iterable[MicroBatch]) -> None:
        """Take one optimizer step on this rank's micro-batches; `step` is the caller's to count."""
        self.net.train()
        num_micro_batches = len(self.batches.indices)
        loss, sample_losses = torch.zeros((), device=self.launch.device), []
        for number, batch in enumerate(micro_batches, start=1):
            # The same for all micro-batches of a step.
            routing = self.route_plan.routing(self.step, batch.num_forced, batch.force_keep)
            self.ratios = routing.selection_ratio
            with nullcontext() if number == num_micro_batches else no_sync(self.precond):
                options = {"routing": routing, "mask": batch.masks, "generator": batch.generator}
                losses = self.loss(self.precond, batch.x, batch.class_labels, **options)
                micro_loss = losses.mean() / num_micro_batches
                # A loss that is not finite makes all gradients so: the step is skipped on all ranks.
                (micro_loss * torch.where(micro_loss.isfinite(), 1.0, torch.nan)).backward()
            loss += micro_loss.detach()
            sample_losses.append(losses.detach())
            if batch.masks is not None:
                self.window.add_bypassed(self.route_plan.num_forced_bypassed(batch.force_keep, self.ratios))
        self.window.add_step(loss, *self.update_weights(), tuple(self.ratios), sample_losses)

    def update_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Clip, step and average the weights; return the norm of the gradient, and 1 if the step was skipped,
        else 0 (0-d each).
        """
        grad_norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters if p.grad is not None])
        if self.settings.grad_clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.settings.grad_clip, grad_norm)
        # A step that is not finite is skipped on the device; the gradients are the same on all ranks.
        skipped = (~grad_norm.isfinite()).float()
        self.optimizer.warm_up(self.step)
        self.optimizer.step(skipped)
        self.net.zero_grad()
        if self.ema is not None:
            self.ema.update(self.net, skipped)
        return grad_norm, skipped

    def log_training(self) -> None:
        """Write a line of the steps since the last one."""
        values = self.window.values()
        try:
            found = self.window.report(self.step)
        except NotFinite as error:
            self._log({**values, "skipped_steps": error.details["skipped_steps"]})
            raise
        self._log({**values, **found})
        for steps in found.values():
            for step in steps:
                what = f"loss {step['loss']:.4g}, a spike" if "loss" in step else "skipped, not finite"
                where = f"largest losses in entries {step['entries']}"
                self.recorder.show(f"step {step['step']}: {what}; {where}")
        loss = float("nan") if values["loss"] is None else values["loss"]
        self.recorder.bar.set_postfix(loss=f"{loss:.4f}", img_per_sec=f"{values['images_per_sec']:.0f}")
        self.window.start()

    def _log(self, values: dict[str, Any]) -> None:
        self.recorder.log(self.step, self.step * self.batches.batch_size, values)

    def _check_speed(self) -> None:
        if self.speed_check and self.saved_step and any(self.ratios):
            with self.recorder.doing("time the routes"):
                self.speed_check(self.ratios)
            self.speed_check = None

    def _save_and_evaluate(self) -> str:
        """Do what is due between two steps, and return why the run is to stop here, or an empty string."""
        last, reason = self.step == self.settings.total_steps, self._asked_to_stop()
        due = [evaluator for every, evaluator in self.evaluators if self._is_due(every) or last]
        save = (self._is_due(self.settings.save_every) or last or reason) and self.step > self.saved_step
        unlogged = last and self.step % self.settings.log_every
        if self.step == 0 or not (save or due or unlogged):
            return reason
        self.clock.pause()
        if save:
            self._save(must=bool(last or reason))
        if unlogged and not reason:
            self.log_training()  # after the save: a longer run resumes as if this had not been written
        values = {}
        for evaluator in due:
            # What is due and not done is done when the run resumes.
            reason = reason or self._asked_to_stop(evaluation=True)
            if reason:
                if self.step > self.saved_step:
                    self._save(must=True)
                return reason
            self.recorder.check_place()  # evaluators write to the folder, too
            with self.recorder.doing("evaluate"), self.clock.timing("evaluation"):
                values |= evaluator(self.step)
        numbers = without_pictures(values)
        if values:
            timed = {"evaluation_time_sec": self.clock.evaluation_time_sec} if numbers else {}
            self._log({**values, **timed})
        if numbers:
            text = "  ".join(f"{key} {value:.4f}" for key, value in numbers.items())
            evaluation_sec, train_sec = self.clock.evaluation_time_sec, self.clock.train_time_sec
            share = evaluation_sec / (evaluation_sec + train_sec)
            self.recorder.show(f"step {self.step}: {text}  ({share:.0%} of the run went into evaluations)")
        self.clock.resume()
        return reason

    def _is_due(self, every: int) -> bool:
        return self.step > 0 and self.step % every == 0

    def _asked_to_stop(self, evaluation: bool = False) -> str:
        reserve_sec = self.clock.reserve_sec(self.step - self.first_step, evaluation)
        return self.stop.agreed(reserve_sec + self.recorder.closing_sec, now=evaluation)

    def _save(self, must: bool) -> None:
        """Save; if that fails and is no `must`, warn and continue: the disk may have room later."""
        self.recorder.check_place()
        try:
            # SYNC: everything comes to the host.
            with self.clock.timing("save"):
                self.checkpoints.save(self.step, self.parts)
            self.saved_step = self.step
        except OSError as error:
            last = self.saved_step and f"the last checkpoint is of step {self.saved_step}"
            message = f"step {self.step} cannot be saved: {error}; {last or 'there is no checkpoint yet'}"
            if must:
                raise OSError(message) from error
            self.recorder.show(f"warning: {message}. Training continues and will save again")
