"""The training loop.

A run of N steps takes N + 1 turns: each turn first saves and evaluates what the steps before it gave, so that the last
state takes the same path as the others. Every random draw is a function of (seed, step, index of the micro-batch within
the global batch), so that a resumed run, or one on another number of processes, draws the same.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn as nn
from accelerate import Accelerator
from tqdm import tqdm

from training.checkpoint import CheckpointFolder
from training.ema import EMA
from training.trackers import MetricsFile, Tracker

# Sums since the last log point.
WINDOW = ("loss", "grad_norm", "landed", "skipped", "selection_ratio", "num_forced_bypassed")


MicroBatch = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, int]


class Evaluator(Protocol):
    """What the trainer asks of an evaluator."""

    def run(self, step: int) -> Iterator[tuple[str, float]]: ...


class RoutePlan(Protocol):
    """What the trainer asks of the plan of a network's routes."""

    def ratios(self, step: int, num_forced: int) -> tuple[float, ...]: ...

    def num_forced_bypassed(self, force_keep: torch.Tensor, ratios: Sequence[float]) -> torch.Tensor: ...


class Trainer:
    """Fit a preconditioned network to a stream of micro-batches.

    Args:
        precond: the network in its preconditioning, prepared by accelerate.
        net: the same network, unwrapped.
        loss_fn: loss_fn(precond, x, class_labels, generator=, selection_ratio=, force_keep=, loss_mask=) -> (N,).
        route_plan: tells the ratio of each route at each step.
        token_mask: turns masks (N, H, W) into the tokens (N, T) that they force to stay; None where masks are not used.
        micro_batches: gives this process's micro-batches (stored entries, labels, masks, num_forced) from a step on.
        to_latents: turns stored entries into what the network sees, with a generator for what it draws.
        check_std: says what is wrong with the standard deviation of the first batch of a run, if anything.
        evaluators: (every how many steps, evaluator).
        after_first_window: called with the last step's ratios at the first log point where tokens bypass, when everything
            is compiled.
        metrics_file: gets every line; None on all processes but the first, like `tracker`.
        batch_size, micro_batch_size: the global batch, and the part of it that one forward takes.
        grad_clip: largest norm of the gradient; None does not clip.
    """

    def __init__(
        self,
        *,
        accelerator: Accelerator,
        precond: nn.Module,
        net: nn.Module,
        ema: EMA,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[..., torch.Tensor],
        route_plan: RoutePlan,
        token_mask: Callable[[torch.Tensor], torch.Tensor] | None,
        micro_batches: Callable[[int], Iterable[MicroBatch]],
        to_latents: Callable[[torch.Tensor, torch.Generator], torch.Tensor],
        check_std: Callable[[torch.Tensor], str | None],
        evaluators: Sequence[tuple[int, Evaluator]],
        after_first_window: Callable[[tuple[float, ...]], None] | None,
        checkpoints: CheckpointFolder,
        metrics_file: MetricsFile | None,
        tracker: Tracker | None,
        seed: int,
        total_steps: int,
        batch_size: int,
        micro_batch_size: int,
        grad_clip: float | None,
        log_every: int,
        save_every: int,
        state: dict[str, Any] | None,
    ):
        self.accelerator, self.device = accelerator, accelerator.device
        self.precond, self.net, self.ema, self.optimizer, self.loss_fn = precond, net, ema, optimizer, loss_fn
        self.route_plan, self.token_mask = route_plan, token_mask
        self.micro_batches, self.to_latents, self.check_std = micro_batches, to_latents, check_std
        self.evaluators, self.checkpoints = evaluators, checkpoints
        self.after_first_window = after_first_window
        self.metrics_file, self.tracker = metrics_file, tracker
        self.seed, self.total_steps, self.grad_clip = seed, total_steps, grad_clip
        self.batch_size, self.micro_batch_size = batch_size, micro_batch_size
        self.log_every, self.save_every = log_every, save_every
        self.parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
        self._restore(state)

    def fit(self) -> None:
        """Train until `total_steps`."""
        micro_batches = iter(self.micro_batches(self.step))
        bar = {"initial": self.step, "total": self.total_steps, "desc": "train", "unit": "step", "mininterval": 1.0}
        with tqdm(**bar, disable=not self.accelerator.is_main_process) as self.progress:
            self.resume_clock()
            while True:
                self._save_and_evaluate()
                if self.step == self.total_steps:
                    break
                self.train_step(micro_batches)
                self.step += 1
                self.progress.update()
                if self.step % self.log_every == 0:
                    self.pause_clock()
                    self.log_training()
                    self._after_first_window()
                    self.resume_clock()

    def show(self, text: str) -> None:
        """Print on the first process, above the progress bar."""
        if self.accelerator.is_main_process:
            tqdm.write(text)

    def close(self) -> None:
        """Close what the trainer was given to write to."""
        for writer in (self.metrics_file, self.tracker):
            if writer:
                writer.close()

    def train_step(self, micro_batches: Iterator[MicroBatch]) -> None:
        """Take one optimizer step on this process's next micro-batches; the caller counts `step`."""
        self.net.train()
        num_processes = self.accelerator.num_processes
        indices = range(self.accelerator.process_index, self.batch_size // self.micro_batch_size, num_processes)
        loss = torch.zeros((), device=self.device)
        for index in indices:
            *tensors, num_forced = next(micro_batches)
            stored, labels, masks = (t if t is None else t.to(self.device, non_blocking=True) for t in tensors)
            self.ratios = self.route_plan.ratios(self.step, num_forced)  # the same for all micro-batches of a step
            generator = self._generator(index)
            routing = {"selection_ratio": self.ratios, "force_keep": None if masks is None else self.token_mask(masks)}
            x = self.to_latents(stored, generator)
            if self.step == 0 and index == 0 and (warning := self.check_std(x.std())):  # SYNC: once in a run
                self.show(warning)
            last = index == indices[-1]
            with nullcontext() if last else self.accelerator.no_sync(self.precond):
                losses = self.loss_fn(self.precond, x, labels, generator=generator, **routing, loss_mask=masks)
                micro_loss = losses.mean() / len(indices)
                self.accelerator.backward(micro_loss)
            loss += micro_loss.detach()
            if masks is not None:
                num_bypassed = self.route_plan.num_forced_bypassed(routing["force_keep"], self.ratios)
                self.window[WINDOW.index("num_forced_bypassed")] += num_bypassed
        self.window[WINDOW.index("selection_ratio")] += sum(self.ratios) / max(1, len(self.ratios))
        self.update_weights(loss)

    def update_weights(self, loss: torch.Tensor) -> None:
        """Clip, step and average the weights, and add to the sums of the window."""
        grad_norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in self.parameters])
        if self.grad_clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.grad_clip, grad_norm)
        # A step that is not finite is skipped on the device, without asking it. The gradients are the same on all
        # processes, and so is the decision.
        skipped = (~grad_norm.isfinite()).float()
        self.optimizer.found_inf = skipped
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ema.update(self.net, skipped)
        landed = torch.stack([loss, grad_norm.to(loss), torch.ones_like(loss)]) * (1 - skipped)
        self.window[:3] += landed.nan_to_num(0.0, 0.0, 0.0)  # loss, grad_norm, landed
        self.window[WINDOW.index("skipped")] += skipped

    def _generator(self, micro_index: int) -> torch.Generator:
        state = np.random.SeedSequence([self.seed, self.step, micro_index]).generate_state(1, np.uint64)
        return torch.Generator(self.device).manual_seed(int(state[0]))

    def log_training(self) -> None:
        """Write a line of the steps since the last one."""
        # SYNC: the sums of the window come to the host.
        sums = self.accelerator.reduce(self.window, "sum").div(self.accelerator.num_processes).tolist()
        loss, grad_norm, landed, skipped, selection_ratio, num_forced_bypassed = sums
        num_steps = landed + skipped
        values = {
            "loss": loss / landed if landed else None,
            "grad_norm": grad_norm / landed if landed else None,
            "num_skipped_steps": int(skipped),
            "images_per_sec": num_steps * self.batch_size / (self.train_time_sec - self.window_start_sec),
            "train_time_sec": self.train_time_sec,
        }
        if self.net.routes:
            values["selection_ratio"] = selection_ratio / num_steps
            values["num_forced_bypassed"] = round(num_forced_bypassed * self.accelerator.num_processes)
        self._log(values)
        self.progress.set_postfix(loss=f"{values['loss'] or float('nan'):.4f}", img_per_sec=f"{values['images_per_sec']:.0f}")
        self.window.zero_()
        self.window_start_sec = self.train_time_sec

    def _log(self, values: dict[str, float | None]) -> None:
        values = {"num_images": self.step * self.batch_size, **values}
        if self.metrics_file:
            self.metrics_file.log(values, self.step)
        if self.tracker:
            self.tracker.log({key: value for key, value in values.items() if value is not None}, self.step)

    def _after_first_window(self) -> None:
        if self.after_first_window and any(self.ratios):
            self.progress.set_description("time the routes")
            self.after_first_window(self.ratios)
            self.after_first_window = None
            self.progress.set_description("train")

    def _save_and_evaluate(self) -> None:
        last = self.step == self.total_steps
        due = [evaluator for every, evaluator in self.evaluators if self._is_due(every) or last]
        save = (self._is_due(self.save_every) or last) and self.step > self.saved_step
        if self.step == 0 or not (save or due):
            return
        self.pause_clock()
        if save:
            self._save()
        if last and self.step % self.log_every:
            self.log_training()  # after the save: a longer run goes on as if it had not been written
        if due:
            self.progress.set_description("evaluate")
        values = {key: value for evaluator in due for key, value in evaluator.run(self.step)}
        self.progress.set_description("train")
        if values:
            self._log(values)
            self.show(f"step {self.step}: " + "  ".join(f"{key} {value:.4f}" for key, value in values.items()))
        self.resume_clock()

    def _is_due(self, every: int) -> bool:
        return self.step > 0 and self.step % every == 0

    def _save(self) -> None:
        # SYNC: everything comes to the host. Each process keeps its own sums, so that a resumed window adds up bitwise.
        windows = self.accelerator.gather(self.window.unsqueeze(0)).tolist()
        if self.accelerator.is_main_process:
            state = {
                "train_time_sec": self.train_time_sec,
                "window_start_sec": self.window_start_sec,
                "windows": windows,
                "num_ema_updates": int(self.ema.num_updates),
                "metrics_size": self.metrics_file.size(),
            }
            self.checkpoints.save(self.step, self.net, self.ema.net, self.optimizer, state)
        self.saved_step = self.step
        self.accelerator.wait_for_everyone()

    def _restore(self, state: dict[str, Any] | None) -> None:
        self.step = self.saved_step = state["step"] if state else 0
        self.train_time_sec = state["train_time_sec"] if state else 0.0
        self.window_start_sec = state["window_start_sec"] if state else 0.0
        self.window = torch.zeros(len(WINDOW), device=self.device)
        if state:
            self.ema.num_updates.fill_(state["num_ema_updates"])
            windows = torch.tensor(state["windows"], device=self.device)
            same = len(windows) == self.accelerator.num_processes
            # On another number of processes each takes the mean of what there was.
            self.window += windows[self.accelerator.process_index] if same else windows.mean(dim=0)

    def pause_clock(self) -> None:
        """Stop counting time as that of training."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # SYNC: steps that are still queued belong to training, not to what follows.
        self.train_time_sec += time.perf_counter() - self.clock_start

    def resume_clock(self) -> None:
        """Count time as that of training from here on."""
        self.clock_start = time.perf_counter()
