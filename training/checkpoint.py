"""Checkpoints: tensors and plain types only, written beside their place and renamed when they are complete.

A checkpoint is a folder `step_00001000` with `net.safetensors`, `ema.safetensors` (the weights to sample
from, usable on their own), `optimizer.safetensors`, `state.json`, and `SHA256SUMS`, against which these four
are checked before they are used (`sha256sum -c SHA256SUMS` does the same by hand).
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from runtime.files import finite, read_bounded, sha256, sync
from runtime.launch import ALONE, Launch

STEP_FOLDER = re.compile(r"step_(\d{8})")
STATE, SUMS = "state.json", "SHA256SUMS"
MAX_SUMS_BYTES = 2**12


class Part(Protocol):
    """What a checkpoint keeps of a run: nested dictionaries of tensors and of what JSON knows.

    Both methods are collective: all ranks call them in one order; all load what the first rank saved.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> object: ...


class CheckpointFolder:
    """The checkpoints of one run.

    Args:
        folder: `checkpoints/` of the run.
        keep_last: how many of the newest are kept.
        milestone_every: checkpoints at multiples of this many steps are never removed.
    """

    def __init__(self, folder: Path, keep_last: int, milestone_every: int | None, launch: Launch = ALONE):
        self.folder, self.keep_last, self.milestone_every = folder, keep_last, milestone_every
        self.launch = launch

    def save(self, step: int, parts: Mapping[str, Part]) -> None:
        """Write a checkpoint of `step`, then remove those that are no longer kept.

        The tensors of a part are in NAME.safetensors, all else in state.json.

        Raises:
            OSError: it could not be written, on any rank; what was there before is still there.
        """
        states = {name: part.state_dict() for name, part in parts.items()}
        self.launch.broadcast_from_main(lambda: self._write(step, states))  # also waits for the first rank

    def load(self, checkpoint: Path, parts: Mapping[str, Part]) -> int:
        """Load a checkpoint into its parts, and return its step."""
        state = json.loads((checkpoint / STATE).read_text())
        for name, part in parts.items():
            file = checkpoint / f"{name}.safetensors"
            part.load_state_dict(_together(load_file(file) if file.exists() else {}, state[name]))
        return state["step"]

    def newest_intact(self, show: Callable[[str], None]) -> Path | None:
        """Return the newest intact checkpoint, or None if there is none at all.

        Damaged ones are reported and renamed to `step_N.damaged`, so that nothing counts or uses them.

        Raises:
            ValueError: there are checkpoints, and all are damaged.
        """
        for _, path in reversed(steps_in(self.folder)):
            damage = damage_of(path)
            if damage is None:
                return path
            aside = path.with_name(f"{path.name}.damaged")
            _remove(aside)
            path.rename(aside)
            show(f"warning: {path} is damaged ({damage}): renamed, the checkpoint before it is used")
        if list(self.folder.glob("*.damaged")):
            rule = "no intact checkpoint to resume from: start another with run_name=NAME"
            raise ValueError(f"{self.folder}: {rule}")
        return None

    def _write(self, step: int, states: Mapping[str, dict[str, Any]]) -> None:
        final = self.folder / f"step_{step:08d}"
        partial = self.folder / f".{final.name}.partial"
        for left_over in self.folder.glob(".step_*"):  # of a process that was killed
            _remove(left_over)
        try:
            self.folder.mkdir(exist_ok=True)  # not its parents: a run folder that is gone is not made again
            partial.mkdir()
            rest: dict[str, Any] = {"step": step}
            for name, state in states.items():
                tensors, rest[name] = _apart(state)
                if tensors:
                    tensors = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
                    save_file(tensors, partial / f"{name}.safetensors")
            (partial / STATE).write_text(json.dumps(finite(rest)) + "\n")
            sums = [f"{sha256(file)}  {file.name}\n" for file in sorted(partial.iterdir())]
            (partial / SUMS).write_text("".join(sums))
            for path in (*partial.iterdir(), partial):
                sync(path)
        except (OSError, SafetensorError) as error:  # safetensors has its own for a full disk
            shutil.rmtree(partial, ignore_errors=True)
            raise error if isinstance(error, OSError) else OSError(str(error)) from error
        _discard(final)
        partial.rename(final)
        sync(self.folder)
        # The newest was just written, and newer ones that were damaged have been renamed.
        for step, path in steps_in(self.folder)[: -self.keep_last]:
            if not self.milestone_every or step % self.milestone_every:
                _discard(path)


