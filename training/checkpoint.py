"""Checkpoints: tensors and plain types only, written beside their place and renamed when they are complete.

A checkpoint is a folder `step_00001000` with `net.safetensors`, `ema.safetensors` (the weights to sample
from, usable on their own), `optimizer.safetensors`, `state.json`, and `SHA256SUMS` of these four, which are
held against it before they are used (`sha256sum -c SHA256SUMS` does the same by hand).
"""

import argparse
import json
import os
import pickle
import re
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn as nn
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from runtime.arrays import check_stored
from runtime.files import finite, read_bounded, sha256, sync
from runtime.launch import ALONE, Launch

STEP_FOLDER = re.compile(r"step_(\d{8})")
WRAPPERS = ("module.", "model.", "net.")
COMPILED = "_orig_mod."  # stands wherever a part of a network was compiled
# Where public code keeps weights in its files, averaged ones first: DiT, SiT, REPA and MaskDiT, TREAD.
ENTRIES = ("ema", "ema_state_dict", "model", "model_state_dict", "state_dict")
STATE, SUMS = "state.json", "SHA256SUMS"
MAX_SUMS_BYTES = 2**12
SAME = "model/size, model/block, model.num_prefix_tokens, model.learn_sigma"
MAX_ERROR = 300  # characters of what torch has to say of weights
# What damaged bytes make torch.load raise is written down nowhere.
LOAD_ERRORS = (RuntimeError, EOFError, ValueError, OSError, pickle.UnpicklingError, TypeError, LookupError)
LOAD_ERRORS += (AttributeError, AssertionError, OverflowError, MemoryError, struct.error)


class Part(Protocol):
    """What a checkpoint keeps of a run: nested dictionaries of tensors and of what JSON knows.

    Both methods are collective: all ranks call them in one order, and all load what the first one's was.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> object: ...


class CheckpointFolder:
    """The checkpoints of one run.

    Args:
        folder: `checkpoints/` of the run.
        keep_last: how many of the newest are kept.
        milestone_every: checkpoints at multiples of this many steps are kept for ever; None keeps none.
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
        """Return the newest checkpoint that is as it was written, or None if there is none at all.

        Damaged ones are told of and put aside, as `step_N.damaged`, so that nothing counts or uses them.

        Raises:
            ValueError: there are checkpoints, and all are damaged.
        """
        found = steps_in(self.folder)
        for _, path in reversed(found):
            damage = damage_of(path)
            if damage is None:
                return path
            aside = path.with_name(f"{path.name}.damaged")
            _remove(aside)
            path.rename(aside)
            show(
                f"warning: {path} is damaged ({damage}), put aside as {aside.name}; the checkpoint before it "
                "is used"
            )
        if found or list(self.folder.glob("*.damaged")):
            raise ValueError(
                f"{self.folder}: no intact checkpoint to resume from: start another with run_name=NAME"
            )
        return None

    def _write(self, step: int, states: Mapping[str, dict[str, Any]]) -> None:
        final = self.folder / f"step_{step:08d}"
        partial = self.folder / f".{final.name}.partial"
        for left_over in self.folder.glob(".step_*"):  # of a process that was killed on the way
            _remove(left_over)
        try:
            self.folder.mkdir(exist_ok=True)  # not its parents: a run folder that is gone is not made again
            partial.mkdir()
            rest = {"step": step}
            for name, state in states.items():
                tensors, rest[name] = _apart(state)
                if tensors:
                    _save_tensors(partial / f"{name}.safetensors", tensors)
            (partial / STATE).write_text(json.dumps(finite(rest)) + "\n")
            sums = [f"{sha256(file)}  {file.name}\n" for file in sorted(partial.iterdir())]
            (partial / SUMS).write_text("".join(sums))
            for path in (*partial.iterdir(), partial):
                sync(path)
        except OSError:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        _discard(final)
        partial.rename(final)
        sync(self.folder)
        self._remove_old()

    def _remove_old(self) -> None:
        # The newest was just written, and newer ones that were damaged have been put aside.
        for step, path in steps_in(self.folder)[: -self.keep_last]:
            if not self.milestone_every or step % self.milestone_every:
                _discard(path)


