"""Route the tokens of a transformer that is already built: `attach` and `detach` work on a live instance.

Nothing of the model is copied or replaced; it gets a class that is derived from its own, and so do its lists
of blocks. While a routed forward pass runs, these hand out stand-ins to its thread, which gather what is
indexed by token, call the block, and put the tokens back. Parameters, their names, the configuration, saving
and loading stay what they are. An `Adapter` says what is indexed by token; whatever it does not name is
refused.

Shapes: as in routing/adapters/adapter.py.
"""

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from routing.adapters.adapter import Adapter, Arguments, BlockList, TokenSelection, named, plain_forward
from routing.adapters.families import adapter_of
from routing.routers import random_router
from routing.routes import Route, Router, Routing, resolve_routes
from routing.tokens import end_route

ONE_GRAPH = "routes are chosen outside of graphs: compile the blocks, or the model without fullgraph=True"
KEYWORDS = ("routing", "generator")  # what an attached model takes besides its own arguments


def attach(
    model: nn.Module,
    routes: Iterable[Route] | Route,
    *,
    adapter: Adapter | None = None,
    router: Router = random_router,
) -> tuple[Route, ...]:
    """Let a part of a model's tokens bypass windows of its blocks while it trains, from now on.

    The model routes in `train()` mode where gradients are recorded, and is dense otherwise. Its forward takes
    two more keywords: `routing`, a Routing for this forward (with a ratio above 0 it routes in any mode);
    `generator`, from which a seed is drawn for each route.

    Args:
        model: the transformer itself, not what wraps it, before anything replaces its forward or its blocks;
            afterwards wrap it, compile it, and add adapters to it as you like.
        routes: windows of blocks; layers are counted through all lists of blocks.
        adapter: None takes `routing_adapter` of the class, or the one that is known for it, see
            `routing/adapters/families`.
        router: chooses the tokens that stay where a window starts, see `routing/routers`.

    Returns:
        The routes with non-negative indices.

    Raises:
        ValueError: a model that is not known or has routes already; blocks that are not what the adapter
            says; a route that does not fit. Later, from the model: arguments that do not go together with
            routing.
    """
    adapter = adapter_of(model) if adapter is None else adapter
    name = type(model).__name__
    if hasattr(model, "_attached"):
        raise ValueError(f"{name} has routes: routing.detach(model) removes them")
    # A library that took its own back leaves that of the class bound to the model, or an earlier one of ours.
    forwards = (type(model).forward, _with_routes(type(model)).forward)
    if getattr(model.__dict__.get("forward", model.forward), "__func__", None) not in forwards:
        raise ValueError(
            f"forward of {name} was replaced (hooks, mixed precision): attach routes before that"
        )
    if getattr(model, "routes", ()):
        raise ValueError(f"{name} has routes of its own: build it without")
    signature = inspect.signature(plain_forward(type(model)))
    for own in set(KEYWORDS) & set(signature.parameters) - set(adapter.accepts):
        raise ValueError(f"forward of {name} has an argument {own}, which routing takes for its own")
    routes = (routes,) if isinstance(routes, Route) else tuple(routes or ())
    if not routes:
        raise ValueError("routes must not be empty: the model would stay dense")
    layers = tuple(layer for spec in adapter.block_lists for layer in _layers(model, spec))
    routes = resolve_routes(routes, len(layers), key="routes")

    offset = 0
    for spec in adapter.block_lists:
        blocks = spec.of(model)
        blocks.__class__ = HANDING_OUT[type(blocks)]
        blocks.first_idx, blocks.routed_passes = offset, {}
        offset += len(blocks)
    model.__dict__.pop("forward", None)
    if not hasattr(type(model), "plain_forward"):  # after `detach`, what was derived meanwhile stays
        model.__class__ = _with_routes(type(model))
    model.__dict__["_attached"] = _Attached(adapter, layers, routes, router, signature)
    return routes


def detach(model: nn.Module) -> None:
    """Undo `attach`; what has wrapped the model's forward since then may stay.

    Raises:
        ValueError: the model has no routes.
    """
    if not hasattr(model, "_attached"):
        raise ValueError(f"{type(model).__name__} has no routes")
    adapter = model.__dict__["_attached"].adapter
    del model._attached
    if "plain_forward" in vars(type(model)):  # else a class was derived from it (fully_shard)
        model.__class__ = type(model).__base__  # pyright: ignore (a Module, as above)
    plain = {handing_out: kind for kind, handing_out in HANDING_OUT.items()}
    for spec in adapter.block_lists:
        blocks = spec.of(model)
        if type(blocks) in plain:  # else it was replaced
            blocks.__class__ = plain[type(blocks)]
            del blocks.first_idx, blocks.routed_passes


