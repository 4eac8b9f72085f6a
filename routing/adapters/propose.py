"""Propose an adapter by watching a model run. The proposal is proved before it is returned; review it.

The model runs twice, with two images. The entries that differ in the arguments of its first block are the
tokens of the image. Other arguments of a block with as many entries are assumed to be indexed by token. All
known ways to gather them are tried until `prove` accepts one. The model is not changed.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import combinations, count, product
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from routing.adapters.adapter import Adapter, BlockList
from routing.adapters.families.parts import Count, TablePerSample
from routing.adapters.proof import Proof, prove
from routing.routes import Route

INDENT = " " * 4
ROUTES = (Route(0.5, 0, -1), Route(0.75, 0, -1))  # two, because an adapter may fit one by chance
# Raised by a wrong adapter, or by blocks that get tensors of wrong shapes from it.
ADAPTER_ERRORS = (ValueError, RuntimeError, TypeError, AttributeError, IndexError, AssertionError)


class Proposal(NamedTuple):
    """An adapter, its source, and its proof."""

    source: str
    adapter: Adapter
    proof: Proof


# Python expressions that gather a value, which is written as $.
SAMPLES_SECOND = "kept.gather($.transpose(0, 1)).transpose(0, 1)"
LEADING = "$[: kept.num_prefix_tokens + kept.ids.shape[1]]"  # for values that all image tokens share
NUM_KEPT = "kept.ids.shape[1]"
OF_ALL_SAMPLES = "kept.{}($[None])[0]"  # of a table without a sample axis; all samples keep the same tokens


def propose_adapter(
    model: nn.Module,
    arguments: Mapping[str, Any],
    image: str = "hidden_states",
    *,
    num_prefix_tokens: Count | None = None,
    num_suffix_tokens: Count | None = None,
) -> Proposal:
    """Return an adapter for an unknown model. Review it, then pass it to `attach`.

    Args:
        arguments: arguments of the model's forward, by name, with at least two different samples. Only these
            arguments are supported with routing later. All lengths (tokens, text, channels), and sums of two
            of them, must differ.
        image: name of the argument that becomes the tokens that may bypass. It is a tensor, or a list with
            one tensor per sample.
        num_prefix_tokens, num_suffix_tokens: functions for the adapter, if no shape gives the number, or if
            `image` contains references or padding. The source calls them.

    Raises:
        ValueError: no adapter passes the proof; the message has the closest one, or what is missing.
    """
    lists = _watch(model, arguments, image)
    longest = max(lists, key=lambda trace: len(trace.calls))
    prefixes = suffixes = _lengths(model, arguments, image)
    P = num_prefix_tokens(model, arguments) if num_prefix_tokens else 0
    if num_prefix_tokens:
        prefixes = {**prefixes, P: "num_prefix_tokens(model, arguments)"}
        first = longest.first
        for trace in lists:
            if trace.first == first and 0 < first < P:  # `image` starts with other tokens
                trace.first, trace.num_tokens = P, trace.num_tokens - (P - first)
    if num_suffix_tokens:
        suffixes = {longest.num_suffix: "num_suffix_tokens(model, arguments)"}
    counters = {"num_prefix_tokens": num_prefix_tokens, "num_suffix_tokens": num_suffix_tokens}
    failed: list[tuple[float, bool, str]] = []
    optional = {"return_dict"} & inspect.signature(model.forward).parameters.keys() - arguments.keys()
    accepts = f"{INDENT}accepts={_names((*arguments, *optional))},\n"
    drafts = (
        f"Adapter(\n{block_lists}{accepts}{counts}{whole}{_one_subset(block_lists)})\n"
        for whole in ("", f"{INDENT}whole_between_blocks=True,\n")
        for block_lists, counts in _drafts(lists, longest, prefixes, suffixes)
    )
    for source in drafts:
        # The proof is about the source itself, so evaluate it.
        scope = {"Adapter": Adapter, "BlockList": BlockList, "TablePerSample": TablePerSample}
        adapter = eval(source, scope | counters)
        try:
            if P and adapter.num_prefix_tokens(model, arguments) != P:
                raise ValueError(f"no sequence has the {P} prefix tokens that num_prefix_tokens returns")
            proofs = [prove(model, adapter, arguments, route) for route in ROUTES]
        except ADAPTER_ERRORS as error:
            distance, reason = torch.inf, f"{type(error).__name__}: {error}"
        else:
            proof = max(proofs, key=lambda proof: proof.dense + proof.routed)
            if all(proof.passes for proof in proofs):  # false for NaN
                return Proposal(_file(source, [name for name in counters if counters[name]]), adapter, proof)
            distance, reason = max(proof), f"the error is {max(proof):.1g} of the change that routes make"
        failed.append((distance, adapter.whole_between_blocks, f"{source}\n{reason}"))
    *_, closest = min(reversed(failed), key=lambda attempt: attempt[:2])
    raise ValueError(
        f"no adapter for {type(model).__name__} passes the proof: correct the closest one by hand, and check "
        f"it with routing.prove:\n{closest}"
    )


def _file(source: str, counts: Sequence[str]) -> str:
    table = "from routing.adapters.families.parts import TablePerSample\n"
    lines = [table] if "TablePerSample" in source else []
    lines += [f"# Put your function {name} here; the adapter calls it.\n" for name in counts]
    return f"from routing import Adapter, BlockList\n{''.join(lines)}\nadapter = {source}"


class _Call(NamedTuple):
    """A call of a block: its index in its list, and the order among all calls."""

    idx: int
    order: int
    arguments: dict[str, Any]
    output: Any


@dataclass
class _Trace:
    """A list of blocks that processes the image, and its calls.

    Args:
        tokens: name of the argument that holds the image; empty if there is none.
        first: position of the first image token in it.
        num_tokens, num_suffix: T and S.
        num_prefix: P in other arguments indexed by token. `tokens` may lack the prefix.
        num_others: possible numbers of other tokens at the end of arguments indexed by token.
        output: index of the tokens in the tuple that a block returns.
        sequence_first: True if samples are in the second dimension of arguments indexed by token.
    """

    name: str
    calls: list[_Call]
    num_samples: int
    tokens: str = ""
    first: int = 0
    num_tokens: int = 0
    num_suffix: int = 0
    num_prefix: int = 0
    num_others: Sequence[int] = ()
    output: int | None = None
    sequence_first: bool = False

    @property
    def length(self) -> int:
        """T + S."""
        return self.num_tokens + self.num_suffix

    @property
    def other_arguments(self) -> dict[str, Any]:
        """Arguments of the blocks, without the tokens."""
        pairs = [pair for call in self.calls for pair in call.arguments.items()]
        return {name: value for name, value in pairs if value is not None and name != self.tokens}

    def find(self, changed: Mapping[str, Any], before: "_Trace | None") -> None:
        """Find the tokens among the arguments that another image changes. In the first list they are the
        entries that change; in a later list, the output of the previous one, or a sequence of its length.
        """
        for self.sequence_first in (False, True):
            pairs = {name: (x, changed[name]) for name, x in self.calls[0].arguments.items()}
            pairs = {
                name: tuple(map(self.batch_first, pair))
                for name, pair in pairs.items()
                if isinstance(pair[0], torch.Tensor) and pair[0].ndim == 3 and not torch.equal(*pair)
            }
            pairs = {name: pair for name, pair in pairs.items() if len(pair[0]) == self.num_samples}
            if before is None:
                matches = iter([(name, *_changed_range(*pair)) for name, pair in pairs.items()])
            else:
                matches = before.matches({name: x for name, (x, _) in pairs.items()})
            if match := next(matches, None):
                self.tokens, self.first, self.num_tokens = match
                self.num_suffix = pairs[self.tokens][0].shape[1] - self.first - self.num_tokens
                self._find_output()
                return

    batch_first, tokens_of = BlockList.batch_first, BlockList.tokens_of

    def matches(self, sequences: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, int, int]]:
        """Yield possible positions of the image after this list: name of the sequence, first token, T."""
        T, x = self.num_tokens, self.tokens_of(self.calls[-1].output)
        tokens = x[:, self.first : self.first + T]  # after the last block
        for name, x in sequences.items():
            for first in range(x.shape[1] - T + 1):
                if torch.equal(x[:, first : first + T], tokens):
                    yield name, first, T
        yield from ((name, 0, T) for name, x in sequences.items() if x.shape[1] == self.length)

    def _find_output(self) -> None:
        output, following = self.calls[0].output, self.calls[:2][-1].arguments[self.tokens]
        if isinstance(output, torch.Tensor):
            return
        same = [i for i, x in enumerate(output) if isinstance(x, torch.Tensor) and x.shape == following.shape]
        equal = [i for i in same if torch.equal(output[i], following)]
        if len(equal or same) != 1:
            raise ValueError(f"no output of a block in {self.name} becomes {self.tokens} of the next block")
        (self.output,) = equal or same

    def source(self, gathers: Mapping[str, str], suffix: str | None) -> str:
        """Return the source of a BlockList.

        Args:
            gathers: expressions that gather the arguments indexed by token.
            suffix: expression that counts S of this list; None: the adapter's.
        """
        parts = [f'"{self.name}"']
        parts += [f'tokens="{self.tokens}"'] if self.tokens != "hidden_states" else []
        parts += ["joint=True"] if self.first else []
        parts += [f"output={self.output}"] if self.output is not None else []
        if gathers:
            bodies = {name: _fill(gather, "value") for name, gather in gathers.items()}
            lines = "".join(f'{INDENT * 4}"{name}": lambda value, kept: {b},\n' for name, b in bodies.items())
            parts.append(f"by_token={{\n{lines}{INDENT * 3}}}")
        if shared := [name for name in self.other_arguments if name not in gathers]:
            parts.append(f"shared={_names(shared)}")
        parts += ["sequence_first=True"] if self.sequence_first else []
        parts += [f"num_suffix_tokens=lambda model, arguments: {suffix}"] if suffix else []
        lines = "".join(f"{INDENT * 3}{part},\n" for part in parts)
        return f"{INDENT * 2}BlockList(\n{lines}{INDENT * 2}),\n"

    def variants(self, values: Mapping[str, Any]) -> list[dict[str, str]]:
        """Return all combinations of expressions that gather the values indexed by token, by name."""
        gathers = {name: choices for name, value in values.items() if (choices := self._gathers(value))}
        return [dict(zip(gathers, chosen, strict=True)) for chosen in product(*gathers.values())]

    def _gathers(self, value: Any) -> list[str]:
        """Return expressions that may gather a value; empty if it is not indexed by token."""
        if isinstance(value, torch.Tensor):
            return self._tensor_gathers(value)
        if isinstance(value, tuple | list):
            return self._sequence_gathers(value)
        if isinstance(value, dict):
            variants = [variant.items() for variant in self.variants(value) if variant]
            variants = [[f"{k!r}: {_fill(gather, f'$[{k!r}]')}" for k, gather in v] for v in variants]
            return [f"{{**$, {', '.join(entries)}}}" for entries in variants]
        return [NUM_KEPT] if type(value) is int and value == self.length else []

    def _sequence_gathers(self, value: Sequence[Any]) -> list[str]:
        parts = [self._gathers(part) for part in value]
        kind = "list" if isinstance(value, list) else "tuple"
        if parts and all(gathers == parts[0] for gathers in parts):
            return [f"{kind}({_fill(gather, 'x')} for x in $)" for gather in parts[0]]
        if not any(parts):
            return []
        items = ([_fill(gather, f"$[{i}]") for gather in part or ["$"]] for i, part in enumerate(parts))
        return [f"({' '.join(f'{item},' for item in chosen)})" for chosen in product(*items)]

    def _tensor_gathers(self, x: torch.Tensor) -> list[str]:
        if self.sequence_first and x.shape[:2] == (self.length, self.num_samples):
            return [SAMPLES_SECOND]
        joint_length = self.num_prefix + self.length
        joint = ("gather_joint",) if self.first else ("gather_joint", "gather_between")
        if x.shape[-1] == joint_length:  # a mask: if both pass, prefer the one that needs no prefix
            joint = joint[::-1]
        start = joint_length if self.first else self.length
        with_others = {start + number: ("gather_between",) for number in self.num_others}
        methods = {**with_others, joint_length: joint, self.length: ("gather",)}
        dims = {dim: methods[size] for dim, size in enumerate(x.shape) if size in methods}
        if dims and x.shape[0] in (1, self.num_samples):
            first = min(dims)  # or this one alone: the channels of a table may equal the number of tokens
            choices = [dims, {first: dims[first]}] if len(dims) > 1 else [dims]
            return [gather for methods in choices for gather in _along_dims(methods)]
        # A table that all samples share.
        gathers = [f"kept.{method}($.unsqueeze(0))" for method in dims.get(0, ())]
        gathers += [f"TablePerSample({gather})" for gather in gathers]
        gathers += [LEADING] if gathers and x.ndim == 1 else []
        return [*gathers, *(OF_ALL_SAMPLES.format(method) for method in dims.get(0, ()))]


def _changed_range(x: torch.Tensor, other: torch.Tensor) -> tuple[int, int]:
    """Return the position of the first token that differs, and the number of tokens up to the last one."""
    indices = (x != other).any(dim=2).any(dim=0).nonzero().flatten()
    return int(indices[0]), int(indices[-1] - indices[0]) + 1


def _fill(gather: str, value: str) -> str:
    return gather.replace("$", value)


def _one_subset(block_lists: str) -> str:
    return f"{INDENT}one_subset=True,\n" if "[None])[0]" in block_lists else ""


def _along_dims(methods: Mapping[int, Sequence[str]]) -> Iterator[str]:
    """Yield expressions that gather along several dimensions, with one method for each."""
    for chosen in product(*methods.values()):
        gather = "$"
        for dim, method in zip(methods, chosen, strict=True):
            gather = f"kept.{method}({gather}, {dim})"
        yield gather


def _drafts(
    lists: Sequence[_Trace], longest: _Trace, prefixes: Mapping[int, str], suffixes: Mapping[int, str]
) -> Iterator[tuple[str, str]]:
    """Yield sources of block lists and counts: first for all lists with a known prefix and suffix, then
    without the first lists, which may be refiners of the image.
    """
    joint = next((trace for trace in (longest, *lists) if trace.first), longest)
    P, S = joint.first, longest.num_suffix
    for number, known, side, where in ((P, prefixes, "prefix", joint), (S, suffixes, "suffix", longest)):
        if number and number not in known:
            raise ValueError(
                f"{where.tokens} of {where.name} has {number} {side} tokens that no argument explains: pass "
                f"num_{side}_tokens, a function that returns their number"
            )
    alike = [x for x in lists if x.first in (0, P) and x.num_suffix in (0, *suffixes)]
    for chosen in (alike[start:] for start in range(alike.index(longest) + 1)):
        tensors = [x for x in tree_leaves([x.other_arguments for x in chosen]) if isinstance(x, torch.Tensor)]
        sizes = {size for x in tensors for size in x.shape}
        # Tables and masks may have a prefix that the tokens lack.
        numbers = [P] if P else [*(n for n in prefixes if longest.length + n in sizes), 0]
        for number, num_others in product(numbers, ((), (*prefixes, S))):
            for trace in chosen:
                trace.num_prefix, trace.num_others = number, num_others
            for gathers in product(*(trace.variants(trace.other_arguments) for trace in chosen)):
                yield _draft(list(zip(chosen, gathers, strict=True)), prefixes.get(number), suffixes)


def _draft(
    lists: Sequence[tuple[_Trace, Mapping[str, str]]], prefix: str | None, suffixes: Mapping[int, str]
) -> tuple[str, str]:
    """Return the source of block lists, and of the functions that count prefix and suffix tokens."""
    by_list, counts = [suffixes.get(trace.num_suffix) for trace, _ in lists], {}
    if len({trace.num_suffix for trace, _ in lists}) == 1 and by_list[0]:
        counts, by_list = {"num_suffix_tokens": by_list[0]}, [None for _ in lists]
    sources = "".join(x.source(gathers, count) for (x, gathers), count in zip(lists, by_list, strict=True))
    if any(text in sources for text in ("joint=True", "gather_joint", _fill(LEADING, ""))):
        counts = {"num_prefix_tokens": prefix, **counts}
    lines = (f"{INDENT}{name}=lambda model, arguments: {text},\n" for name, text in counts.items())
    return f"{INDENT}block_lists=(\n{sources}{INDENT}),\n", "".join(lines)


def _watch(model: nn.Module, arguments: Mapping[str, Any], image: str) -> list[_Trace]:
    """Return the lists of blocks that process the image, in the order in which they run."""
    if not all(isinstance(x, torch.Tensor) for x in tree_leaves(arguments.get(image))):
        raise ValueError(f"image={image} must be a tensor among the arguments, or a list of tensors")
    if len(arguments[image]) < 2:
        raise ValueError(f"{image} must have at least two samples, which differ")
    calls = _calls(model, arguments)
    changed = _calls(model, {**arguments, image: tree_map(torch.randn_like, arguments[image])})
    lists: list[_Trace] = []
    for name, list_calls in calls.items():
        before = lists[-1] if lists else None
        if before and list_calls[0].order < before.calls[-1].order:
            continue  # it runs between the blocks of the list before
        trace = _Trace(name, list_calls, len(arguments[image]))
        trace.find(changed[name][0].arguments, before)
        lists += [trace] if trace.tokens else []
    if not lists:
        raise ValueError(
            f"{type(model).__name__} has no list of blocks that run in order and whose attention "
            f"(F.scaled_dot_product_attention, or torch's own layers) sees the tokens of image={image!r}"
        )
    return lists


def _lengths(model: nn.Module, arguments: Mapping[str, Any], image: str) -> dict[int, str]:
    """Map each possible number of other tokens to a Python expression. Candidates are lengths of texts,
    learned tokens, arguments that become one token, and sums of two.
    """
    num_samples, integers = len(arguments[image]), (torch.int32, torch.int64)
    others = {name: value for name, value in arguments.items() if name != image}
    tensors = {name: x for name, x in others.items() if isinstance(x, torch.Tensor)}
    sized = [name for name, x in tensors.items() if x.ndim >= 3]
    sized += [name for name, x in tensors.items() if x.ndim == 2 and x.dtype in integers]
    counts = [f'arguments["{name}"].shape[1]' for name in sized]
    for name, value in others.items():
        parts = value if isinstance(value, list) and len(value) == num_samples else [None]
        if all(isinstance(x, torch.Tensor) and x.ndim == 2 for x in parts):
            counts.append(f'max(map(len, arguments["{name}"]))')
    for name, x in model.named_parameters(recurse=False):
        counts += [f"model.{name}.shape[-2]"] if x.ndim == 2 or (x.ndim == 3 and len(x) == 1) else []
    counts += ["1"] if any(x.ndim in (1, 2) and len(x) == num_samples for x in tensors.values()) else []
    lengths: dict[int, str] = {}
    for text in (*counts, *map(" + ".join, combinations(counts, 2))):
        lengths.setdefault(eval(text, {"model": model, "arguments": arguments}), text)
    return lengths


class _AttentionCounter(TorchFunctionMode):
    count = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        self.count += func in (F.scaled_dot_product_attention, F.multi_head_attention_forward)
        return func(*args, **(kwargs or {}))


def _calls(model: nn.Module, arguments: Mapping[str, Any]) -> dict[str, list[_Call]]:
    """Run a model; return the calls of each list whose blocks attend and ran once each, in order."""
    kinds = (nn.ModuleList, nn.Sequential)
    lists = {name: blocks for name, blocks in model.named_modules() if isinstance(blocks, kinds)}
    calls: dict[str, list[_Call]] = {}
    attention, started, attending, order = _AttentionCounter(), [], set(), count()

    def watch(name: str, i: int, block: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        signature = inspect.signature(type(block).forward)
        values = dict(list(signature.bind(block, *args, **kwargs).arguments.items())[1:])
        for parameter in signature.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                values |= values.pop(parameter.name, {})
        calls.setdefault(name, []).append(_Call(i, next(order), values, output))
        attending.update([name] if attention.count > started.pop() else [])

    with ExitStack() as hooks, torch.no_grad(), attention:
        for module in model.modules():
            hooks.callback(setattr, module, "training", module.training)
        model.eval()
        for name, blocks in lists.items():
            for i, block in enumerate(blocks):
                before = block.register_forward_pre_hook(lambda *_: started.append(attention.count))
                hooks.enter_context(before)
                hooks.enter_context(block.register_forward_hook(partial(watch, name, i), with_kwargs=True))
        model(**arguments)
    whole = [name for name in attending if [call.idx for call in calls[name]] == [*range(len(lists[name]))]]
    inner = {name for name in whole for outer in whole if name.startswith(f"{outer}.")}
    return {name: calls[name] for name in calls if name in whole and name not in inner}


def _names(names: Sequence[str]) -> str:
    return "(" + " ".join(f'"{name}",' for name in names) + ")"
