"""The training loop.

A run of N steps takes N + 1 turns: each turn first saves and evaluates what the steps before it gave, so that
the last state takes the same path as the others. Every random draw is a function of (seed, step, index of the
micro-batch within the global batch), so that a resumed run, or one on another number of processes, draws the
same.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn as nn
from accelerate import Accelerator
from tqdm import tqdm

from routing import Routing
from runtime.launch import Launch
from training.checkpoint import CheckpointFolder
from training.ema import EMA
from training.history import LossHistory, NotFinite
from training.run_folder import Moved
from training.stopping import StopRequest
from training.trackers import CLOSE_WITHIN_SEC, BackgroundTracker, MetricsFile

STEPS_IN_RESERVE = 5  # of the mean time: what may still be under way when a run must end in time
END_SEC, HURRIED_SEC = (
    3.0,
    5.0,
)  # for the end of the process itself, and for its tracker where it is asked to stop
SLOW_DISK = 100e6  # bytes per second, until a first save tells
LARGEST_NAMED = 5

# Sums since the last log point.
WINDOW = ("loss", "grad_norm", "applied", "skipped", "selection_ratio", "num_forced_bypassed")


MicroBatch = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, int]


class Evaluator(Protocol):
    """What the trainer asks of an evaluator."""

    def run(self, step: int) -> Iterator[tuple[str, float | np.ndarray]]: ...


class RoutePlan(Protocol):
    """What the trainer asks of the plan of a network's routes."""

    def ratios(self, step: int, num_forced: int) -> tuple[float, ...]: ...

    def num_forced_bypassed(self, force_keep: torch.Tensor, ratios: Sequence[float]) -> torch.Tensor: ...


