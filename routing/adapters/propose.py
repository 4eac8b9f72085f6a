"""An adapter found by watching a model run: a proposal to read, proved before it is given.

The model runs twice, with another image: what changes in the arguments of its first block are the tokens of
the image. Whatever else of a block has as many entries is taken to be indexed by token, and gathered in the
ways that are known here, until the routes compute what `prove` says they must. The model stays as it was.
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

FOUR = " " * 4
ROUTES = (Route(0.5, 0, -1), Route(0.75, 0, -1))  # what is right by chance for one is not for both
# Raised by an adapter that is not right, or by blocks that do not fit what it gathers.
WRONG = (ValueError, RuntimeError, TypeError, AttributeError, IndexError, AssertionError)


class Proposal(NamedTuple):
    """An adapter, its source, and how far its routes were from what they must compute."""

    source: str
    adapter: Adapter
    proof: Proof


# Ways to gather by token: the Python of it, with $ in place of the value.
SAMPLES_SECOND = "kept.gather($.transpose(0, 1)).transpose(0, 1)"
LEADING = "$[: kept.num_prefix_tokens + kept.ids.shape[1]]"  # the same for all tokens of the image
NUM_KEPT = "kept.ids.shape[1]"


def propose_adapter(
    model: nn.Module,
    arguments: Mapping[str, Any],
    image: str = "hidden_states",
    *,
    num_prefix_tokens: Count | None = None,
    num_suffix_tokens: Count | None = None,
) -> Proposal:
    """Return an adapter for a model that is not known, to be reviewed and passed to `attach`.

    Args:
        arguments: of the model's forward, by name, at least two samples, which differ. Only these will be
            accepted together with routing. Let no length or sum of two be that of another: tokens, text,
            channels.
        image: which of them becomes the tokens that may bypass: a tensor, or a list of one for each sample.
        num_prefix_tokens, num_suffix_tokens: those of the adapter, where no shape tells their number, or
            references or padding are in `image` itself. The source calls them.

    Raises:
        ValueError: what was seen, where that is not enough for an adapter.
    """
    lists = _watch(model, arguments, image)
    longest = max(lists, key=lambda each: len(each.calls))
    prefixes = suffixes = _lengths(model, arguments, image)
    P = num_prefix_tokens(model, arguments) if num_prefix_tokens else 0
    if num_prefix_tokens:
        prefixes = {**prefixes, P: "num_prefix_tokens(model, arguments)"}
        first = longest.first
        for each in lists:
            if each.first == first and 0 < first < P:  # others come first in the image itself
                each.first, each.num_tokens = P, each.num_tokens - (P - first)
    if num_suffix_tokens:
        suffixes = {longest.num_suffix: "num_suffix_tokens(model, arguments)"}
    given = {"num_prefix_tokens": num_prefix_tokens, "num_suffix_tokens": num_suffix_tokens}
    failed: list[tuple[float, bool, str]] = []
    accepts = f"{FOUR}accepts={_names((*arguments, 'return_dict'))},\n"
    drafts = (
        f"Adapter(\n{block_lists}{accepts}{counts}{whole})\n"
        for whole in ("", f"{FOUR}whole_between_blocks=True,\n")
        for block_lists, counts in _drafts(lists, longest, prefixes, suffixes)
    )
    for source in drafts:
        # What is proved is the source itself.
        names = {"Adapter": Adapter, "BlockList": BlockList, "TablePerSample": TablePerSample}
        adapter = eval(source, names | given)
        try:
            if P and adapter.num_prefix_tokens(model, arguments) != P:
                raise ValueError(f"nothing was seen of the {P} tokens that num_prefix_tokens returns")
            proofs = [prove(model, adapter, arguments, route) for route in ROUTES]
        except WRONG as error:
            apart, why = torch.inf, f"{type(error).__name__}: {error}"
        else:
            proof = max(proofs, key=lambda proof: proof.dense + proof.routed)
            if all(proof.passes for proof in proofs):  # no NaN is
                return Proposal(_file(source, [name for name in given if given[name]]), adapter, proof)
            apart, why = max(proof), f"the routes differ by {max(proof):.1g} of what they change"
        failed.append((apart, adapter.whole_between_blocks, f"{source}\n{why}"))
    *_, closest = min(reversed(failed), key=lambda attempt: attempt[:2])
    raise ValueError(
        f"no adapter for {type(model).__name__} was right; correct by hand what is wrong in the closest, and "
        f"try it with routing.prove:\n{closest}"
    )


def _file(source: str, counts: Sequence[str]) -> str:
    table = "from routing.adapters.families.parts import TablePerSample\n"
    lines = [table] if "TablePerSample" in source else []
    lines += [f"# Put your {name} here, which is called below.\n" for name in counts]
    return f"from routing import Adapter, BlockList\n{''.join(lines)}\nadapter = {source}"


class _Call(NamedTuple):
    """A block that was called: its place in its list, and among all calls."""

    idx: int
    place: int
    arguments: dict[str, Any]
    output: Any


@dataclass
class _List:
    """A list of blocks that carries the image.

    Args:
        tokens: the argument with the image; empty where none was found.
        first: where the image begins in it.
        num_tokens, num_suffix: T, and S.
        num_prefix: P, of whatever is indexed by token, which `tokens` may not have.
        behind: how many others may come behind the tokens, in whatever is indexed by token.
        output: at which place of a tuple a block returns its tokens.
        sequence_first: samples are in the second dimension of what is indexed by token.
    """

    name: str
    calls: list[_Call]
    num_samples: int
    tokens: str = ""
    first: int = 0
    num_tokens: int = 0
    num_suffix: int = 0
    num_prefix: int = 0
    behind: Sequence[int] = ()
    output: int | None = None
    sequence_first: bool = False

    @property
    def length(self) -> int:
        """T + S."""
        return self.num_tokens + self.num_suffix

    @property
    def given(self) -> dict[str, Any]:
        """What blocks were given beside the tokens."""
        pairs = [pair for call in self.calls for pair in call.arguments.items()]
        return {name: value for name, value in pairs if value is not None and name != self.tokens}

    def find(self, changed: Mapping[str, Any], before: "_List | None") -> None:
        """Find the tokens in what another image changes: all of it in the first list, in a later one what the
        list before returned, or as many.
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
                places = iter([(name, *_changed(*pair)) for name, pair in pairs.items()])
            else:
                places = before.places({name: x for name, (x, _) in pairs.items()})
            if place := next(places, None):
                self.tokens, self.first, self.num_tokens = place
                self.num_suffix = pairs[self.tokens][0].shape[1] - self.first - self.num_tokens
                self._find_output()
                return

    batch_first, tokens_of = BlockList.batch_first, BlockList.tokens_of

    def places(self, sequences: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, int, int]]:
        """Yield where the image may be in what comes after this list: the name, the first token, and T."""
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
            raise ValueError(f"no output of a block of {self.name} is {self.tokens} of the next one")
        (self.output,) = equal or same

    def source(self, ways: Mapping[str, str], suffix: str | None) -> str:
        """Write the list as it stands in an adapter.

        Args:
            suffix: counts S of this list; None: that of the adapter.
        """
        parts = [f'"{self.name}"']
        parts += [f'tokens="{self.tokens}"'] if self.tokens != "hidden_states" else []
        parts += ["joint=True"] if self.first else []
        parts += [f"output={self.output}"] if self.output is not None else []
        if ways:
            texts = {name: _of(way, "value") for name, way in ways.items()}
            lines = "".join(f'{FOUR * 4}"{name}": lambda value, kept: {t},\n' for name, t in texts.items())
            parts.append(f"by_token={{\n{lines}{FOUR * 3}}}")
        if shared := [name for name in self.given if name not in ways]:
            parts.append(f"shared={_names(shared)}")
        parts += ["sequence_first=True"] if self.sequence_first else []
        parts += [f"num_suffix_tokens=lambda model, arguments: {suffix}"] if suffix else []
        lines = "".join(f"{FOUR * 3}{part},\n" for part in parts)
        return f"{FOUR * 2}BlockList(\n{lines}{FOUR * 2}),\n"

    def variants(self, values: Mapping[str, Any]) -> list[dict[str, str]]:
        """Return ways to gather those of the values that are indexed by token, by name."""
        ways = {name: self._ways(value) for name, value in values.items()}
        ways = {name: found for name, found in ways.items() if found}
        return [dict(zip(ways, chosen, strict=True)) for chosen in product(*ways.values())]

    def _ways(self, value: Any) -> list[str]:
        """Ways to gather a value by token; empty if it is not indexed by token."""
        if isinstance(value, torch.Tensor):
            return self._of_tensor(value)
        if isinstance(value, tuple | list):
            return self._of_sequence(value)
        if isinstance(value, dict):
            found = [
                [f"{k!r}: {_of(way, f'$[{k!r}]')}" for k, way in d.items()] for d in self.variants(value)
            ]
            return [f"{{**$, {', '.join(entries)}}}" for entries in found if entries]
        return [NUM_KEPT] if type(value) is int and value == self.length else []

    def _of_sequence(self, value: Sequence[Any]) -> list[str]:
        parts = [self._ways(part) for part in value]
        kind = "list" if isinstance(value, list) else "tuple"
        if parts and all(ways == parts[0] for ways in parts):
            return [f"{kind}({_of(way, 'x')} for x in $)" for way in parts[0]]
        if not any(parts):
            return []
        places = ([_of(way, f"$[{i}]") for way in ways or ["$"]] for i, ways in enumerate(parts))
        return [f"({' '.join(f'{way},' for way in ways)})" for ways in product(*places)]

    def _of_tensor(self, x: torch.Tensor) -> list[str]:
        if self.sequence_first and x.shape[:2] == (self.length, self.num_samples):
            return [SAMPLES_SECOND]
        joint_length = self.num_prefix + self.length
        joint = ("gather_joint",) if self.first else ("gather_joint", "gather_between")
        if x.shape[-1] == joint_length:  # a mask: if it hides too little to tell, one that needs no prefix
            joint = joint[::-1]
        start = joint_length if self.first else self.length
        with_others = {start + number: ("gather_between",) for number in self.behind}
        methods = {**with_others, joint_length: joint, self.length: ("gather",)}
        dims = {dim: methods[size] for dim, size in enumerate(x.shape) if size in methods}
        if dims and x.shape[0] in (1, self.num_samples):
            first = min(dims)  # alone, where a table happens to have as many channels as there are tokens
            each = [dims, {first: dims[first]}] if len(dims) > 1 else [dims]
            return [way for of_dims in each for way in _of_dims(of_dims)]
        # A table for all samples.
        found = [f"kept.{method}($.unsqueeze(0))" for method in dims.get(0, ())]
        found += [f"TablePerSample({way})" for way in found]
        return [*found, LEADING] if found and x.ndim == 1 else found


