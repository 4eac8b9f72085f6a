"""Checkpoints: tensors and plain types only. They are written to a hidden folder and renamed once complete.

A checkpoint is a folder `step_00001000` with `net.safetensors`, `ema.safetensors` (the weights to sample
from, usable on their own), `optimizer.safetensors`, `state.json` and `SHA256SUMS`. All files are checked
against `SHA256SUMS` before use; `sha256sum -c SHA256SUMS` makes the same check by hand. Sharded weights and
optimizer states are written by all processes, each to its `shard-N-*.safetensors`, in the layout of torch's
distributed checkpoints. Any number of processes, sharded or not, can load either kind.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch.distributed import is_initialized

from runtime.files import finite, read_bounded, sha256, sync
from runtime.launch import ALONE, Launch
from training.optimizer import Optimizer
from training.sharding import is_sharded, part_of, whole

STEP_FOLDER = re.compile(r"step_(\d{8})")
STATE, SUMS = "state.json", "SHA256SUMS"
MAX_SUMS_BYTES = 2**18
WHOLE = ("ema", "ema_wide")  # parts whose tensors are in one file, although they are sharded

State = tuple[dict[str, torch.Tensor], dict[str, Any]]  # of a part: tensors by name, and the rest


class Part(Protocol):
    """A stateful part of a run. Its state is a nested dictionary of tensors and JSON values.

    Both methods are collective: all ranks call them in the same order, and all load the same file.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> object: ...


