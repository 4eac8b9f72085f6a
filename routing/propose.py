"""An adapter found by watching a model run: a proposal to read, proved before it is given.

The model runs twice, with another image: what changes in the arguments of its first block are the tokens of
the image. Whatever else of a block has as many entries is taken to be indexed by token, and gathered in the
ways that are known here, until the routes compute what `routing.proof` says they must. The model stays as it
was.
"""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.utils._pytree import tree_leaves

from routing.adapter import Adapter, BlockList
from routing.families.parts import TablePerSample
from routing.proof import Proof, prove
from routing.routes import Route

FOUR = " " * 4
MAX_ERROR = 0.01  # of what routes change: rounding in bf16 stays below
SCOPE = {"Adapter": Adapter, "BlockList": BlockList, "TablePerSample": TablePerSample}


class Proposal(NamedTuple):
    """An adapter, its source, and how far its routes were from what they must compute."""

    source: str
    adapter: Adapter
    proof: Proof


def propose_adapter(model: nn.Module, arguments: Mapping[str, Any], image: str = "hidden_states") -> Proposal:
    """Return an adapter for a model that is not known, to be reviewed and passed to `attach`.

    Args:
        arguments: of the model's forward, by name, at least two samples, which differ. Only these will be
            accepted together with routing. Let no length be that of another: tokens, text, channels.
        image: which of them becomes the tokens that may bypass.

    Raises:
        ValueError: what was seen, where that is not enough for an adapter.
    """
    lists, prefix = _watch(model, arguments, image)
    variants = [spec.variants() for spec in lists]
    failed = []
    for chosen in product(*variants):
        source = _source(lists, chosen, prefix, arguments)
        adapter = eval(source, dict(SCOPE))  # it is what is reviewed, and so what is proved
        try:
            proof = prove(model, adapter, arguments, Route(0.5, 1, -2))
        except (ValueError, RuntimeError, TypeError, AttributeError, IndexError) as error:
            failed.append(f"{type(error).__name__}: {error}")
            continue
        if proof.dense == 0 and proof.routed < MAX_ERROR:
            return Proposal(source, adapter, proof)
        failed.append(f"the routes differ by {max(proof):.1g} of what they change")
    raise ValueError(f"no adapter for {type(model).__name__} was right:\n{source}\n{failed[-1]}")


@dataclass
class _Call:
    """A block that was called: its arguments by name, and its output."""

    arguments: dict[str, Any]
    output: Any