def steps_in(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of each complete checkpoint, oldest first."""
    found = [(STEP_FOLDER.fullmatch(path.name), path) for path in folder.glob("step_*")]
    return sorted((int(match[1]), path) for match, path in found if match)


def latest_checkpoint(run_folder: Path) -> Path | None:
    """The newest checkpoint of a run, or None."""
    found = steps_in(run_folder / "checkpoints")
    return found[-1][1] if found else None


def find_checkpoint(run_folder: Path, asked: str | None) -> Path:
    """Find a checkpoint by step, name or path; None: the newest."""
    found = steps_in(run_folder / "checkpoints")
    if asked is None:
        if not found:
            raise FileNotFoundError(f"run={run_folder} has no checkpoint yet")
        return found[-1][1]
    named = dict(found).get(int(asked)) if asked.isdigit() else None
    for folder in (named, run_folder / "checkpoints" / asked, Path(asked)):
        if folder and folder.is_dir():
            return folder
    known = ", ".join(str(step) for step, _ in found)
    raise FileNotFoundError(f"checkpoint={asked} not found: run={run_folder} has steps {known or 'none yet'}")


def damage_of(checkpoint: Path, names: Iterable[str] | None = None) -> str | None:
    """The damage of files of a checkpoint, all by default; None if they are intact."""
    sums = checkpoint / SUMS
    if not sums.is_file():
        return f"it has no {SUMS}"
    try:
        with sums.open("rb") as opened:
            lines = read_bounded(opened, MAX_SUMS_BYTES).decode().splitlines()
        digests = {name: digest for digest, name in (line.split("  ") for line in lines)}
        names = digests.keys() | {STATE} if names is None else names  # its line is the last one
        files = {name: checkpoint / name for name in sorted(names)}
        wrong = [n for n, file in files.items() if not file.is_file() or digests.get(n) != sha256(file)]
    except (FileNotFoundError, ValueError) as error:  # others may pass, and say nothing of the files
        return str(error)
    return f"{', '.join(wrong)} is not what was written" if wrong else None


def instead_of(damaged: Path, names: Iterable[str]) -> str:
    """The newest checkpoint with intact files beside a damaged one, in words."""
    for step, path in reversed(steps_in(damaged.parent)):
        if path != damaged and damage_of(path, names) is None:
            return f"step {step} is intact, in {path}"
    return "its run has no other that is intact"


def _discard(checkpoint: Path) -> None:
    """Remove a checkpoint; at no moment does a part of it look like one."""
    if os.path.lexists(checkpoint):
        hidden = checkpoint.with_name(f".{checkpoint.name}.removed")
        checkpoint.rename(hidden)
        _remove(hidden)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _apart(state: Mapping[Any, Any], prefix: str = "") -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Split nested dictionaries into tensors, by their keys joined by /, and the rest."""
    tensors, rest = {}, {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            tensors[f"{prefix}{key}"] = value
        elif isinstance(value, dict):
            inner, rest[key] = _apart(value, f"{prefix}{key}/")
            tensors |= inner
        else:
            rest[key] = value
    return tensors, rest


def _together(tensors: Mapping[str, torch.Tensor], rest: Mapping[str, Any]) -> dict[Any, Any]:
    """Undo `_apart`, after JSON has made text of keys that are numbers, as those of an optimizer are."""
    state = {int(key) if key.isdigit() else key: value for key, value in rest.items()}
    for key, value in state.items():
        if isinstance(value, dict):
            prefix = f"{key}/"
            inner = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            state[key] = _together(inner, value)
    return state | {name: tensor for name, tensor in tensors.items() if "/" not in name}