class CheckpointFolder:
    """The checkpoints of one run.

    Args:
        folder: `checkpoints/` of the run.
        keep_last: number of newest checkpoints to keep.
        milestone_every: checkpoints at multiples of this number of steps are never removed; None: none.
    """

    def __init__(self, folder: Path, keep_last: int, milestone_every: int | None, launch: Launch = ALONE):
        self.folder, self.keep_last, self.milestone_every = folder, keep_last, milestone_every
        self.launch = launch

    def save(self, step: int, parts: Mapping[str, Part]) -> None:
        """Write a checkpoint of `step`, then remove old ones.

        The tensors of a part go to NAME.safetensors, everything else to state.json.

        Raises:
            OSError: the checkpoint cannot be written; raised on all ranks. Earlier checkpoints are unchanged.
        """
        states = {name: _split(part.state_dict()) for name, part in parts.items()}
        shards: dict[str, torch.Tensor] = {}
        for name, (tensors, _) in states.items():
            for key in tuple(tensors):
                if name not in WHOLE and is_sharded(tensors[key]):
                    shards[f"{name}/{key}"] = tensors.pop(key)
                else:
                    tensor = whole(tensors[key].detach())
                    # On the host at once: a device may not have room for all whole tensors.
                    tensors[key] = tensor.cpu().contiguous() if self.launch.is_main else torch.empty(0)
        partial = self.folder / f".step_{step:08d}.partial"
        self.launch.broadcast_from_main(lambda: self._begin(partial))
        digests = self._write_shards(partial, shards) if shards else {}
        # All ranks wait until the first one has written.
        self.launch.broadcast_from_main(lambda: self._write(step, partial, states, digests))

    def load(self, checkpoint: Path, parts: Mapping[str, Part]) -> int:
        """Load a checkpoint into its parts, and return its step."""
        state = json.loads((checkpoint / STATE).read_text())
        for name, part in parts.items():
            file = checkpoint / f"{name}.safetensors"
            like = part.parameters() if isinstance(part, Optimizer) else _split(part.state_dict())[0]
            tensors = load_file(file) if file.exists() else {}
            tensors = {key: part_of(tensor, _template(like, key, tensor)) for key, tensor in tensors.items()}
            tensors |= _read_shards(checkpoint, name, like)
            part.load_state_dict(_merge(tensors, state[name]))
        return state["step"]

    def newest_intact(self, show: Callable[[str], None]) -> Path | None:
        """Return the newest intact checkpoint, or None if the folder has no checkpoints.

        Damaged checkpoints are reported and renamed to `step_N.damaged`, so that nothing uses or counts them.

        Raises:
            ValueError: all checkpoints are damaged.
        """
        for _, path in reversed(steps_in(self.folder)):
            if (damage := damage_of(path)) is None:
                return path
            aside = path.with_name(f"{path.name}.damaged")
            _remove(aside)
            path.rename(aside)
            show(f"warning: {path} is damaged ({damage}): renamed; the previous checkpoint is used")
        if list(self.folder.glob("*.damaged")):
            rule = "no intact checkpoint to resume from: start a new run with run_name=NAME"
            raise ValueError(f"{self.folder}: {rule}")
        return None

    def _begin(self, partial: Path) -> None:
        for left_over in self.folder.glob(".step_*"):  # of a process that was killed
            _remove(left_over)
        self.folder.mkdir(exist_ok=True)  # without parents: a removed run folder must not reappear
        partial.mkdir()

    def _write_shards(self, partial: Path, shards: dict[str, torch.Tensor]) -> dict[str, str]:
        """Write this rank's shards, and return the digests of all files of shards."""
        import torch.distributed.checkpoint as dcp

        file = partial / f"shard-{self.launch.rank + 1:05d}-model-00001-of-00001.safetensors"
        try:
            # Only tensors: anything else would be pickled into the file silently.
            dcp.save(shards, storage_writer=dcp.HuggingFaceStorageWriter(str(partial), save_distributed=True))
        except dcp.api.CheckpointException as error:  # on all ranks
            self.launch.broadcast_from_main(lambda: shutil.rmtree(partial, ignore_errors=True))
            raise _cause_of(error) from error
        try:
            digests = [(file.name, sha256(file), "")] if file.exists() else []
        except OSError as error:  # on this rank alone
            digests = [(file.name, "", str(error))]
        digests = self.launch.gather_items(digests)
        for _, _, failure in digests:
            if failure:
                raise OSError(failure)
        return {name: digest for name, digest, _ in digests}

    def _write(self, step: int, partial: Path, states: Mapping[str, State], digests: dict[str, str]) -> None:
        final = self.folder / f"step_{step:08d}"
        try:
            for name in digests:
                with safe_open(partial / name, "pt"):  # an error if its header is damaged
                    pass
            rest: dict[str, Any] = {"step": step}
            for name, (tensors, rest[name]) in states.items():
                if tensors:
                    save_file(tensors, partial / f"{name}.safetensors")
            (partial / STATE).write_text(json.dumps(finite(rest)) + "\n")
            files = sorted(partial.iterdir())
            sums = [f"{digests.get(file.name) or sha256(file)}  {file.name}\n" for file in files]
            (partial / SUMS).write_text("".join(sums))
            for path in (*partial.iterdir(), partial):
                sync(path)
        except (OSError, SafetensorError) as error:  # safetensors raises its own error for a full disk
            shutil.rmtree(partial, ignore_errors=True)
            raise error if isinstance(error, OSError) else OSError(str(error)) from error
        for stale in (final, *self.folder.glob(f"{final.name}_std*")):  # averages of the replaced checkpoint
            _discard(stale)
        partial.rename(final)
        sync(self.folder)
        # This one is the newest: damaged newer ones have been renamed.
        for step, path in steps_in(self.folder)[: -self.keep_last]:
            if not self.milestone_every or step % self.milestone_every:
                _discard(path)