@dataclass(frozen=True)
class _Layer:
    """A block of the model: its list, and the names of what its forward takes by place."""

    spec: BlockList
    names: tuple[str, ...]
    rest: str | None  # of `*args`


def _layers(model: nn.Module, spec: BlockList) -> Iterator[_Layer]:
    blocks = spec.of(model)
    if type(blocks) not in HANDING_OUT:
        found = f"{spec.name} of {type(model).__name__} is a {type(blocks).__name__}"
        raise ValueError(f"{found}, must be one of {', '.join(kind.__name__ for kind in HANDING_OUT)}")
    named = {spec.tokens, *spec.by_token}
    for block in blocks:
        parameters = list(inspect.signature(type(block).forward).parameters.values())[1:]  # without self
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        for name in ({spec.tokens} if takes_any else named) - {p.name for p in parameters}:
            raise ValueError(
                f"{type(block).__name__} in {spec.name} takes no argument {name}, which the adapter names: "
                "it is of another version, or wrapped (attach before wrapping or compiling blocks)"
            )
        names = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
        yield _Layer(spec, names, next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None))


@cache
def _with_routes(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class of the same name whose forward takes routes."""

    def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(model, "_attached"):  # they were detached, and a wrapper still calls this
            return plain(model, *args, **kwargs)
        return model._attached.forward(model, args, kwargs)

    plain = kind.forward
    own = inspect.signature(plain)
    ours = [name for name in KEYWORDS if name not in own.parameters]
    ours = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in ours]
    parameters = sorted([*own.parameters.values(), *ours], key=lambda parameter: parameter.kind)
    forward.__signature__ = own.replace(parameters=parameters)
    forward.__doc__ = plain.__doc__
    same = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), {**same, "forward": forward, "plain_forward": plain})


@dataclass(frozen=True)
class _Attached:
    """The routes of a model and its copies, to none of which it refers."""

    adapter: Adapter
    layers: tuple[_Layer, ...]
    routes: tuple[Route, ...]
    router: Router
    signature: inspect.Signature

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Attached":
        return self

    @torch.compiler.disable(recursive=False, reason=ONE_GRAPH)
    def forward(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run the model's own forward, with routes where they are on."""
        routing, generator = kwargs.get("routing"), kwargs.get("generator")
        routing = Routing() if routing is None else routing
        if not isinstance(routing, Routing):
            raise ValueError(f"routing={routing!r} must be a routing.Routing, or None")
        kwargs = {name: value for name, value in kwargs.items() if name not in KEYWORDS}
        if generator is not None and "generator" in self.adapter.accepts:
            kwargs["generator"] = generator
        ratios = routing.ratios(self.routes, active=model.training and torch.is_grad_enabled())
        forward = partial(plain_forward(type(model)), model)
        if not any(ratios):
            return forward(*args, **kwargs)
        if torch._C._current_graph_task_id() != -1:
            raise ValueError(
                f"gradient checkpointing of {type(model).__name__} as a whole would draw other tokens in the "
                "backward pass: checkpoint its blocks (model.enable_gradient_checkpointing()) instead"
            )
        arguments = self.signature.bind(model, *args, **kwargs).arguments
        self._check(model, arguments)
        P = self.adapter.num_prefix_tokens(model, arguments)
        S = self.adapter.num_suffix_tokens_of(model, arguments)
        whole, windows = self.adapter.whole_between_blocks, []
        for idx, (route, ratio) in enumerate(zip(self.routes, ratios, strict=True)):
            if ratio > 0:
                draw = partial(routing.ids_keep, idx, ratio, router=self.router)
                windows.append(_Window(route, draw, _draw_seed(generator), P, S, whole))
        routed_pass = _RoutedPass(self.layers, windows)

        def given(name: str, value: Any) -> Any:
            if value is None or name not in self.adapter.residuals:
                return value
            return _Residuals(name, value, routed_pass)

        names = list(self.signature.parameters)[1:]
        args = tuple(given(name, value) for name, value in zip(names, args, strict=False))
        with self._handing_out(model, routed_pass):
            output = forward(*args, **{name: given(name, value) for name, value in kwargs.items()})
        routed_pass.check_done(type(model).__name__)
        return output

    @contextmanager
    def _handing_out(self, model: nn.Module, routed_pass: "_RoutedPass") -> Iterator[None]:
        """Let the lists of blocks hand out stand-ins to this thread."""
        lists, thread = [], threading.get_ident()
        for spec in self.adapter.block_lists:
            blocks, length = spec.of(model), sum(layer.spec is spec for layer in self.layers)
            if not isinstance(blocks, _RoutedBlocks) or len(blocks) != length:
                changed = f"{spec.name} of {type(model).__name__} was replaced, or is no longer of {length} "
                raise ValueError(f"{changed}blocks: detach before, and attach again")
            lists.append(blocks)
        for blocks in lists:
            blocks.routed_passes[thread] = routed_pass
        try:
            yield
        finally:
            for blocks in lists:
                del blocks.routed_passes[thread]

    def _check(self, model: nn.Module, arguments: Arguments) -> None:
        for name, value in list(arguments.items())[1:]:  # without self
            default = self.signature.parameters[name].default
            if name not in self.adapter.accepts and value is not default and value is not None:
                given = f"{name} of {type(model).__name__}"
                accepted = ", ".join(
                    name for name in self.signature.parameters if name in self.adapter.accepts
                )
                raise ValueError(f"{given} does not go together with routing, which accepts {accepted}")
        self.adapter.check(model, arguments)


def _draw_seed(generator: torch.Generator | None) -> int:
    # Tokens have a generator of their own: gradient checkpointing restores the default one before it runs a
    # block again, and dropout must find it in the same state.
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(2**63 - 1, (), generator=generator, device=device))