def steps_in(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of each complete checkpoint, oldest first."""
    found = [(STEP_FOLDER.fullmatch(path.name), path) for path in folder.glob("step_*")]
    return sorted((int(match[1]), path) for match, path in found if match)


def latest_checkpoint(run_folder: Path) -> Path | None:
    """Return the newest checkpoint of a run, or None."""
    found = steps_in(run_folder / "checkpoints")
    return found[-1][1] if found else None


def damage_of(checkpoint: Path, names: Iterable[str] | None = None) -> str | None:
    """Return what is wrong with files of a checkpoint, all by default; None if each is as it was written.

    Raises:
        OSError: it cannot be read.
    """
    sums = checkpoint / SUMS
    if not checkpoint.is_dir():
        return "it is no folder"
    if not sums.is_file():
        return f"it has no {SUMS}"
    try:
        with sums.open("rb") as opened:
            lines = read_bounded(opened, MAX_SUMS_BYTES).decode().splitlines()
        digests = {name: digest for digest, name in (line.split("  ") for line in lines)}
        names = digests.keys() | {STATE} if names is None else names  # its line is the last one
        if no_files := [name for name in sorted(names) if not (checkpoint / name).is_file()]:
            return f"{no_files[0]} is not there, or no file"
        wrong = [name for name in sorted(names) if digests.get(name) != sha256(checkpoint / name)]
    except (FileNotFoundError, ValueError) as error:  # others may pass, and say nothing of the files
        return str(error)
    return f"{', '.join(wrong)} is not what was written" if wrong else None


def load_weights(net: nn.Module, source: str | Path) -> dict[str, str | None]:
    """Load weights into a network, by name.

    Args:
        source: a `.safetensors` file; a `.pt` or `.pth` file, read without executing code from it, of which
            the first of `ENTRIES` is taken that is there; a checkpoint folder or a run folder, whose averaged
            weights are taken. Names may carry the prefixes of wrappers (`module.`, `model.`, `net.`) and of
            compilation.

    Returns:
        Which file was read, and the entry that was taken (None: its top).

    Raises:
        FileNotFoundError: there is nothing at `source`.
        ValueError: the file cannot be read, is not as its checkpoint was written, or its names or shapes are
            not those of the network.
    """
    file = _weights_file(Path(source))
    if is_own_checkpoint(file) and (damage := damage_of(file.parent, [file.name])):
        raise ValueError(f"{file.parent} is damaged ({damage}): use another checkpoint")
    return {"file": str(file), "entry": _load_into(net, file)}


def is_own_checkpoint(source: str | Path) -> bool:
    """Return whether weights lie in a checkpoint of this project, whose run tells what they predict.

    Raises:
        FileNotFoundError: there is nothing at `source`.
    """
    return STEP_FOLDER.fullmatch(_weights_file(Path(source)).parent.name) is not None


def _load_into(net: nn.Module, file: Path) -> str | None:
    tensors, entry = _load_tensors(file)
    try:
        net.load_state_dict({_strip(name): tensor for name, tensor in tensors.items()})
    except RuntimeError as error:
        raise ValueError(
            f"{file}: weights do not match the model ({SAME} must be the same): "
            f"{' '.join(str(error).split())[:MAX_ERROR]}"
        ) from error
    return entry


def _weights_file(source: Path) -> Path:
    if source.is_dir():
        folder = latest_checkpoint(source) if (source / "checkpoints").is_dir() else source
        source = source / "checkpoints" if folder is None else folder / "ema.safetensors"
    if not source.is_file():
        raise FileNotFoundError(
            f"{source} not found: give a weights file, a checkpoint folder or a run folder"
        )
    return source


def shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes in a `.safetensors` file by name, without reading the tensors.

    Raises:
        FileNotFoundError: it is not there.
        ValueError: it is damaged.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not there, or no file")
    try:
        with safe_open(file, "pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{file} is truncated or no safetensors file: {error}") from error


def _load_tensors(file: Path) -> tuple[dict[str, torch.Tensor], str | None]:
    """Return named tensors, and the entry of the file that they were in (None: at its top)."""
    if file.suffix == ".safetensors":
        try:
            return load_file(file), None
        except (SafetensorError, KeyError, ValueError) as error:
            raise ValueError(f"{file} is truncated or no safetensors file: {error}") from error
    check_stored(file)
    try:
        # The public DiT and SiT checkpoints carry their arguments in a Namespace, which can run nothing.
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(file, map_location="cpu", weights_only=True)
    except LOAD_ERRORS as error:
        raise ValueError(
            f"{file} is damaged, or holds more than plain tensors, which is not loaded"
        ) from error
    entry = None
    if isinstance(content, dict):
        entry = next((key for key in ENTRIES if isinstance(content.get(key), dict)), None)
        content = content if entry is None else content[entry]
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in content.items()
    ):
        raise ValueError(f"{file} must hold named tensors, at its top or under one of {', '.join(ENTRIES)}")
    return content, entry


def _save_tensors(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    try:
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, file)
    except SafetensorError as error:  # a full disk, among others
        raise OSError(f"{file}: {error}") from error


def _discard(checkpoint: Path) -> None:
    """Remove a checkpoint; at no moment does a part of it look like one."""
    if os.path.lexists(checkpoint):
        hidden = checkpoint.with_name(f".{checkpoint.name}.removed")
        checkpoint.rename(hidden)
        _remove(hidden)


def _remove(path: Path) -> None:
    """Remove a folder, or a file or link that is in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _strip(name: str) -> str:
    name = name.replace(COMPILED, "")
    while prefix := next((prefix for prefix in WRAPPERS if name.startswith(prefix)), None):
        name = name.removeprefix(prefix)
    return name


def _apart(state: Mapping[Any, Any], prefix: str = "") -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of nested dictionaries, by their keys joined by /, and the rest."""
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