@dataclass
class _List:
    """A list of blocks that carries the image.

    Args:
        tokens: the argument with the image; empty where none was found.
        first: where the image begins in it.
        length, joint_length: T, and P + T.
        output: at which place of a tuple a block returns its tokens.
    """

    name: str
    calls: list[_Call]
    num_samples: int
    tokens: str = ""
    joint: bool = False
    first: int = 0
    length: int = 0
    joint_length: int = 0
    output: int | None = None

    @property
    def given(self) -> dict[str, Any]:
        """What blocks were given beside the tokens."""
        pairs = [pair for call in self.calls for pair in call.arguments.items()]
        return {name: value for name, value in pairs if value is not None and name != self.tokens}

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors that blocks were given beside the tokens."""
        return [x for x in tree_leaves(self.given) if isinstance(x, torch.Tensor)]

    def find(self, changed: Mapping[str, Any]) -> None:
        """Find the tokens in a first list: those that another image changes."""
        for name, x in self.calls[0].arguments.items():
            if not self._is_sequence(x) or torch.equal(x, changed[name]):
                continue
            where = (x != changed[name]).any(dim=2).any(dim=0).nonzero().flatten()  # (T,)
            first, last = int(where[0]), int(where[-1])
            if last + 1 < x.shape[1]:
                raise ValueError(
                    f"the image has places {first} to {last} of {x.shape[1]} in {name} of {self.name}: what "
                    "comes after it must be counted by num_suffix_tokens, by hand"
                )
            self.tokens, self.joint, self.first, self.length = name, first > 0, first, last + 1 - first
            return

    def find_again(self, before: "_List") -> None:
        """Find the tokens in a later list: as many as before, alone or after others."""
        for name, x in self.calls[0].arguments.items():
            if self._is_sequence(x) and x.shape[1] == before.length:
                self.tokens, self.length = name, before.length
                return
        tokens = before.result()
        for name, x in self.calls[0].arguments.items():
            if self._is_sequence(x) and x.shape[1] > before.length and x.shape[2] == tokens.shape[2]:
                if not torch.equal(x[:, -before.length :], tokens[:, before.first :]):
                    raise ValueError(f"the image is not at the end of {name} of {self.name}")
                self.tokens, self.joint, self.length = name, True, before.length
                self.first = x.shape[1] - before.length
                return

    def find_output(self) -> None:
        """Find which output of a block is the tokens of the next one."""
        output, following = self.calls[0].output, self.calls[1].arguments[self.tokens]
        if isinstance(output, torch.Tensor):
            return
        same = [i for i, x in enumerate(output) if isinstance(x, torch.Tensor) and x.shape == following.shape]
        equal = [i for i in same if torch.equal(output[i], following)]
        if len(equal or same) != 1:
            raise ValueError(f"no output of a block of {self.name} is {self.tokens} of the next one")
        (self.output,) = equal or same

    def result(self) -> torch.Tensor:
        """Return the tokens after the last block."""
        output = self.calls[-1].output
        return output if self.output is None else output[self.output]

    def _is_sequence(self, x: Any) -> bool:
        return isinstance(x, torch.Tensor) and x.ndim == 3 and x.shape[0] == self.num_samples

    def source(self, gathered: Mapping[str, str]) -> str:
        """Return the list as it stands in an adapter."""
        parts = [f'"{self.name}"']
        parts += [f'tokens="{self.tokens}"'] if self.tokens != "hidden_states" else []
        parts += ["joint=True"] if self.joint else []
        parts += [f"output={self.output}"] if self.output is not None else []
        if gathered:
            ways = "".join(f'{FOUR * 4}"{k}": lambda value, kept: {way},\n' for k, way in gathered.items())
            parts.append(f"by_token={{\n{ways}{FOUR * 3}}}")
        if shared := [name for name in self.given if name not in gathered]:
            parts.append(f"shared={_names(shared)}")
        lines = "".join(f"{FOUR * 3}{part},\n" for part in parts)
        return f"{FOUR * 2}BlockList(\n{lines}{FOUR * 2}),\n"

    def variants(self) -> list[dict[str, str]]:
        """Return ways to gather the arguments that are indexed by token: {argument: expression}."""
        ways = {name: self._expressions("value", value) for name, value in self.given.items()}
        ways = {name: found for name, found in ways.items() if found}
        return [dict(zip(ways, chosen, strict=True)) for chosen in product(*ways.values())]

    def _expressions(self, name: str, value: Any) -> list[str]:
        """Return how a value may be gathered by token; nothing where it is not indexed by it."""
        if isinstance(value, torch.Tensor):
            return self._of_tensor(name, value)
        if isinstance(value, tuple | list):
            parts = [self._expressions("x", part) for part in value]
            if parts and all(part == parts[0] for part in parts):
                kind = "list" if isinstance(value, list) else "tuple"
                return [f"{kind}({way} for x in {name})" for way in parts[0]]
            places = [f"{name}[{i}]" for i in range(len(value))]
            parts = [self._expressions(at, part) or [at] for at, part in zip(places, value, strict=True)]
            found = [f"({', '.join(each)},)" for each in product(*parts)]
            return found if any("kept." in way for way in found) else []
        if isinstance(value, dict):
            ways = {key: self._expressions(f"{name}[{key!r}]", part) for key, part in value.items()}
            ways = {key: found for key, found in ways.items() if found}
            chosen = product(*ways.values()) if ways else ()
            return [f"{{**{name}, {_entries(ways, each)}}}" for each in chosen]
        return []

    def _of_tensor(self, name: str, x: torch.Tensor) -> list[str]:
        ways = {
            self.joint_length: ("kept.gather_joint", "kept.gather_leading"),
            self.length: ("kept.gather",),
        }
        dims = {dim: ways[size] for dim, size in enumerate(x.shape) if size in ways}
        if not dims:
            return []
        if x.shape[0] in (1, self.num_samples):
            found = [name]
            for dim, gathers in dims.items():
                found = [f"{gather}({way}, {dim})" for way in found for gather in gathers]
            return found
        if set(dims) == {0}:  # a table for all samples
            found = [f"{gather}({name}.unsqueeze(0))" for gather in dims[0]]
            return [*found, *(f"TablePerSample({way})" for way in found)]
        return []


def _watch(model: nn.Module, arguments: Mapping[str, Any], image: str) -> tuple[list[_List], str | None]:
    """Return the lists of blocks that carry the image, and what tells the length of the prefix."""
    name = type(model).__name__
    if not isinstance(arguments.get(image), torch.Tensor):
        raise ValueError(f"image={image} must be a tensor among the arguments")
    if arguments[image].shape[0] < 2:
        raise ValueError(f"{image} has one sample: give two, which differ")
    calls = _calls(model, arguments)
    changed = _calls(model, {**arguments, image: torch.randn_like(arguments[image])})
    lists: list[_List] = []
    for key, of_list in calls.items():
        found = _List(key, of_list, arguments[image].shape[0])
        if lists:
            found.find_again(lists[-1])
        else:
            found.find(changed[key][0].arguments)
        if found.tokens:
            found.find_output()
            lists.append(found)
    if not lists:
        raise ValueError(f"{name} has no list of blocks, run one after another, with tokens of {image}")
    return lists, _prefix(lists, _explained(model, arguments, image))


def _explained(model: nn.Module, arguments: Mapping[str, Any], image: str) -> dict[int, str]:
    """Return numbers of tokens that may come before those of the image, and what tells them: texts, learned
    tokens, and both.
    """
    texts = {
        value.shape[1]: f'arguments["{key}"].shape[1]'
        for key, value in arguments.items()
        if key != image and isinstance(value, torch.Tensor) and value.ndim >= 3
    }
    learned = {
        value.shape[1]: f"model.{name}.shape[1]"
        for name, value in model.named_parameters(recurse=False)
        if value.ndim == 3 and value.shape[0] == 1
    }
    both = {a + b: f"{learned[a]} + {texts[b]}" for a in learned for b in texts}
    return both | learned | texts


def _prefix(lists: Sequence[_List], explained: Mapping[int, str]) -> str | None:
    """Give the lists the length with a prefix; return what tells its length, None where there is none."""
    found = {each.first for each in lists if each.joint} or {0}
    if len(found) > 1:
        raise ValueError(f"the tokens of the image begin at different places: {sorted(found)}")
    (P,) = found
    sizes = {size for each in lists for x in each.tensors() for size in x.shape}
    if not P:  # tables and masks may have a prefix that the tokens do not have
        P = next((length for length in explained if lists[0].length + length in sizes), 0)
    if P and P not in explained:
        raise ValueError(f"{P} tokens come before those of the image, which no argument explains")
    for each in lists:
        each.joint_length = P + each.length
    return f"lambda model, arguments: {explained[P]}" if P else None


def _calls(model: nn.Module, arguments: Mapping[str, Any]) -> dict[str, list[_Call]]:
    """Run a model; return the calls of the blocks of each list whose blocks ran once, one after another."""
    lists = {
        name: blocks
        for name, blocks in model.named_modules()
        if isinstance(blocks, nn.ModuleList | nn.Sequential) and len(blocks) > 1
    }
    seen: list[tuple[str, int, _Call]] = []

    def watching(name: str, i: int, signature: inspect.Signature) -> Any:
        def watch(block: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            bound = signature.bind(block, *args, **kwargs)
            values = dict(list(bound.arguments.items())[1:])
            for parameter in signature.parameters.values():
                if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                    values |= values.pop(parameter.name, {})
            seen.append((name, i, _Call(values, output)))

        return watch

    training = [(module, module.training) for module in model.modules()]
    model.eval()
    with ExitStack() as hooks, torch.no_grad():
        for name, blocks in lists.items():
            for i, block in enumerate(blocks):
                watch = watching(name, i, inspect.signature(type(block).forward))
                hooks.enter_context(block.register_forward_hook(watch, with_kwargs=True))
        model(**arguments)
    for module, was in training:
        module.training = was
    found: dict[str, list[_Call]] = {}
    for name, _, call in seen:
        found.setdefault(name, []).append(call)
    order = {name: [i for of, i, _ in seen if of == name] for name in found}
    whole = [name for name in found if order[name] == list(range(len(lists[name])))]
    return {name: found[name] for name in whole if not any(name.startswith(f"{of}.") for of in whole)}


def _source(
    lists: Sequence[_List],
    chosen: Sequence[Mapping[str, str]],
    num_prefix_tokens: str | None,
    arguments: Mapping[str, Any],
) -> str:
    """Return an adapter as Python."""
    block_lists = "".join(each.source(gathered) for each, gathered in zip(lists, chosen, strict=True))
    parts = [f"block_lists=(\n{block_lists}{FOUR})", f"accepts={_names([*arguments, 'return_dict'])}"]
    ways = [way for gathered in chosen for way in gathered.values()]
    if any(each.joint for each in lists) or any("gather_joint" in way for way in ways):
        parts.append(f"num_prefix_tokens={num_prefix_tokens}")
    lines = "".join(f"{FOUR}{part},\n" for part in parts)
    return f"Adapter(\n{lines})\n"


def _names(names: Sequence[str]) -> str:
    return "(" + " ".join(f'"{name}",' for name in names) + ")"


def _entries(names: Sequence[str], ways: Sequence[str]) -> str:
    return ", ".join(f"{name!r}: {way}" for name, way in zip(names, ways, strict=True))
