"""Weights from files: those of this project's checkpoints, and those that public code has saved."""

import argparse
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from safetensors import SafetensorError, safe_open

from runtime.arrays import load_stored
from training.checkpoint import STEP_FOLDER, damage_of, instead_of, latest_checkpoint
from training.sprint import from_sprint

WRAPPERS = ("module.", "model.", "net.")
COMPILED = "_orig_mod."  # stands wherever a part of a network was compiled
# Where public code keeps weights in its files, averaged ones first: DiT, SiT, REPA and MaskDiT, TREAD.
ENTRIES = ("ema", "ema_state_dict", "model", "model_state_dict", "state_dict")
AVERAGED = re.compile(r"ema|averag|(?<!exp_)avg|polyak|swa|shadow|teacher", re.IGNORECASE)  # of entries
IGNORED = ("projectors.",)  # REPA: heads of an alignment, which samples do not need
SWIGLU = ".mlp.w12."
RENAMED = {SWIGLU: ".mlp.fc1.", ".mlp.w3.": ".mlp.fc2."}  # LightningDiT
ROPE = ("feat_rope.freqs_sin", "feat_rope.freqs_cos")  # tables (T, d) that networks here compute
LEGACY = "decoder_blocks."  # REPA's earlier layout: the blocks after those of the alignment
LABEL_TABLE = "y_embedder.embedding_table.weight"


class Weights(NamedTuple):
    """Tensors of a file by the names of networks here, and what the file says of them.

    Args:
        entry: where in the file they were; None: at its top.
        num_classes: that training scripts of public code save beside them; None: the file does not say.
    """

    file: Path
    tensors: dict[str, torch.Tensor]
    entry: str | None
    num_classes: int | None


def load_weights(net: nn.Module, source: str | Path, label_table: bool = True) -> dict[str, str | None]:
    """Load weights into a network, by name.

    Args:
        source: a `.safetensors` file; a `.pt` or `.pth` file, read without executing code from it, of which
            the first of `ENTRIES` is taken that is there; a checkpoint folder or a run folder, whose averaged
            weights are taken. Names may carry the prefixes of wrappers (`module.`, `model.`, `net.`) and of
            compilation.
        label_table: false keeps the network's own table of class labels.

    Returns:
        Which file was read, and the entry that was taken (None: its top).

    Raises:
        FileNotFoundError: there is nothing at `source`.
        ValueError: the file cannot be read, is not as its checkpoint was written, or holds anything that the
            network does not take.
    """
    file = _weights_file(Path(source))
    if is_own_checkpoint(file) and (damage := damage_of(file.parent, [file.name])):
        raise ValueError(f"{file.parent} is damaged ({damage}): {instead_of(file.parent, [file.name])}")
    weights = read_weights(file)
    if mismatch := find_mismatch(net, weights, label_table):
        raise ValueError(f"{file}: weights do not match the model: {mismatch}")
    net.load_state_dict(_fitted(net, weights, label_table))
    return {"file": str(file), "entry": weights.entry}


def find_mismatch(net: nn.Module, weights: Weights, label_table: bool = True) -> str | None:
    """Describe the first tensor that differs from a network, which may be on the meta device."""
    found = {name: tuple(tensor.shape) for name, tensor in _fitted(net, weights, label_table).items()}
    expected = {name: tuple(tensor.shape) for name, tensor in net.state_dict().items()}
    for name in sorted(expected.keys() | found.keys()):
        if found.get(name) != expected.get(name):
            state = f"is {found[name]}" if name in found else "is missing"
            return f"{name} {state}, the model has {expected.get(name)}"
    return None


def is_own_checkpoint(source: str | Path) -> bool:
    """True for weights in a checkpoint of this project, whose run says what they predict."""
    return STEP_FOLDER.fullmatch(_weights_file(Path(source)).parent.name) is not None


def metadata_in(file: Path) -> dict[str, str]:
    """Read the text in the header of a `.safetensors` file; empty for other files."""
    if file.suffix != ".safetensors":
        return {}
    with _opened(file) as opened:
        return opened.metadata() or {}


def read_weights(source: str | Path, shapes_only: bool = False) -> Weights:
    """Read the weights of a file, by the names that they have here.

    Args:
        shapes_only: the tensors are on the meta device, or on disk until they are used.

    Raises:
        ValueError: it is not known which weights are meant, or what a part of them does.
    """
    file = _weights_file(Path(source))
    content = _content(file, shapes_only)
    entry = None
    if isinstance(content, dict):
        entry = next((key for key in ENTRIES if isinstance(content.get(key), dict) and content[key]), None)
    tensors = content if entry is None else content[entry]
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in tensors.items()
    ):
        has = f": it has {', '.join(map(str, content))[:200]}" if isinstance(content, dict) else ""
        raise ValueError(
            f"{file} must hold named tensors, at its top or under one of {', '.join(ENTRIES)}{has}"
        )
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or not tensor.is_floating_point():
            raise ValueError(
                f"{file}: {name} is {tensor.dtype}, must be a dense tensor of floating-point numbers"
            )
    if entry is not None:
        _check_entries(content, entry, file)
    plain = _renamed(tensors, _without_prefixes, file)
    if any(SWIGLU in name for name in plain) and ROPE[0] not in plain:
        raise ValueError(f"{file} has SwiGLU without RoPE: a block of LightningDiT here has both")
    plain = from_sprint(plain, file)
    num_first = len({name.split(".")[1] for name in plain if name.startswith("blocks.")})
    named = _renamed(plain, lambda name: _own_name(name, num_first), file)
    return Weights(file, named, entry, None if entry is None else _num_classes(content))


