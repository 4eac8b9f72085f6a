"""Averages of the weights of any width, made after a training from its checkpoints. [EDM2]

A training keeps averages of two widths, and its milestones are the snapshots:

    python train.py ema=post_hoc train.milestone_every=200
    python fid.py -m run=runs/NAME checkpoint=std0.03,std0.08 guidance=cfg guidance_scale=1,1.5

The average at time t weighs the weights of time s by (s / t)^gamma. Its width is the standard deviation of
this profile over t. For each of two widths, the second line writes the combination of snapshots that is
nearest to its profile, as a checkpoint, and samples it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn as nn
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from runtime.files import read_json
from training.checkpoint import STATE, damage_of, steps_in
from training.ema.average import EMA

PARTS = ("ema", "ema_wide")  # of a checkpoint
MAX_STD = 0.28  # a uniform average has 1 / sqrt(12) = 0.289
MAX_DEVIATION = 0.1  # of a combination from the profile of its width


class PowerEMA(EMA):
    """An average with a power function as its profile.

    Args:
        std: width, in units of the training time, in (0, 0.28].
    """

    def __init__(self, net: nn.Module, std: float, key: str = "std"):
        check_std(f"ema.{key}", std)
        super().__init__(net, decay=0.0, warmup=False)
        self.std, self.gamma = std, gamma_of(std)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "std": self.std}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({key: value for key, value in state.items() if key != "std"})

    def _weight(self) -> torch.Tensor:
        # 1 - beta_t with beta_t = (1 - 1 / t)^(gamma + 1), [EDM2]; t = 1 at the first update
        return -torch.expm1((self.gamma + 1) * torch.log1p(-1 / (self.num_updates + 1)))


class PostHocEMA(PowerEMA):
    """Two averages, from which others can be made after the training; samples use the first.

    Args:
        std, wide_std: their widths.
    """

    def __init__(self, net: nn.Module, std: float = 0.05, wide_std: float = 0.1):
        super().__init__(net, std)
        self.wide = PowerEMA(net, wide_std, "wide_std")

    def update(self, net: nn.Module, skipped: torch.Tensor) -> None:
        super().update(net, skipped)
        self.wide.update(net, skipped)


def networks_of(ema: EMA) -> list[nn.Module]:
    """Return the networks of an average: the one to sample from, and the wider one if there is one."""
    return [ema.net, *([ema.wide.net] if isinstance(ema, PostHocEMA) else [])]


def check_std(key: str, std: float) -> None:
    if not 0 < std <= MAX_STD:
        raise ValueError(f"{key}={std} must be greater than 0 and at most {MAX_STD}")


class Profile(NamedTuple):
    """An average at time t > 0 with the weights p(s) = (gamma + 1) / t (s / t)^gamma, 0 < s <= t."""

    t: float
    gamma: float


def gamma_of(std: float) -> float:
    """Return the exponent g of the profile of width std: std^2 = (g + 1) / ((g + 2)^2 (g + 3))."""
    # g^3 + 7 g^2 + (16 - std^-2) g + (12 - std^-2) = 0, the largest real root
    roots = np.roots([1, 7, 16 - std**-2, 12 - std**-2])
    return float(max(roots[np.isreal(roots)].real))


def product(a: Profile, b: Profile) -> float:
    """Return the integral of the product of two profiles."""
    low, high = sorted((a, b))
    # (a + 1)(b + 1) / (a + b + 1) (t_low / t_high)^b / t_high, where b belongs to t_high
    factor = (a.gamma + 1) * (b.gamma + 1) / (a.gamma + b.gamma + 1)
    return factor * (low.t / high.t) ** high.gamma / high.t


def coefficients(snapshots: Sequence[Profile], target: Profile) -> np.ndarray:
    """Return the weights (S,), of sum 1, of the combination of S snapshots that is nearest to a profile."""
    A = np.array([[product(a, b) for b in snapshots] for a in snapshots])
    b = np.array([product(a, target) for a in snapshots])
    x = np.linalg.lstsq(A, b, rcond=1e-13)[0]
    return x / x.sum()


def deviation(snapshots: Sequence[Profile], weights: np.ndarray, target: Profile) -> float:
    """Return the distance of a combination from a profile, relative to the profile's norm."""
    # |sum x_i p_i - p|^2 = x A x - 2 x b + |p|^2
    parts, signs = [*snapshots, target], np.append(weights, -1.0)
    products = np.array([[product(a, b) for b in parts] for a in parts])
    return float(np.sqrt(max(0.0, signs @ products @ signs) / product(target, target)))


def reconstruct(run: Path, std: float) -> Path:
    """Write the average of width `std` at the newest step, unless it exists; return its checkpoint folder.

    Raises:
        ValueError: the run did not use ema=post_hoc, a snapshot is damaged, or there are too few for this
            width.
    """
    check_std("std", std)
    steps = dict(steps_in(run / "checkpoints"))
    if not steps:
        raise ValueError(f"run={run} has no checkpoint yet")
    folder = run / "checkpoints" / f"step_{max(steps):08d}_std{std:g}"
    if (folder / "ema.safetensors").exists():
        return folder
    files, snapshots = [], []
    for checkpoint in steps.values():
        if damage := damage_of(checkpoint, [STATE, *(f"{part}.safetensors" for part in PARTS)]):
            raise ValueError(f"{checkpoint} is damaged ({damage}): move it away to leave it out")
        state = read_json(checkpoint / STATE)
        for part in PARTS:
            if "std" not in state.get(part, {}):
                raise ValueError(f"run={run} has no averages of two widths: train with ema=post_hoc")
            files.append(checkpoint / f"{part}.safetensors")
            snapshots.append(Profile(state[part]["num_updates"], gamma_of(state[part]["std"])))
    target = Profile(max(snapshots).t, gamma_of(std))
    weights = coefficients(snapshots, target)
    if (error := deviation(snapshots, weights, target)) > MAX_DEVIATION:
        rule = f"{error:.0%} off this width, must be at most {MAX_DEVIATION:.0%}: lower train.milestone_every"
        raise ValueError(f"std={std:g}: an average of {len(steps)} snapshots of run={run} would be {rule}")
    tensors = {}
    for file, weight in zip(tqdm(files, desc="average", unit="file", leave=False), weights, strict=True):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (not a dictionary)
                part = weight * opened.get_tensor(name).double()
                tensors[name] = tensors[name] + part if name in tensors else part
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir(exist_ok=True)
    save_file({name: tensor.float() for name, tensor in tensors.items()}, partial / "ema.safetensors")
    partial.rename(folder)
    return folder