def steps_in(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of each complete checkpoint, oldest first."""
    matches = [(STEP_FOLDER.fullmatch(path.name), path) for path in folder.glob("step_*")]
    return sorted((int(match[1]), path) for match, path in matches if match)


def latest_checkpoint(run_folder: Path) -> Path | None:
    """Return the newest checkpoint of a run, or None."""
    checkpoints = steps_in(run_folder / "checkpoints")
    return checkpoints[-1][1] if checkpoints else None


def find_checkpoint(run_folder: Path, name: str | None) -> Path:
    """Find a checkpoint by its step, name or path; None: the newest."""
    checkpoints = steps_in(run_folder / "checkpoints")
    if name is None:
        if not checkpoints:
            raise FileNotFoundError(f"run={run_folder} has no checkpoint yet")
        return checkpoints[-1][1]
    by_step = dict(checkpoints).get(int(name)) if name.isdecimal() else None
    for folder in (by_step, run_folder / "checkpoints" / name, Path(name)):
        if folder and folder.is_dir():
            return folder
    steps = f"steps {', '.join(str(step) for step, _ in checkpoints)}" if checkpoints else "no checkpoint yet"
    raise FileNotFoundError(f"checkpoint={name} not found: run={run_folder} has {steps}")


def damage_of(checkpoint: Path, names: Iterable[str] | None = None) -> str | None:
    """Describe the damage of files of a checkpoint (default: all files); None if they are intact."""
    sums = checkpoint / SUMS
    if not sums.is_file():
        return f"it has no {SUMS}"
    try:
        with sums.open("rb") as opened:
            lines = read_bounded(opened, MAX_SUMS_BYTES).decode().splitlines()
        digests = {name: digest for digest, name in (line.split("  ") for line in lines)}
        names = digests.keys() | {STATE} if names is None else names  # a truncated SUMS lacks it
        files = {name: checkpoint / name for name in sorted(names)}
        wrong = [n for n, file in files.items() if not file.is_file() or digests.get(n) != sha256(file)]
    except (FileNotFoundError, ValueError) as error:  # other OSErrors are not damage
        return str(error)
    return f"{SUMS} does not match {', '.join(wrong)}" if wrong else None


def intact_hint(damaged: Path, names: Iterable[str]) -> str:
    """Name the run's newest checkpoint whose files are intact, for an error message about a damaged one."""
    for step, path in reversed(steps_in(damaged.parent)):
        if path != damaged and damage_of(path, names) is None:
            return f"step {step} is intact: {path}"
    return "the run has no other intact checkpoint"


def _template(like: Mapping[str, torch.Tensor], key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor whose sharding to copy: `like[key]`, or the parameter of an optimizer state."""
    template = like.get(key, like.get(key.rpartition("/")[0], tensor))
    return template if template.shape == tensor.shape else tensor


def _read_shards(checkpoint: Path, name: str, like: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Read the sharded tensors of a part, each sharded as this process needs it."""
    if not list(checkpoint.glob("shard-*.safetensors")):
        return {}
    import torch.distributed.checkpoint as dcp

    reader, prefix = dcp.HuggingFaceStorageReader(str(checkpoint)), f"{name}/"
    saved: dict[str, Any] = reader.read_metadata().state_dict_metadata  # files hold tensors alone
    blank = {key: torch.empty(saved[key].size, device="meta") for key in saved if key.startswith(prefix)}
    if not blank:
        return {}
    templates = {key: _template(like, key.removeprefix(prefix), tensor) for key, tensor in blank.items()}
    tensors = {
        key: torch.empty(t.shape) if t.is_meta else torch.empty_like(t, requires_grad=False)
        for key, t in templates.items()
    }
    try:
        dcp.load(tensors, storage_reader=reader, no_dist=not is_initialized())
    except dcp.api.CheckpointException as error:
        raise _cause_of(error) from error
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}


def _cause_of(error: Any) -> BaseException:
    """Return the first cause of a CheckpointException that is not a disk error, else an OSError; the message
    of the exception itself consists of tracebacks.
    """
    causes = [cause for cause, _ in error.failures.values()]
    disk_errors = (OSError, SafetensorError)  # safetensors raises its own error for a full disk
    others = (cause for cause in causes if not isinstance(cause, disk_errors))
    return next(others, OSError(str(causes[0])))


def _discard(checkpoint: Path) -> None:
    """Hide a checkpoint, then remove it, so that a partly removed one never counts as a checkpoint."""
    if os.path.lexists(checkpoint):
        hidden = checkpoint.with_name(f".{checkpoint.name}.removed")
        checkpoint.rename(hidden)
        _remove(hidden)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _split(state: Mapping[Any, Any], prefix: str = "") -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Split a nested dictionary into tensors, named by their keys joined with /, and the rest."""
    tensors, rest = {}, {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            tensors[f"{prefix}{key}"] = value
        elif isinstance(value, dict):
            inner, rest[key] = _split(value, f"{prefix}{key}/")
            tensors |= inner
        else:
            rest[key] = value
    return tensors, rest


def _merge(tensors: Mapping[str, torch.Tensor], rest: Mapping[str, Any]) -> dict[Any, Any]:
    """Undo `_split`. Integer keys, as in an optimizer's state, are strings in JSON."""
    state = {int(key) if key.isdecimal() else key: value for key, value in rest.items()}
    for key, value in state.items():
        if isinstance(value, dict):
            prefix = f"{key}/"
            inner = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            state[key] = _merge(inner, value)
    return state | {name: tensor for name, tensor in tensors.items() if "/" not in name}
