"""An adapter found by watching a model run: a proposal to read, proved before it is given.

The model runs twice, with another image: what changes in the arguments of its first block are the tokens of
the image. Whatever else of a block has as many entries is taken to be indexed by token, and gathered in the
ways that are known here, until the routes compute what `routing.proof` says they must. The model stays as it
was.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
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
    accepts = (*arguments, "return_dict")
    variants = [spec.variants() for spec in lists]
    failed = []
    for chosen in product(*variants):
        block_lists = [each.spec(ways) for each, ways in zip(lists, chosen, strict=True)]
        has_prefix = any(each.joint for each in lists) or any(
            "gather_joint" in way.text("") for ways in chosen for way in ways.values()
        )
        counted = {"num_prefix_tokens": prefix.call} if has_prefix else {}
        adapter = Adapter(block_lists, accepts, **counted)
        source = _source(lists, chosen, prefix if has_prefix else None, accepts)
        try:
            proof = prove(model, adapter, arguments, Route(0.5, 1, -2))
        except (ValueError, RuntimeError, TypeError, AttributeError, IndexError) as error:
            failed.append(f"{type(error).__name__}: {error}")
            continue
        if proof.dense == 0 and proof.routed < MAX_ERROR:
            return Proposal(source, adapter, proof)
        failed.append(f"the routes differ by {max(proof):.1g} of what they change")
    raise ValueError(f"no adapter for {type(model).__name__} was right:\n{source}\n{failed[-1]}")


@dataclass(frozen=True)
class _Way:
    """How a value is gathered by token, or a number of tokens found: as Python of a name, and as a call."""

    text: Callable[[str], str]
    call: Callable[..., Any]


def _by(method: str, way: _Way, *dim: int) -> _Way:
    """Return a way that gathers what another one gives by a method of `Kept`."""
    rest = "".join(f", {d}" for d in dim)
    return _Way(
        lambda name: f"kept.{method}({way.text(name)}{rest})",
        lambda x, kept: getattr(kept, method)(way.call(x, kept), *dim),
    )


def _per_sample(way: _Way) -> _Way:
    return _Way(
        lambda name: f"TablePerSample({way.text(name)})",
        lambda x, kept: TablePerSample(way.call(x, kept)),
    )


AS_IT_IS = _Way(lambda name: name, lambda x, kept: x)
FOR_ALL = _Way(lambda name: f"{name}.unsqueeze(0)", lambda x, kept: x.unsqueeze(0))


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

    def spec(self, ways: Mapping[str, _Way]) -> BlockList:
        """Return the list for an adapter."""
        by_token = {name: way.call for name, way in ways.items()}
        return BlockList(self.name, self.tokens, self.joint, self.output, by_token, self.shared(ways))

    def shared(self, ways: Mapping[str, _Way]) -> tuple[str, ...]:
        """Return the arguments that are not gathered."""
        return tuple(name for name in self.given if name not in ways)

    def source(self, ways: Mapping[str, _Way]) -> str:
        """Return the list as it stands in an adapter."""
        parts = [f'"{self.name}"']
        parts += [f'tokens="{self.tokens}"'] if self.tokens != "hidden_states" else []
        parts += ["joint=True"] if self.joint else []
        parts += [f"output={self.output}"] if self.output is not None else []
        if ways:
            texts = {name: f"lambda value, kept: {way.text('value')}" for name, way in ways.items()}
            lines = "".join(f'{FOUR * 4}"{name}": {text},\n' for name, text in texts.items())
            parts.append(f"by_token={{\n{lines}{FOUR * 3}}}")
        if shared := self.shared(ways):
            parts.append(f"shared={_names(shared)}")
        lines = "".join(f"{FOUR * 3}{part},\n" for part in parts)
        return f"{FOUR * 2}BlockList(\n{lines}{FOUR * 2}),\n"

    def variants(self) -> list[dict[str, _Way]]:
        """Return ways to gather the arguments that are indexed by token, by name."""
        ways = {name: self._ways(value) for name, value in self.given.items()}
        ways = {name: found for name, found in ways.items() if found}
        return [dict(zip(ways, chosen, strict=True)) for chosen in product(*ways.values())]

    def _ways(self, value: Any) -> list[_Way]:
        """Return how a value may be gathered by token; nothing where it is not indexed by it."""
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if isinstance(value, tuple | list):
            return self._of_sequence(value)
        if isinstance(value, dict):
            ways = {key: self._ways(part) for key, part in value.items()}
            ways = {key: found for key, found in ways.items() if found}
            chosen = product(*ways.values()) if ways else ()
            return [_of_entries(dict(zip(ways, each, strict=True))) for each in chosen]
        return []

    def _of_sequence(self, value: Sequence[Any]) -> list[_Way]:
        parts = [self._ways(part) for part in value]
        texts = [[way.text("x") for way in part] for part in parts]
        kind = list if isinstance(value, list) else tuple
        if parts and all(text == texts[0] for text in texts):
            return [_of_all(kind, way) for way in parts[0]]
        found = product(*(part or [AS_IT_IS] for part in parts))
        return [_of_places(ways) for ways in found if any(way is not AS_IT_IS for way in ways)]

    def _of_tensor(self, x: torch.Tensor) -> list[_Way]:
        methods = {self.joint_length: ("gather_joint", "gather_leading"), self.length: ("gather",)}
        dims = {dim: methods[size] for dim, size in enumerate(x.shape) if size in methods}
        if not dims:
            return []
        if x.shape[0] in (1, self.num_samples):
            found = [AS_IT_IS]
            for dim, of_dim in dims.items():
                found = [_by(method, way, dim) for way in found for method in of_dim]
            return found
        if set(dims) == {0}:  # a table for all samples
            found = [_by(method, FOR_ALL) for method in dims[0]]
            return [*found, *map(_per_sample, found)]
        return []


def _of_all(kind: type, way: _Way) -> _Way:
    return _Way(
        lambda name: f"{kind.__name__}({way.text('x')} for x in {name})",
        lambda value, kept: kind(way.call(x, kept) for x in value),
    )


def _of_places(ways: Sequence[_Way]) -> _Way:
    return _Way(
        lambda name: "(" + " ".join(f"{way.text(f'{name}[{i}]')}," for i, way in enumerate(ways)) + ")",
        lambda value, kept: tuple(way.call(x, kept) for way, x in zip(ways, value, strict=True)),
    )


def _of_entries(ways: Mapping[str, _Way]) -> _Way:
    def text(name: str) -> str:
        entries = (f"{key!r}: {way.text(f'{name}[{key!r}]')}" for key, way in ways.items())
        return f"{{**{name}, {', '.join(entries)}}}"

    return _Way(
        text, lambda value, kept: {**value, **{key: way.call(value[key], kept) for key, way in ways.items()}}
    )


def _watch(model: nn.Module, arguments: Mapping[str, Any], image: str) -> tuple[list[_List], _Way | None]:
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


def _explained(model: nn.Module, arguments: Mapping[str, Any], image: str) -> dict[int, _Way]:
    """Return numbers of tokens that may come before those of the image, and what tells them: texts, learned
    tokens, and both.
    """
    texts = {
        value.shape[1]: _Way(
            lambda _, key=key: f'arguments["{key}"].shape[1]',
            lambda model, arguments, key=key: arguments[key].shape[1],
        )
        for key, value in arguments.items()
        if key != image and isinstance(value, torch.Tensor) and value.ndim >= 3
    }
    learned = {
        value.shape[1]: _Way(
            lambda _, name=name: f"model.{name}.shape[1]",
            lambda model, arguments, name=name: getattr(model, name).shape[1],
        )
        for name, value in model.named_parameters(recurse=False)
        if value.ndim == 3 and value.shape[0] == 1
    }
    both = {
        a + b: _Way(
            lambda _, a=first, b=second: f"{a.text('')} + {b.text('')}",
            lambda model, arguments, a=first, b=second: a.call(model, arguments) + b.call(model, arguments),
        )
        for a, first in learned.items()
        for b, second in texts.items()
    }
    return both | learned | texts


def _prefix(lists: Sequence[_List], explained: Mapping[int, _Way]) -> _Way | None:
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
    return explained[P] if P else None


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
    lists: Sequence[_List], chosen: Sequence[Mapping[str, _Way]], prefix: _Way | None, accepts: Sequence[str]
) -> str:
    """Return an adapter as Python."""
    block_lists = "".join(each.source(ways) for each, ways in zip(lists, chosen, strict=True))
    parts = [f"block_lists=(\n{block_lists}{FOUR})", f"accepts={_names(accepts)}"]
    parts += [f"num_prefix_tokens=lambda model, arguments: {prefix.text('')}"] if prefix else []
    lines = "".join(f"{FOUR}{part},\n" for part in parts)
    return f"Adapter(\n{lines})\n"


def _names(names: Sequence[str]) -> str:
    return "(" + " ".join(f'"{name}",' for name in names) + ")"