def _content(file: Path, shapes_only: bool) -> Any:
    if file.suffix == ".safetensors":
        with _opened(file) as opened:
            names = opened.keys()
            if shapes_only:
                blank = torch.empty((), device="meta")
                return {name: blank.expand(opened.get_slice(name).get_shape()) for name in names}
            return {name: opened.get_tensor(name) for name in names}
    return load_stored(file)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, "pt") as opened:
            yield opened
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{file} is truncated or not a safetensors file: {error}") from error


def _weights_file(source: Path) -> Path:
    if source.is_dir():
        folder = latest_checkpoint(source) if (source / "checkpoints").is_dir() else source
        source = source / "checkpoints" if folder is None else folder / "ema.safetensors"
    if not source.is_file():
        raise FileNotFoundError(
            f"{source} not found: give a weights file, a checkpoint folder or a run folder"
        )
    return source


def _check_entries(content: Mapping[str, Any], entry: str, file: Path) -> None:
    """Raise a ValueError where an entry beside the one that is taken may be what is meant."""
    taken, is_average = {_without_prefixes(name) for name in content[entry]}, AVERAGED.search(entry)
    beside = {key: value for key, value in content.items() if key != entry}
    others = []
    for path, names in _groups(beside, sum(tensor.numel() for tensor in content[entry].values())):
        shared = not (path.startswith("opt") or names.isdisjoint(taken))
        has_more = path in ENTRIES and any(not name.startswith(IGNORED) for name in names - taken)
        if AVERAGED.search(path) or (shared and (has_more or not is_average)):
            others.append(path)
    if others:
        raise ValueError(
            f"{file} has weights under {entry}, which would be taken, and under {', '.join(others)[:200]}, "
            "which may be an average of them, or have more: save those that are meant in a file of their own"
        )


def _groups(content: Any, num_numbers: int) -> Iterator[tuple[str, set[str]]]:
    """Yield path and names of each group of tensors, or flat tensor, of half as many numbers or more."""
    todo, seen = [("", content)], set()
    while todo:
        path, node = todo.pop()
        if id(node) in seen or not isinstance(node, dict | list | tuple | torch.Tensor):
            continue
        seen.add(id(node))
        if isinstance(node, torch.Tensor):
            children, tensors = [], {"": node}
        else:
            children = list(node.items() if isinstance(node, dict) else enumerate(node))
            tensors = {str(name): child for name, child in children if isinstance(child, torch.Tensor)}
        if 2 * sum(tensor.numel() for tensor in tensors.values()) >= num_numbers:
            yield path, {_without_prefixes(name) for name in tensors}
        todo += [(f"{path}.{name}".lstrip(".")[:200], child) for name, child in children]


def _num_classes(content: Mapping[str, Any]) -> int | None:
    """num_classes as scripts of DiT, SiT and REPA (args) and LightningDiT (config) save it."""
    args, config = content.get("args"), content.get("config")
    args = vars(args) if isinstance(args, argparse.Namespace) else args
    for node in (args, config.get("data") if isinstance(config, dict) else None):
        if isinstance(node, dict) and type(number := node.get("num_classes")) is int:
            return number
    return None


def _renamed(
    tensors: Mapping[str, torch.Tensor], rename: Callable[[str], str], file: Path
) -> dict[str, torch.Tensor]:
    sources: dict[str, str] = {}
    for name in tensors:
        if (other := sources.setdefault(rename(name), name)) != name:
            raise ValueError(f"{file} has {other} and {name}, both of which are {rename(name)}: keep one")
    return {name: tensors[source] for name, source in sources.items()}


def _without_prefixes(name: str) -> str:
    name = name.replace(COMPILED, "")
    while prefix := next((prefix for prefix in WRAPPERS if name.startswith(prefix)), None):
        name = name.removeprefix(prefix)
    return name


def _own_name(name: str, num_first: int) -> str:
    """The name of a tensor here; `num_first` is the number of blocks named `blocks`."""
    if num_first and name.startswith(LEGACY):
        index, _, rest = name.removeprefix(LEGACY).partition(".")
        name = f"blocks.{num_first + int(index)}.{rest}" if index.isdecimal() else name
    for public, own in RENAMED.items():
        name = name.replace(public, own)
    return name


def _fitted(net: nn.Module, weights: Weights, label_table: bool) -> dict[str, torch.Tensor]:
    """Return weights as a network takes them.

    Raises:
        ValueError: a file's rotary positions are not those that the network computes.
    """
    tensors = {name: tensor for name, tensor in weights.tensors.items() if not name.startswith(IGNORED)}
    positions = getattr(net, "positions", None)
    for i, name in enumerate(ROPE):
        if (table := tensors.pop(name, None)) is not None:
            own = None if positions is None else positions[0].chunk(2, dim=-1)[i]
            if own is None or table.shape != own.shape or not _are_close(table, own):
                raise ValueError(f"{weights.file}: {name} is not of the rotary positions of the model")
    if not label_table:
        own = {name: tensor for name, tensor in net.state_dict().items() if name == LABEL_TABLE}
        return {name: tensor for name, tensor in tensors.items() if name != LABEL_TABLE} | own
    table = tensors.get(LABEL_TABLE)
    if table is not None and table.shape[:1] == (net.num_classes,) and net.class_dropout_prob == 0:
        # Public code has a row for the null class only where it is trained.
        tensors[LABEL_TABLE] = torch.cat([table, torch.zeros_like(table[:1])])
    return tensors


def _are_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True on the meta device, which has no values."""
    return a.is_meta or b.is_meta or torch.allclose(a.float(), b.to(a.device).float(), atol=1e-2)
