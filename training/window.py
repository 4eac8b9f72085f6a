"""Sums over the steps since the last log point, and what is logged of them."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from runtime.launch import Launch
from runtime.memory import peak_gib, reset_peak
from training.clock import Clock

SUMS = ("loss", "grad_norm", "applied", "skipped", "selection_ratio", "num_forced_bypassed", "tflop")


@dataclass(frozen=True)
class Work:
    """What an image costs, and what a device is made for.

    Args:
        flops: of a training step for an image, at the ratios of the routes.
        peak_flops_per_sec: of a device, as specified; None where it is not known.
    """

    flops: Callable[[tuple[float, ...]], float]
    peak_flops_per_sec: float | None


class Window:
    """The steps since the last log point, summed on the device.

    Args:
        batch_size: images of a step, on all ranks together.
        work: None where it is not known; it is not logged then.
    """

    def __init__(self, launch: Launch, clock: Clock, batch_size: int, routed: bool, work: Work | None):
        self.launch, self.clock, self.batch_size, self.routed = launch, clock, batch_size, routed
        self.work = work
        self.sums, self.start_sec = torch.zeros(len(SUMS), device=launch.device), 0.0

    def add_step(
        self, loss: torch.Tensor, grad_norm: torch.Tensor, skipped: torch.Tensor, ratios: tuple[float, ...]
    ) -> None:
        """Add a step at ratios of the routes; loss and norm count where it was not skipped (0 or 1, 0-d)."""
        applied = torch.stack([loss, grad_norm.to(loss), torch.ones_like(loss)]) * (1 - skipped)
        self.sums[:3] += applied.nan_to_num(0.0, 0.0, 0.0)
        self.sums[SUMS.index("skipped")] += skipped
        self.sums[SUMS.index("selection_ratio")] += sum(ratios) / max(1, len(ratios))
        if self.work:
            self.sums[SUMS.index("tflop")] += self.work.flops(ratios) * self.batch_size / 1e12

    def add_bypassed(self, num_tokens: torch.Tensor) -> None:
        """Add the tokens of a micro-batch that bypassed although a mask forces them to stay."""
        self.sums[SUMS.index("num_forced_bypassed")] += num_tokens

    def values(self) -> dict[str, Any]:
        """Means over the steps that applied, on all ranks."""
        # SYNC: the sums come to the host.
        sums = dict(zip(SUMS, self.launch.sum(self.sums).div(self.launch.world_size).tolist(), strict=True))
        applied, num_steps = sums["applied"], sums["applied"] + sums["skipped"]
        window_sec = self.clock.train_time_sec - self.start_sec
        values = {
            "loss": sums["loss"] / applied if applied else None,
            "grad_norm": sums["grad_norm"] / applied if applied else None,
            "num_skipped_steps": int(sums["skipped"]),
            "images_per_sec": num_steps * self.batch_size / window_sec,
            "train_time_sec": self.clock.train_time_sec,
        }
        if self.work:
            values["tflops_per_sec"] = sums["tflop"] / window_sec
        if self.work and self.work.peak_flops_per_sec:
            peak_tflops = self.work.peak_flops_per_sec * self.launch.world_size / 1e12
            values["utilisation"] = values["tflops_per_sec"] / peak_tflops
        with suppress(OSError):  # where there is no /proc
            values["peak_memory_gib"] = peak_gib(self.launch.device)
        if self.routed:
            values["selection_ratio"] = sums["selection_ratio"] / num_steps
            values["num_forced_bypassed"] = round(sums["num_forced_bypassed"] * self.launch.world_size)
        return values

    def start(self) -> None:
        """Start the next window."""
        self.sums.zero_()
        with suppress(OSError):
            reset_peak(self.launch.device)
        self.start_sec = self.clock.train_time_sec

    def state_dict(self) -> dict[str, Any]:
        """The sums of each rank, so that a resumed window adds up bitwise."""
        return {"sums": self.launch.gather(self.sums).tolist(), "start_sec": self.start_sec}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint; on another number of ranks each takes the mean of the sums, and its
        share of the counts.
        """
        sums, self.start_sec = torch.tensor(state["sums"], device=self.sums.device), state["start_sec"]
        same = len(sums) == self.launch.world_size
        self.sums = sums[self.launch.rank] if same else sums.mean(dim=0)
        self.sums[SUMS.index("num_forced_bypassed")] *= len(sums) / self.launch.world_size