def _changed(x: torch.Tensor, other: torch.Tensor) -> tuple[int, int]:
    """Return the first token that differs, and how many there are up to the last one."""
    where = (x != other).any(dim=2).any(dim=0).nonzero().flatten()
    return int(where[0]), int(where[-1] - where[0]) + 1


def _of(way: str, value: str) -> str:
    return way.replace("$", value)


def _of_dims(methods: Mapping[int, Sequence[str]]) -> Iterator[str]:
    """Yield ways to gather along dimensions, each by one of its methods."""
    for chosen in product(*methods.values()):
        way = "$"
        for dim, method in zip(methods, chosen, strict=True):
            way = f"kept.{method}({way}, {dim})"
        yield way


def _drafts(
    lists: Sequence[_List], longest: _List, prefixes: Mapping[int, str], suffixes: Mapping[int, str]
) -> Iterator[tuple[str, str]]:
    """Yield block lists and counts of adapters: of the lists with as many tokens before the image as the
    longest has, or none, and none or a known number behind it; then without the first of them, which may
    prepare the image for what comes.
    """
    joint = next((each for each in (longest, *lists) if each.first), longest)
    P, S = joint.first, longest.num_suffix
    for number, known, side, where in ((P, prefixes, "prefix", joint), (S, suffixes, "suffix", longest)):
        if number and number not in known:
            raise ValueError(
                f"{where.tokens} of {where.name} has {number} {side} tokens beside those of the image, which "
                f"no argument explains: pass num_{side}_tokens, which returns how many"
            )
    alike = [each for each in lists if each.first in (0, P) and each.num_suffix in (0, *suffixes)]
    for some in (alike[start:] for start in range(alike.index(longest) + 1)):
        tensors = [x for x in tree_leaves([each.given for each in some]) if isinstance(x, torch.Tensor)]
        sizes = {size for x in tensors for size in x.shape}
        # Tables and masks may have a prefix that the tokens do not have.
        numbers = [P] if P else [*(n for n in prefixes if longest.length + n in sizes), 0]
        for number, behind in product(numbers, ((), (*prefixes, S))):
            for each in some:
                each.num_prefix, each.behind = number, behind
            for ways in product(*(each.variants(each.given) for each in some)):
                yield _draft(list(zip(some, ways, strict=True)), prefixes.get(number), suffixes)


