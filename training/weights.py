"""Weights from files: those of this project's checkpoints, and those that public code has saved."""

import argparse
import zipfile
from pathlib import Path

import torch
import torch.nn as nn
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from runtime.arrays import check_stored
from training.checkpoint import STEP_FOLDER, damage_of, instead_of, latest_checkpoint
from training.sprint import from_sprint

WRAPPERS = ("module.", "model.", "net.")
COMPILED = "_orig_mod."  # stands wherever a part of a network was compiled
# Where public code keeps weights in its files, averaged ones first: DiT, SiT, REPA and MaskDiT, TREAD.
ENTRIES = ("ema", "ema_state_dict", "model", "model_state_dict", "state_dict")
KEYS = "model/size, model/block, model.num_prefix_tokens, model.learn_sigma"  # of the network's shapes
# Heads of an alignment that samples do not need: REPA; a table that follows from the sizes: LightningDiT.
IGNORED = ("projectors.", "feat_rope.")
RENAMED = {".mlp.w12.": ".mlp.fc1.", ".mlp.w3.": ".mlp.fc2."}  # LightningDiT
MAX_ERROR = 300  # characters of what torch has to say of weights


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
        raise ValueError(f"{file.parent} is damaged ({damage}): {instead_of(file.parent, [file.name])}")
    tensors, entry = _named_tensors(file)
    try:
        net.load_state_dict(tensors)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:MAX_ERROR]
        raise ValueError(
            f"{file}: weights do not match the model ({KEYS} must be the same): {reason}"
        ) from error
    return {"file": str(file), "entry": entry}


def is_own_checkpoint(source: str | Path) -> bool:
    """Return whether weights lie in a checkpoint of this project, whose run says what they predict."""
    return STEP_FOLDER.fullmatch(_weights_file(Path(source)).parent.name) is not None


def shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes in a `.safetensors` file by name, without reading the tensors."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} is not a file")
    try:
        with safe_open(file, "pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{file} is truncated or not a safetensors file: {error}") from error


def shapes_by_name(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that `load_weights` would take from a file."""
    if file.suffix == ".safetensors":
        blank = torch.empty((), device="meta")  # no data: converting layouts changes shapes, too
        tensors = {name: blank.expand(shape) for name, shape in shapes_in(file).items()}
        tensors = _own_names(tensors, file)
    else:
        tensors = _named_tensors(_weights_file(file))[0]
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def metadata_in(file: Path) -> dict[str, str]:
    """Return the text in the header of a `.safetensors` file; empty for other files."""
    if file.suffix != ".safetensors":
        return {}
    shapes_in(file)  # that it can be read
    with safe_open(file, "pt") as opened:
        return opened.metadata() or {}


def _named_tensors(file: Path) -> tuple[dict[str, torch.Tensor], str | None]:
    """Return the tensors of a file by the names of a network, and the entry that they were in."""
    tensors, entry = _load_tensors(file)
    return _own_names(tensors, file), entry


def _own_names(tensors: dict[str, torch.Tensor], file: Path) -> dict[str, torch.Tensor]:
    named = {_strip(name): tensor for name, tensor in tensors.items()}
    named = {name: tensor for name, tensor in named.items() if not name.startswith(IGNORED)}
    return from_sprint(named, file)


def _weights_file(source: Path) -> Path:
    if source.is_dir():
        folder = latest_checkpoint(source) if (source / "checkpoints").is_dir() else source
        source = source / "checkpoints" if folder is None else folder / "ema.safetensors"
    if not source.is_file():
        raise FileNotFoundError(
            f"{source} not found: give a weights file, a checkpoint folder or a run folder"
        )
    return source


def _load_tensors(file: Path) -> tuple[dict[str, torch.Tensor], str | None]:
    """Return named tensors, and the entry of the file that they were in (None: at its top)."""
    if file.suffix == ".safetensors":
        try:
            return load_file(file), None
        except (SafetensorError, KeyError, ValueError) as error:
            raise ValueError(f"{file} is truncated or not a safetensors file: {error}") from error
    check_stored(file)
    try:
        # The public DiT and SiT checkpoints carry their arguments in a Namespace, which can run nothing.
        with torch.serialization.safe_globals([argparse.Namespace]):
            # Mapped: who asks for shapes reads no weights.
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # damaged bytes make torch raise almost anything
        raise ValueError(f"{file} is damaged, or holds more than plain tensors") from error
    entry = None
    if isinstance(content, dict):
        entry = next((key for key in ENTRIES if isinstance(content.get(key), dict)), None)
        content = content if entry is None else content[entry]
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in content.items()
    ):
        raise ValueError(f"{file} must hold named tensors, at its top or under one of {', '.join(ENTRIES)}")
    return content, entry


def _strip(name: str) -> str:
    name = name.replace(COMPILED, "")
    while prefix := next((prefix for prefix in WRAPPERS if name.startswith(prefix)), None):
        name = name.removeprefix(prefix)
    for public, own in RENAMED.items():
        name = name.replace(public, own)
    return name