class Trainer:
    """Fit a preconditioned network to a stream of micro-batches.

    Args:
        precond: the network in its preconditioning, prepared by accelerate.
        net: the same network, unwrapped.
        loss_fn: loss_fn(precond, x, class_labels, generator=, selection_ratio=, force_keep=, loss_mask=) ->
            (N,).
        route_plan: tells the ratio of each route at each step.
        token_mask: turns masks (N, H, W) into the tokens (N, T) that they force to stay; None where masks are
            not used.
        micro_batches: gives this process's micro-batches (stored entries, labels, masks, num_forced) from a
            step on.
        to_latents: turns stored entries into what the network sees, with a generator for what it draws.
        check_std: says what is wrong with the standard deviation of the first batch of a run, if anything.
        evaluators: (every how many steps, evaluator).
        after_first_window: called with the last step's ratios at the first log point where tokens bypass,
            when everything is compiled.
        check_place: raises Moved where the folder of the run is no longer in its place; asked in the first
            process.
        stop_request: says when all processes are to save and end.
        history: keeps what single steps gave until the next log point.
        metrics_file: gets every line; None on all processes but the first, like `tracker`.
        batch_size, micro_batch_size: the global batch, and the part of it that one forward takes.
        grad_clip: largest norm of the gradient; None does not clip.
    """

    def __init__(
        self,
        *,
        accelerator: Accelerator,
        launch: Launch,
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
        check_place: Callable[[], None],
        stop_request: StopRequest,
        history: LossHistory,
        metrics_file: MetricsFile | None,
        tracker: BackgroundTracker | None,
        seed: int,
        total_steps: int,
        batch_size: int,
        micro_batch_size: int,
        grad_clip: float | None,
        log_every: int,
        save_every: int,
        state: dict[str, Any] | None,
    ):
        self.accelerator, self.launch, self.device = accelerator, launch, launch.device
        self.precond, self.net, self.ema, self.optimizer, self.loss_fn = precond, net, ema, optimizer, loss_fn
        self.route_plan, self.token_mask = route_plan, token_mask
        self.micro_batches, self.to_latents, self.check_std = micro_batches, to_latents, check_std
        self.evaluators, self.checkpoints = evaluators, checkpoints
        self.after_first_window = after_first_window
        self.check_place, self.stop_request, self.history = check_place, stop_request, history
        self.metrics_file, self.tracker = metrics_file, tracker
        self.seed, self.total_steps, self.grad_clip = seed, total_steps, grad_clip
        self.batch_size, self.micro_batch_size = batch_size, micro_batch_size
        self.log_every, self.save_every = log_every, save_every
        self.parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
        self._restore(state)

    def fit(self) -> str:
        """Train until `total_steps`, or until asked to stop.

        Returns:
            Why it stopped before the end; empty at the end.

        Raises:
            NotFinite: too many steps in a row had to be skipped.
            Moved: the folder of the run is no longer in its place.
            OSError: what is to be saved last cannot be written.
        """
        micro_batches = iter(self.micro_batches(self.step))
        bar = {
            "initial": self.step,
            "total": self.total_steps,
            "desc": "train",
            "unit": "step",
            "mininterval": 1.0,
        }
        with tqdm(**bar, disable=not self.launch.is_main) as self.progress:
            self.resume_clock()
            self.fit_start = self.clock_start
            while True:
                reason = self._save_and_evaluate()
                if reason or self.step == self.total_steps:
                    return reason
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
        if self.launch.is_main:
            tqdm.write(text)

    def close(self, hurried: bool) -> None:
        """Close what the trainer was given to write to; a run that is to stop waits for its tracker a few
        seconds only.
        """
        if self.metrics_file:
            self.metrics_file.close()
        if self.tracker:
            self.tracker.close(HURRIED_SEC if hurried else CLOSE_WITHIN_SEC)

    def train_step(self, micro_batches: Iterator[MicroBatch]) -> None:
        """Take one optimizer step on this process's next micro-batches; the caller counts `step`."""
        self.net.train()
        num_processes = self.launch.world_size
        indices = range(self.launch.rank, self.batch_size // self.micro_batch_size, num_processes)
        loss, sample_losses = torch.zeros((), device=self.device), []
        for index in indices:
            *tensors, num_forced = next(micro_batches)
            stored, labels, masks = (
                t if t is None else t.to(self.device, non_blocking=True) for t in tensors
            )
            self.ratios = self.route_plan.ratios(
                self.step, num_forced
            )  # the same for all micro-batches of a step
            generator = self._generator(index)
            force_keep = None if masks is None else self.token_mask(masks)
            routing = Routing(self.ratios, force_keep)
            x = self.to_latents(stored, generator)
            if self.step == 0 and index == 0 and (warning := self.check_std(x.std())):  # SYNC: once in a run
                self.show(warning)
            last = index == indices[-1]
            with nullcontext() if last else self.accelerator.no_sync(self.precond.net):
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.accelerator.bf16):
                    losses = self.loss_fn(
                        self.precond, x, labels, generator=generator, routing=routing, mask=masks
                    )
                micro_loss = losses.mean() / len(indices)
                # A loss that is not finite makes the gradients so too, on all processes: the step is skipped.
                self.accelerator.backward(micro_loss * torch.where(micro_loss.isfinite(), 1.0, torch.nan))
            loss += micro_loss.detach()
            sample_losses.append(losses.detach())
            if masks is not None:
                num_bypassed = self.route_plan.num_forced_bypassed(force_keep, self.ratios)
                self.window[WINDOW.index("num_forced_bypassed")] += num_bypassed
        self.window[WINDOW.index("selection_ratio")] += sum(self.ratios) / max(1, len(self.ratios))
        self.history.add(loss, self.update_weights(loss), sample_losses)

    def update_weights(self, loss: torch.Tensor) -> torch.Tensor:
        """Clip, step and average the weights, and add to the sums of the window.

        Returns:
            Whether the step was skipped: 0 or 1, 0-d, on the device.
        """
        grad_norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in self.parameters])
        if self.grad_clip is not None:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, self.grad_clip, grad_norm)
        # A step that is not finite is skipped on the device, without asking it. The gradients are the same on
        # all processes, and so is the decision.
        skipped = (~grad_norm.isfinite()).float()
        self.optimizer.found_inf = skipped
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ema.update(self.net, skipped)
        applied = torch.stack([loss, grad_norm.to(loss), torch.ones_like(loss)]) * (1 - skipped)
        self.window[:3] += applied.nan_to_num(0.0, 0.0, 0.0)  # loss, grad_norm, applied
        self.window[WINDOW.index("skipped")] += skipped
        return skipped

    def _generator(self, micro_index: int) -> torch.Generator:
        state = np.random.SeedSequence([self.seed, self.step, micro_index]).generate_state(1, np.uint64)
        return torch.Generator(self.device).manual_seed(int(state[0]))

    def log_training(self) -> None:
        """Write a line of the steps since the last one."""
        # SYNC: the sums of the window come to the host.
        sums = self.launch.sum(self.window).div(self.launch.world_size).tolist()
        loss, grad_norm, applied, skipped, selection_ratio, num_forced_bypassed = sums
        num_steps = applied + skipped
        values = {
            "loss": loss / applied if applied else None,
            "grad_norm": grad_norm / applied if applied else None,
            "num_skipped_steps": int(skipped),
            "images_per_sec": num_steps * self.batch_size / (self.train_time_sec - self.window_start_sec),
            "train_time_sec": self.train_time_sec,
        }
        if self.net.routes:
            values["selection_ratio"] = selection_ratio / num_steps
            values["num_forced_bypassed"] = round(num_forced_bypassed * self.launch.world_size)
        try:
            found = self.history.report(self.step, self._rows())
        except NotFinite as error:
            self._log({**values, "skipped_steps": error.details["skipped_steps"]})
            raise NotFinite(f"{error}. {self._largest_norms()}", error.details) from error
        self._log({**values, **found})
        for kind, steps in found.items():
            for step in steps:
                what = (
                    "skipped, not finite" if kind == "skipped_steps" else f"loss {step['loss']:.4g}, a spike"
                )
                self.show(f"step {step['step']}: {what}; largest losses in entries {step['entries']}")
        self.progress.set_postfix(
            loss=f"{values['loss'] or float('nan'):.4f}", img_per_sec=f"{values['images_per_sec']:.0f}"
        )
        self.window.zero_()
        self.window_start_sec = self.train_time_sec

    def _rows(self) -> list[list[list[float]]]:
        # SYNC: what single steps gave comes to the host, from all processes.
        # All rows, since not every backend gathers none of them.
        return self.launch.gather(self.history.rows)[:, : self.history.num_rows].tolist()

    def _largest_norms(self) -> str:
        norms = {name: parameter.norm().item() for name, parameter in self.net.named_parameters()}
        largest = sorted(norms, key=norms.get, reverse=True)[:LARGEST_NAMED]
        return "Largest parameter norms: " + ", ".join(f"{name} {norms[name]:.4g}" for name in largest)

    def _log(self, values: dict[str, Any]) -> None:
        self.launch.broadcast_from_main(self.check_place)  # a tracker would open its file at the old place
        values = {"num_images": self.step * self.batch_size, **values}
        if self.metrics_file and (told := _without_pictures(values)).keys() != {"num_images"}:
            self.metrics_file.log(told, self.step)
        if self.tracker:
            shown = {
                key: value for key, value in values.items() if isinstance(value, int | float | np.ndarray)
            }
            self.tracker.log(shown, self.step)

    def _after_first_window(self) -> None:
        if self.after_first_window and any(self.ratios):
            self.progress.set_description("time the routes")
            self.after_first_window(self.ratios)
            self.after_first_window = None
            self.progress.set_description("train")

    def _save_and_evaluate(self) -> str:
        """Do what is due between two steps, and return why the run is to stop here, if it is."""
        last, stop = self.step == self.total_steps, self._stop()
        due = [evaluator for every, evaluator in self.evaluators if self._is_due(every) or last]
        save = (self._is_due(self.save_every) or last or stop) and self.step > self.saved_step
        unlogged = last and self.step % self.log_every
        if self.step == 0 or not (save or due or unlogged):
            return stop
        self.pause_clock()
        if save:
            self._save(must=bool(last or stop))
        if unlogged and not stop:
            self.log_training()  # after the save: a longer run goes on as if it had not been written
        values = {}
        for evaluator in due:
            start = time.perf_counter()
            # What is due and not done is done when the run goes on.
            stop = stop or self._stop(evaluation=True)
            if stop:
                if self.step > self.saved_step:
                    self._save(must=True)
                return stop
            self.launch.broadcast_from_main(self.check_place)  # evaluators write to the folder, too
            self.progress.set_description("evaluate")
            values |= evaluator.run(self.step)
            self.longest_evaluation_sec = max(self.longest_evaluation_sec, time.perf_counter() - start)
        self.progress.set_description("train")
        if values:
            self._log(values)
        if numbers := _without_pictures(values):
            self.show(
                f"step {self.step}: " + "  ".join(f"{key} {value:.4f}" for key, value in numbers.items())
            )
        self.resume_clock()
        return stop

    def _stop(self, evaluation: bool = False) -> str:
        mean_step_sec = (time.perf_counter() - self.fit_start) / max(1, self.step - self.first_step)
        end_sec = END_SEC + (HURRIED_SEC if self.tracker else 0.0)
        reserve_sec = end_sec + self.longest_save_sec + STEPS_IN_RESERVE * mean_step_sec
        return self.stop_request.agreed(reserve_sec + (self.longest_evaluation_sec if evaluation else 0.0))

    def _is_due(self, every: int) -> bool:
        return self.step > 0 and self.step % every == 0

    def _save(self, must: bool) -> None:
        """Save, or say why not: a disk that is full for now must not cost what is in memory, unless this is
        the last chance.
        """
        start = time.perf_counter()
        # SYNC: everything comes to the host. Each process keeps its own sums, so that a resumed window adds
        # up bitwise.
        windows = self.launch.gather(self.window).tolist()
        state = {
            "train_time_sec": self.train_time_sec,
            "window_start_sec": self.window_start_sec,
            "windows": windows,
            "num_ema_updates": int(self.ema.num_updates),
            "history": self.history.state(self._rows()),
            "longest_save_sec": self.longest_save_sec,
        }
        try:
            self.launch.broadcast_from_main(partial(self._write, state))  # also waits for the first process
            self.saved_step = self.step
        except Moved:
            raise
        except OSError as error:
            kept = (
                f"the last checkpoint is that of step {self.saved_step}"
                if self.saved_step
                else "there is no checkpoint yet"
            )
            if must:
                raise OSError(f"step {self.step} could not be saved: {error}; {kept}") from error
            self.show(
                f"warning: step {self.step} could not be saved: {error}; {kept}. Training goes on and will "
                "save again"
            )
        self.longest_save_sec = max(self.longest_save_sec, time.perf_counter() - start)

    def _write(self, state: dict[str, Any]) -> None:
        self.check_place()
        state = {**state, **self.metrics_file.state()}
        self.checkpoints.save(self.step, self.net, self.ema.net, self.optimizer, state)

    def _restore(self, state: dict[str, Any] | None) -> None:
        self.step = self.saved_step = self.first_step = state["step"] if state else 0
        self.train_time_sec = state["train_time_sec"] if state else 0.0
        self.window_start_sec = state["window_start_sec"] if state else 0.0
        self.window = torch.zeros(len(WINDOW), device=self.device)
        # The weights, their average, and two numbers of the optimizer for each.
        num_bytes = 4 * 4 * sum(parameter.numel() for parameter in self.net.parameters())
        self.longest_save_sec, self.longest_evaluation_sec = num_bytes / SLOW_DISK, 0.0
        if state:
            self.longest_save_sec = state["longest_save_sec"] or self.longest_save_sec
            if state["history"]:
                self.history.restore(state["history"], self.launch.rank, self.launch.world_size)
            self.ema.num_updates.fill_(state["num_ema_updates"])
            windows = torch.tensor(state["windows"], device=self.device)
            same = len(windows) == self.launch.world_size
            # On another number of processes each takes the mean of what there was, and its share of what is
            # counted.
            self.window += windows[self.launch.rank] if same else windows.mean(dim=0)
            self.window[WINDOW.index("num_forced_bypassed")] *= len(windows) / self.launch.world_size

    def pause_clock(self) -> None:
        """Stop counting time as that of training."""
        if self.device.type == "cuda":
            # SYNC: steps that are still queued belong to training, not to what follows.
            torch.cuda.synchronize()
        self.train_time_sec += time.perf_counter() - self.clock_start

    def resume_clock(self) -> None:
        """Count time as that of training from here on."""
        self.clock_start = time.perf_counter()


def _without_pictures(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if not isinstance(value, np.ndarray)}