def _draft(
    lists: Sequence[tuple[_List, Mapping[str, str]]], prefix: str | None, suffixes: Mapping[int, str]
) -> tuple[str, str]:
    """Write lists with ways to gather their arguments, and what counts tokens beside those of the image."""
    own, counts = [suffixes.get(each.num_suffix) for each, _ in lists], {}
    if len({each.num_suffix for each, _ in lists}) == 1 and own[0]:
        counts, own = {"num_suffix_tokens": own[0]}, [None for _ in lists]
    sources = "".join(each.source(ways, suffix) for (each, ways), suffix in zip(lists, own, strict=True))
    if any(text in sources for text in ("joint=True", "gather_joint", _of(LEADING, ""))):
        counts = {"num_prefix_tokens": prefix, **counts}
    lines = (f"{FOUR}{name}=lambda model, arguments: {text},\n" for name, text in counts.items())
    return f"{FOUR}block_lists=(\n{sources}{FOUR}),\n", "".join(lines)


def _watch(model: nn.Module, arguments: Mapping[str, Any], image: str) -> list[_List]:
    """Return the lists of blocks that carry the image, one after another."""
    if not all(isinstance(x, torch.Tensor) for x in tree_leaves(arguments.get(image))):
        raise ValueError(f"image={image} must be a tensor among the arguments, or a list of tensors")
    if len(arguments[image]) < 2:
        raise ValueError(f"{image} has one sample: give two, which differ")
    calls = _calls(model, arguments)
    changed = _calls(model, {**arguments, image: tree_map(torch.randn_like, arguments[image])})
    lists: list[_List] = []
    for name, of_list in calls.items():
        before = lists[-1] if lists else None
        if before and of_list[0].place < before.calls[-1].place:
            continue  # it runs between the blocks of that one
        found = _List(name, of_list, len(arguments[image]))
        found.find(changed[name][0].arguments, before)
        lists += [found] if found.tokens else []
    if not lists:
        raise ValueError(
            f"{type(model).__name__} has no list of blocks, run one after another, whose attention "
            f"(F.scaled_dot_product_attention, or torch's own layers) sees the tokens of image={image!r}"
        )
    return lists


