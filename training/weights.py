"""Load weights from this project's checkpoints and from files of public code."""

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
from runtime.errors import as_value_error
from training.checkpoint import STEP_FOLDER, damage_of, intact_hint, latest_checkpoint
from training.sprint import from_sprint

WRAPPERS = re.compile(r"^((module|model|net)\.)+")
COMPILED = "_orig_mod."  # in the names of compiled modules
# Entries under which public code (DiT, SiT, REPA, MaskDiT, TREAD) saves weights, averaged ones first.
ENTRIES = ("ema", "ema_state_dict", "model", "model_state_dict", "state_dict")
AVERAGED = re.compile(r"ema|averag|(?<!exp_)avg|polyak|swa|shadow|teacher", re.IGNORECASE)  # names of entries
IGNORED = ("projectors.", "projector.")  # of REPA and of this project: sampling does not use them
SWIGLU = ".mlp.w12."
RENAMED = {SWIGLU: ".mlp.fc1.", ".mlp.w3.": ".mlp.fc2."}  # LightningDiT
ROPE = ("feat_rope.freqs_sin", "feat_rope.freqs_cos")  # tables (T, d) that our networks compute
LEGACY = "decoder_blocks."  # REPA's earlier layout: the blocks after the alignment
LABEL_TABLE = "y_embedder.embedding_table.weight"


class Weights(NamedTuple):
    """Tensors of a file under this project's names, and what the file records about them.

    Args:
        entry: the entry of the file that holds them; None: its top level.
        num_classes: number of classes that public training scripts record; None: not recorded.
    """

    file: Path
    tensors: dict[str, torch.Tensor]
    entry: str | None
    num_classes: int | None


def load_weights(net: nn.Module, source: str | Path, label_table: bool = True) -> dict[str, str | None]:
    """Load weights into a network, by name.

    Args:
        source: a weights file, a checkpoint folder or a run folder. Of a folder, the averaged weights are
            loaded. Of a `.pt` or `.pth` file, the first of `ENTRIES` is loaded; no code in the file is run.
            Names may have the prefixes of wrappers (`module.`, `model.`, `net.`) and of compilation.
        label_table: False keeps the network's table of class labels.

    Returns:
        The file, and the entry that was loaded (None: its top level).

    Raises:
        FileNotFoundError: `source` does not exist.
        ValueError: the file cannot be read, its checkpoint is damaged, or its tensors do not fit the network.
    """
    file = _weights_file(Path(source))
    if is_own_checkpoint(file) and (damage := damage_of(file.parent, [file.name])):
        raise ValueError(f"{file.parent} is damaged ({damage}): {intact_hint(file.parent, [file.name])}")
    weights = read_weights(file)
    if mismatch := find_mismatch(net, weights, label_table):
        raise ValueError(f"{file}: weights do not match the model: {mismatch}")
    net.load_state_dict(_adapt_weights(net, weights, label_table))
    return {"file": str(file), "entry": weights.entry}


def find_mismatch(net: nn.Module, weights: Weights, label_table: bool = True) -> str | None:
    """Describe the first tensor that does not fit the network, which may be on the meta device."""
    shapes = {name: tuple(tensor.shape) for name, tensor in _adapt_weights(net, weights, label_table).items()}
    expected = {name: tuple(tensor.shape) for name, tensor in net.state_dict().items()}
    for name in sorted(expected.keys() | shapes.keys()):
        if shapes.get(name) != expected.get(name):
            state = f"is {shapes[name]}" if name in shapes else "is missing"
            return f"{name} {state}, the model has {expected.get(name)}"
    return None


def is_own_checkpoint(source: str | Path) -> bool:
    """True if the weights are in a checkpoint of this project, whose run records the objective."""
    return STEP_FOLDER.fullmatch(_weights_file(Path(source)).parent.name) is not None


def metadata_in(file: Path) -> dict[str, str]:
    """Return the metadata in the header of a `.safetensors` file; empty for other files."""
    if file.suffix != ".safetensors":
        return {}
    with _opened(file) as opened:
        return opened.metadata() or {}