@dataclass
class _Window:
    """A route in one forward pass; `ids_keep`, `num_tokens` and `original` are set when the window starts."""

    route: Route
    draw: Callable[..., torch.Tensor]  # draw(x, generator=) -> ids_keep
    seed: int
    num_prefix_tokens: int
    num_suffix_tokens: Mapping[str, int]  # by the name of a list of blocks
    whole: bool  # between two blocks the model has all tokens
    ids_keep: torch.Tensor | None = None  # (N, K)
    num_tokens: int = 0
    original: torch.Tensor | None = None  # (N, T + S, D)
    is_done: bool = False
    _kept: dict[int, TokenSelection] = field(default_factory=dict)  # by S

    def start(self, x: torch.Tensor, spec: BlockList) -> None:
        """Draw the kept tokens, once: a checkpointed block that is run again takes the same."""
        if self.ids_keep is not None:
            return
        original = x[:, self.num_prefix_tokens :] if spec.joint else x  # (N, T + S, D)
        self.num_tokens = original.shape[1] - self.num_suffix_tokens[spec.name]
        generator = torch.Generator(x.device).manual_seed(self.seed)
        self.ids_keep = self.draw(original[:, : self.num_tokens], generator=generator)
        self.original = None if self.whole else original

    def kept(self, spec: BlockList) -> TokenSelection:
        """Return the kept tokens among those of a list of blocks."""
        assert self.ids_keep is not None  # the window has started
        S = self.num_suffix_tokens[spec.name]
        if S not in self._kept:
            suffix = self.num_tokens + torch.arange(S, device=self.ids_keep.device)
            ids = torch.cat([self.ids_keep, suffix.expand(len(self.ids_keep), -1)], dim=1)  # (N, K + S)
            self._kept[S] = TokenSelection(ids, self.num_tokens + S, self.num_prefix_tokens)
        return self._kept[S]

    def put_back(self, output: Any, spec: BlockList, before: torch.Tensor) -> Any:
        """Return the output of a block with the bypassing tokens back in place.

        Args:
            before: what the block was given.
        """
        x, kept = spec.tokens_of(output), self.kept(spec)
        P = self.num_prefix_tokens if spec.joint else 0
        original = before[:, P:] if self.original is None else self.original
        # In the type that a block would return: autocast may have left the tokens narrower before it.
        original = original.to(torch.promote_types(original.dtype, x.dtype))
        if (missing := kept.num_tokens - original.shape[1]) != 0:  # the window began in a list of another S
            original = F.pad(original, (0, 0, 0, missing))
        tokens = end_route(x[:, P:], kept.ids, original)  # (N, T + S, D)
        if P:
            tokens = torch.cat([x[:, :P].to(tokens.dtype), tokens], dim=1)  # (N, P + T + S, D)
        return spec.with_tokens(output, tokens)