def _lengths(model: nn.Module, arguments: Mapping[str, Any], image: str) -> dict[int, str]:
    """Count what may be beside the tokens of the image, each number with the Python that tells it: a text, as
    states, words or a list of states; learned tokens; what becomes a single token; and two of these.
    """
    num_samples, integers = len(arguments[image]), (torch.int32, torch.int64)
    others = {name: value for name, value in arguments.items() if name != image}
    tensors = {name: x for name, x in others.items() if isinstance(x, torch.Tensor)}
    sized = [name for name, x in tensors.items() if x.ndim >= 3]
    sized += [name for name, x in tensors.items() if x.ndim == 2 and x.dtype in integers]
    found = [f'arguments["{name}"].shape[1]' for name in sized]
    for name, value in others.items():
        parts = value if isinstance(value, list) and len(value) == num_samples else [None]
        if all(isinstance(x, torch.Tensor) and x.ndim == 2 for x in parts):
            found.append(f'max(map(len, arguments["{name}"]))')
    for name, x in model.named_parameters(recurse=False):
        found += [f"model.{name}.shape[-2]"] if x.ndim == 2 or (x.ndim == 3 and len(x) == 1) else []
    found += ["1"] if any(x.ndim in (1, 2) and len(x) == num_samples for x in tensors.values()) else []
    lengths: dict[int, str] = {}
    for text in (*found, *map(" + ".join, combinations(found, 2))):
        lengths.setdefault(eval(text, {"model": model, "arguments": arguments}), text)
    return lengths


class _Attention(TorchFunctionMode):
    count = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        self.count += func in (F.scaled_dot_product_attention, F.multi_head_attention_forward)
        return func(*args, **(kwargs or {}))


def _calls(model: nn.Module, arguments: Mapping[str, Any]) -> dict[str, list[_Call]]:
    """Run a model; return the calls of each list of blocks that attend, and ran once, one after another."""
    kinds = (nn.ModuleList, nn.Sequential)
    lists = {name: blocks for name, blocks in model.named_modules() if isinstance(blocks, kinds)}
    found: dict[str, list[_Call]] = {}
    attention, started, attending, places = _Attention(), [], set(), count()

    def start(block: nn.Module, args: tuple) -> None:
        started.append(attention.count)

    def watch(name: str, i: int, block: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        signature = inspect.signature(type(block).forward)
        values = dict(list(signature.bind(block, *args, **kwargs).arguments.items())[1:])
        for parameter in signature.parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                values |= values.pop(parameter.name, {})
        found.setdefault(name, []).append(_Call(i, next(places), values, output))
        attending.update([name] if attention.count > started.pop() else [])

    with ExitStack() as hooks, torch.no_grad(), attention:
        for module in model.modules():
            hooks.callback(setattr, module, "training", module.training)
        model.eval()
        for name, blocks in lists.items():
            for i, block in enumerate(blocks):
                hooks.enter_context(block.register_forward_pre_hook(start))
                hooks.enter_context(block.register_forward_hook(partial(watch, name, i), with_kwargs=True))
        model(**arguments)
    whole = [name for name in attending if [call.idx for call in found[name]] == [*range(len(lists[name]))]]
    inner = {name for name in whole for of in whole if name.startswith(f"{of}.")}
    return {name: calls for name, calls in found.items() if name in whole and name not in inner}


def _names(names: Sequence[str]) -> str:
    return "(" + " ".join(f'"{name}",' for name in names) + ")"