def read_weights(source: str | Path, shapes_only: bool = False) -> Weights:
    """Read the weights of a file under this project's names.

    Args:
        shapes_only: True to read no values from safetensors files: their tensors are on the meta device.

    Raises:
        ValueError: it is unclear which entry to load, or a part of the network is not supported.
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
        where = f"at its top level or under one of {', '.join(ENTRIES)}"
        raise ValueError(f"{file} must contain named tensors, {where}{has}")
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or not tensor.is_floating_point():
            raise ValueError(f"{file}: {name} is {tensor.dtype}, must be a dense floating-point tensor")
    if entry is not None:
        _check_entries(content, entry, file)
    plain = _rename_tensors(tensors, _without_prefixes, file)
    if any(SWIGLU in name for name in plain) and ROPE[0] not in plain:
        raise ValueError(f"{file} has SwiGLU without RoPE: not supported, LightningDiT blocks have both")
    plain = from_sprint(plain, file)
    num_first = len({name.split(".")[1] for name in plain if name.startswith("blocks.")})
    named = _rename_tensors(plain, lambda name: _local_name(name, num_first), file)
    return Weights(file, named, entry, None if entry is None else _num_classes(content))


def _content(file: Path, shapes_only: bool) -> Any:
    if file.suffix != ".safetensors":
        return load_stored(file)
    with _opened(file) as opened:
        names = opened.keys()
        if shapes_only:
            blank = torch.empty((), device="meta")
            return {name: blank.expand(opened.get_slice(name).get_shape()) for name in names}
        return {name: opened.get_tensor(name) for name in names}


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    what = f"{file} is truncated or not a safetensors file"
    with as_value_error(what, SafetensorError, KeyError, ValueError), safe_open(file, "pt") as opened:
        yield opened


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
    """Raise ValueError if another entry of the file may be the one to load."""
    loaded, is_average = {_without_prefixes(name) for name in content[entry]}, AVERAGED.search(entry)
    rest = {key: value for key, value in content.items() if key != entry}
    others = []
    for path, names in _groups(rest, sum(tensor.numel() for tensor in content[entry].values())):
        shared = not (path.startswith("opt") or names.isdisjoint(loaded))
        has_more = path in ENTRIES and any(not name.startswith(IGNORED) for name in names - loaded)
        if AVERAGED.search(path) or (shared and (has_more or not is_average)):
            others.append(path)
    if others:
        raise ValueError(
            f"{file} has weights under {entry} and under {', '.join(others)[:200]}, which may be an average "
            "or more complete: save the weights to load to a separate file"
        )


def _groups(content: Any, num_numbers: int) -> Iterator[tuple[str, set[str]]]:
    """Yield path and names of each collection of tensors, or tensor, of at least num_numbers / 2 elements."""
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
    """Read num_classes, which DiT, SiT and REPA save under `args`, and LightningDiT under `config`."""
    args, config = content.get("args"), content.get("config")
    args = vars(args) if isinstance(args, argparse.Namespace) else args
    for node in (args, config.get("data") if isinstance(config, dict) else None):
        if isinstance(node, dict) and type(number := node.get("num_classes")) is int:
            return number
    return None


def _rename_tensors(
    tensors: Mapping[str, torch.Tensor], rename: Callable[[str], str], file: Path
) -> dict[str, torch.Tensor]:
    sources: dict[str, str] = {}
    for name in tensors:
        if (other := sources.setdefault(rename(name), name)) != name:
            raise ValueError(f"{file} has {other} and {name}, both named {rename(name)} here: keep one")
    return {name: tensors[source] for name, source in sources.items()}


def _without_prefixes(name: str) -> str:
    return WRAPPERS.sub("", name.replace(COMPILED, ""))


def _local_name(name: str, num_first: int) -> str:
    """Return this project's name of a tensor; `num_first` is the number of blocks named `blocks`."""
    if num_first and name.startswith(LEGACY):
        index, _, rest = name.removeprefix(LEGACY).partition(".")
        name = f"blocks.{num_first + int(index)}.{rest}" if index.isdecimal() else name
    for public, renamed in RENAMED.items():
        name = name.replace(public, renamed)
    return name


def _adapt_weights(net: nn.Module, weights: Weights, label_table: bool) -> dict[str, torch.Tensor]:
    """Return the weights in the form that a network loads.

    Raises:
        ValueError: the file's rotary positions differ from the network's.
    """
    tensors = {name: tensor for name, tensor in weights.tensors.items() if not name.startswith(IGNORED)}
    positions = getattr(net, "positions", None)
    for i, name in enumerate(ROPE):
        if (table := tensors.pop(name, None)) is not None:
            expected = None if positions is None else positions[0].chunk(2, dim=-1)[i]
            if expected is not None and table.shape == expected.shape:
                on_meta = table.is_meta or expected.is_meta  # no values to compare
                if on_meta or torch.allclose(table.float(), expected.to(table.device).float(), atol=1e-2):
                    continue
            raise ValueError(f"{weights.file}: {name} differs from the model's rotary positions")
    if not label_table:
        kept = {name: tensor for name, tensor in net.state_dict().items() if name == LABEL_TABLE}
        return {name: tensor for name, tensor in tensors.items() if name != LABEL_TABLE} | kept
    table = tensors.get(LABEL_TABLE)
    if table is not None and table.shape[:1] == (net.num_classes,) and net.class_dropout_prob == 0:
        # Public code has a row for the null class only if class dropout trains it.
        tensors[LABEL_TABLE] = torch.cat([table, torch.zeros_like(table[:1])])
    return tensors