class _RoutedPass:
    def __init__(self, layers: Sequence[_Layer], windows: Sequence[_Window]):
        indices = [range(w.route.start_layer_idx, w.route.end_layer_idx + 1) for w in windows]
        self.windows = {idx: w for w, of in zip(windows, indices, strict=True) for idx in of}
        self.layers, self.idx = layers, -1  # of the block that was handed out last

    def hand_out(self, idx: int, block: nn.Module) -> Any:
        """Return the block, or what stands in for it within a window."""
        self.idx = idx
        window = self.windows.get(idx)
        return block if window is None else _RoutedBlock(block, self.layers[idx], window, idx)

    def residual(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor that the model adds to the tokens after the last block."""
        window = self.windows.get(self.idx)
        if window is None:
            return x
        kept = window.kept(self.layers[self.idx].spec)
        routed = kept.gather(x)  # (N, K + S, D)
        if self.idx < window.route.end_layer_idx and not window.whole:
            return routed
        # The tokens are complete again; those that bypassed the window rejoin unchanged.
        return end_route(routed, kept.ids, routed.new_zeros(routed.shape[0], *x.shape[1:]))

    def check_done(self, name: str) -> None:
        """Raise ValueError if a window has not ended."""
        for window in self.windows.values():
            if not window.is_done:
                first, last = window.route.start_layer_idx, window.route.end_layer_idx
                raise ValueError(
                    f"the route of layers {first} to {last} was not taken: {name} does not run its blocks "
                    "one after another out of the lists that the adapter names"
                )


class _Residuals(Sequence):
    """The residuals of a model's blocks, each gathered for the tokens that are there when it is added."""

    def __init__(self, name: str, values: Sequence[torch.Tensor], routed_pass: _RoutedPass):
        self.name, self.values, self.routed_pass = name, values, routed_pass

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, i: Any) -> Any:
        with named(self.name):
            return self.routed_pass.residual(self.values[i])


class _RoutedBlock:
    """What a routed pass calls in place of a block of a window.

    It refers to its own window alone: through the pass, what gradient checkpointing saves would be a cycle.
    """

    def __init__(self, block: nn.Module, layer: _Layer, window: _Window, idx: int):
        self._block, self._layer, self._window, self._idx = block, layer, window, idx
        self._has_ended = window.is_done  # the model may look at the block (DiT), and not run it
        self._records_gradients = torch.is_grad_enabled()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block on the kept tokens."""
        spec, window, name = self._layer.spec, self._window, type(self._block).__name__
        first, last = window.route.start_layer_idx, window.route.end_layer_idx
        if self._has_ended or (self._idx > first and window.ids_keep is None):
            raise ValueError(f"layer {self._idx}, a {name}, runs twice, or before its route starts")
        if self._records_gradients and not torch.is_grad_enabled():
            raise ValueError(
                "checkpointing with use_reentrant=True would lose the gradients of bypassing tokens: "
                "use_reentrant=False does not"
            )
        names, rest = self._layer.names, [self._layer.rest] * len(args)
        given = [*zip((*names, *rest), args, strict=False), *kwargs.items()]
        for key, value in given:
            if key not in (spec.tokens, *spec.by_token, *spec.shared) and value is not None:
                raise ValueError(
                    f"{key} of {name} does not go together with routing: the adapter does not name it"
                )
        values = dict(given)
        x = spec.batch_first(values[spec.tokens])
        if self._idx == first:
            window.start(x, spec)
        kept = window.kept(spec)
        if self._idx == first or window.whole:
            values[spec.tokens] = spec.batch_first(kept.gather_joint(x) if spec.joint else kept.gather(x))
        values = spec.gather(values, kept, name)
        # Positional and by name as in the model: hooks of the block may look at either.
        args = (*(values[key] for key, _ in zip(names, args, strict=False)), *args[len(names) :])
        output = self._block(*args, **{key: values[key] for key in kwargs})
        if self._idx == last:
            window.is_done = True
        return window.put_back(output, spec, x) if self._idx == last or window.whole else output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)


class _RoutedBlocks(nn.ModuleList if TYPE_CHECKING else object):
    """A list of blocks that hands out stand-ins during a routed pass."""

    first_idx = 0  # of its first block, through all lists
    # By thread: another one may be dense meanwhile. None: a slice of such a list.
    routed_passes: dict[int, _RoutedPass] | None = None

    def __iter__(self) -> Iterator[Any]:
        blocks = super().__iter__()
        if (routed_pass := self._of_this_thread()) is None:
            return blocks
        return (routed_pass.hand_out(self.first_idx + i, block) for i, block in enumerate(blocks))

    def __getitem__(self, i: int | slice) -> Any:
        if (routed_pass := self._of_this_thread()) is None:
            return super().__getitem__(i)
        if isinstance(i, slice):
            return [self[place] for place in range(len(self))[i]]
        return routed_pass.hand_out(self.first_idx + range(len(self))[i], super().__getitem__(i))

    def _of_this_thread(self) -> _RoutedPass | None:
        return self.routed_passes.get(threading.get_ident()) if self.routed_passes else None


LISTS = (nn.ModuleList, nn.Sequential)
HANDING_OUT = {kind: type(f"_Routed{kind.__name__}", (_RoutedBlocks, kind), {}) for kind in LISTS}
