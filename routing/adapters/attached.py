"""Add routes to a transformer that is already built: `attach` and `detach` work on a live model.

Nothing is copied or replaced. The model and its lists of blocks get classes that are derived from their own.
During a routed forward pass the lists return wrapped blocks to the thread of that pass. A wrapped block
gathers the arguments that are indexed by token, calls the block, and puts the tokens back. Parameters, their
names, the configuration, saving and loading do not change. The `Adapter` names the arguments that are indexed
by token. Arguments that it does not name are refused.

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

from routing.adapters.adapter import Adapter, Arguments, BlockList, TokenSelection, plain_forward
from routing.adapters.families import adapter_of
from routing.routers import random_router
from routing.routes import Route, Router, Routing, prefix_errors, resolve_routes
from routing.tokens import end_route

ONE_GRAPH = "tokens are drawn outside of graphs: compile the blocks, or the model without fullgraph=True"
KEYWORDS = ("routing", "generator")  # arguments that `attach` adds to the forward


def attach(
    model: nn.Module,
    routes: Iterable[Route] | Route,
    *,
    adapter: Adapter | None = None,
    router: Router = random_router,
) -> tuple[Route, ...]:
    """Add routes to a model: while it trains, a fraction of its tokens bypasses windows of its blocks.

    The model routes in `train()` mode while gradients are recorded, and is dense otherwise. Its forward gets
    two keyword arguments. `routing` is a Routing for one forward pass; a ratio above 0 routes in any mode.
    `generator` is the generator from which one seed per route is drawn.

    Args:
        model: the transformer itself, not a wrapper. Attach before anything replaces its forward or its
            blocks. Wrap it, compile it and add LoRA or other adapters afterwards.
        routes: windows of blocks. Layers are counted through all lists of blocks.
        adapter: None: `routing_adapter` of the class, or the known adapter of a diffusers class, see
            `routing/adapters/families`.
        router: function that chooses the kept tokens at the start of a window, see `routing/routers`.

    Returns:
        The routes with non-negative indices.

    Raises:
        ValueError: the model has no known adapter, already has routes, or does not match its adapter; or a
            route does not fit. Later, the model raises for arguments that are not supported with routing.
    """
    adapter = adapter_of(model) if adapter is None else adapter
    if not isinstance(adapter, Adapter):
        raise ValueError(f"adapter={adapter!r} must be a routing.Adapter")
    name = type(model).__name__
    if hasattr(model, "_attached"):
        raise ValueError(f"{name} already has routes: routing.detach(model) removes them")
    # A library that restores the forward may bind the class's, or one that an earlier `attach` derived.
    forwards = (type(model).forward, _with_routes(type(model)).forward)
    if getattr(model.__dict__.get("forward", model.forward), "__func__", None) not in forwards:
        raise ValueError(
            f"forward of {name} was replaced (hooks, mixed precision): attach before anything replaces it"
        )
    if getattr(model, "routes", ()):
        raise ValueError(f"{name} was built with routes: build it without them")
    signature = inspect.signature(plain_forward(type(model)))
    for keyword in set(KEYWORDS) & set(signature.parameters) - set(adapter.accepts):
        raise ValueError(f"forward of {name} has an argument {keyword}, a name that attach adds to it")
    routes = tuple(routes) if isinstance(routes, Iterable) else (routes,)
    if not routes or not all(isinstance(route, Route) for route in routes):
        raise ValueError(f"routes={routes} must be a routing.Route, or several")
    if not callable(router):
        raise ValueError(f"router={router!r} must be a function, such as routing.norm_router")
    layers = tuple(layer for spec in adapter.block_lists for layer in _layers(model, spec))
    routes = resolve_routes(routes, len(layers), key="routes")

    offset = 0
    for spec in adapter.block_lists:
        blocks = spec.blocks(model)
        blocks.__class__ = _routed_list_class(type(blocks))
        blocks.first_idx, blocks.routed_passes = offset, {}
        offset += len(blocks)
    model.__dict__.pop("forward", None)
    if not hasattr(type(model), "plain_forward"):  # inherited if `fully_shard` derived the class
        model.__class__ = _with_routes(type(model))
    model.__dict__["_attached"] = _Attached(adapter, layers, routes, router, signature)
    return routes


def detach(model: nn.Module) -> None:
    """Undo `attach`. Wrappers that were put around the forward since then may stay.

    Raises:
        ValueError: the model has no routes.
    """
    if not hasattr(model, "_attached"):
        raise ValueError(f"{type(model).__name__} has no routes")
    adapter = model.__dict__.pop("_attached").adapter
    if "plain_forward" in vars(type(model)):  # False in a class that `fully_shard` derived from it
        model.__class__ = type(model).__base__  # pyright: ignore (the base is a Module)
    for spec in adapter.block_lists:
        blocks = spec.blocks(model)
        if _RoutedBlocks in type(blocks).__bases__:  # not if it was replaced
            blocks.__class__ = type(blocks).__bases__[1]
            del blocks.first_idx, blocks.routed_passes


@dataclass(frozen=True)
class _Layer:
    """A block of the model: its list, and the names of its positional arguments."""

    spec: BlockList
    names: tuple[str, ...]
    rest: str | None  # name of `*args`


def _layers(model: nn.Module, spec: BlockList) -> Iterator[_Layer]:
    blocks = spec.blocks(model)
    if not isinstance(blocks, LISTS) or [*blocks] != [blocks[i] for i in range(len(blocks))]:
        kinds = " or ".join(kind.__name__ for kind in LISTS)
        raise ValueError(f"{spec.name} must be a {kinds}, not a {type(blocks).__name__}")
    required = {spec.tokens, *spec.by_token}
    for block in blocks:
        parameters = list(inspect.signature(type(block).forward).parameters.values())[1:]  # without self
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        for name in ({spec.tokens} if takes_any else required) - {p.name for p in parameters}:
            raise ValueError(
                f"{type(block).__name__} in {spec.name} takes no argument {name}, which the adapter names: "
                "its version differs, or it is wrapped (attach before wrapping or compiling blocks)"
            )
        names = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
        yield _Layer(spec, names, next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None))


@cache
def _with_routes(kind: type[nn.Module]) -> type[nn.Module]:
    """Derive a class of the same name whose forward takes routes."""

    def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(model, "_attached"):  # detached, but a wrapper still calls this forward
            return plain(model, *args, **kwargs)
        return model._attached.forward(model, args, kwargs)

    plain = kind.forward
    signature = inspect.signature(plain)
    keywords = [name for name in KEYWORDS if name not in signature.parameters]
    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in keywords]
    parameters = sorted([*signature.parameters.values(), *added], key=lambda parameter: parameter.kind)
    forward.__signature__ = signature.replace(parameters=parameters)
    forward.__doc__ = plain.__doc__
    copied = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), {**copied, "forward": forward, "plain_forward": plain})


@dataclass(frozen=True)
class _Attached:
    """The routes of a model. Copies of the model share them, so they hold no reference to a model."""

    adapter: Adapter
    layers: tuple[_Layer, ...]
    routes: tuple[Route, ...]
    router: Router
    signature: inspect.Signature

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Attached":
        return self

    @torch.compiler.disable(recursive=False, reason=ONE_GRAPH)
    def forward(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run the forward of the model's class, routed if a ratio is above 0."""
        routing, generator = kwargs.get("routing"), kwargs.get("generator")
        routing = Routing() if routing is None else routing
        if not isinstance(routing, Routing):
            raise ValueError(f"routing={routing!r} must be a routing.Routing or None")
        kwargs = {name: value for name, value in kwargs.items() if name not in KEYWORDS}
        if generator is not None and "generator" in self.adapter.accepts:
            kwargs["generator"] = generator
        ratios = routing.ratios(self.routes, active=model.training and torch.is_grad_enabled())
        forward = partial(plain_forward(type(model)), model)
        if not any(ratios):
            return forward(*args, **kwargs)
        if max(ratios) == 1:
            raise ValueError(f"selection_ratio={routing.selection_ratio} must be below 1 with attach")
        if torch._C._current_graph_task_id() != -1:
            raise ValueError(
                f"gradient checkpointing of {type(model).__name__} as a whole would draw other tokens in the "
                "backward pass: checkpoint its blocks (model.enable_gradient_checkpointing()) instead"
            )
        arguments = self.signature.bind(model, *args, **kwargs).arguments
        self._check(model, arguments)
        P = self.adapter.num_prefix_tokens(model, arguments)
        S = self.adapter.num_suffix_tokens_of(model, arguments)
        windows = []
        for idx, (route, ratio) in enumerate(zip(self.routes, ratios, strict=True)):
            if ratio > 0:
                draw = partial(routing.ids_keep, idx, ratio, router=self.router)
                windows.append(_Window(route, draw, _draw_seed(generator), P, S, self.adapter))
        routed_pass = _RoutedPass(self.layers, windows)

        def wrap(name: str, value: Any) -> Any:
            if value is None or name not in self.adapter.residuals:
                return value
            return _Residuals(name, value, routed_pass)

        names = list(self.signature.parameters)[1:]
        args = tuple(wrap(name, value) for name, value in zip(names, args, strict=False))
        with self._activate(model, routed_pass):
            output = forward(*args, **{name: wrap(name, value) for name, value in kwargs.items()})
        routed_pass.check_done(type(model).__name__)
        return output

    @contextmanager
    def _activate(self, model: nn.Module, routed_pass: "_RoutedPass") -> Iterator[None]:
        """Let the lists of blocks return wrapped blocks to this thread."""
        lists, thread = [], threading.get_ident()
        for spec in self.adapter.block_lists:
            blocks, length = spec.blocks(model), sum(layer.spec is spec for layer in self.layers)
            if not isinstance(blocks, _RoutedBlocks) or len(blocks) != length:
                changed = f"{spec.name} of {type(model).__name__} has changed since attach"
                raise ValueError(f"{changed} (it had {length} blocks): detach, change it, attach again")
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
            is_default = value is None or (type(value) is type(default) and value == default)
            if name not in self.adapter.accepts and not is_default:
                accepted = [name for name in self.signature.parameters if name in self.adapter.accepts]
                raise ValueError(
                    f"{name} of {type(model).__name__} is not supported with routing, "
                    f"which supports {', '.join(accepted)}"
                )
        self.adapter.check(model, arguments)


def _draw_seed(generator: torch.Generator | None) -> int:
    # Tokens are not drawn from the default generator: gradient checkpointing restores its state before it
    # runs a block again, and dropout must find the same state.
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(2**63 - 1, (), generator=generator, device=device))


@dataclass
class _Window:
    """A route in one forward pass. `ids_keep`, `num_tokens` and `original` are set when the window starts."""

    route: Route
    draw: Callable[..., torch.Tensor]  # draw(x, generator=) -> ids_keep
    seed: int
    num_prefix_tokens: int
    num_suffix_tokens: Mapping[str, int]  # by name of the list of blocks
    adapter: Adapter
    ids_keep: torch.Tensor | None = None  # (N, K)
    num_tokens: int = 0
    original: torch.Tensor | None = None  # (N, T + S, D)
    is_done: bool = False
    _kept: dict[int, TokenSelection] = field(default_factory=dict)  # by S

    def start(self, x: torch.Tensor, spec: BlockList) -> None:
        """Draw the kept tokens once. A checkpointed block that runs again uses the same tokens."""
        if self.ids_keep is not None:
            return
        original = x[:, self.num_prefix_tokens :] if spec.joint else x  # (N, T + S, D)
        self.num_tokens = original.shape[1] - self.num_suffix_tokens[spec.name]
        generator = torch.Generator(x.device).manual_seed(self.seed)
        router_input = original[: 1 if self.adapter.one_subset else None, : self.num_tokens]
        self.ids_keep = self.draw(router_input, generator=generator).expand(len(original), -1)
        self.original = None if self.adapter.whole_between_blocks else original

    def kept(self, spec: BlockList) -> TokenSelection:
        """Select the kept tokens in the sequence of a list of blocks."""
        assert self.ids_keep is not None  # the window has started
        S = self.num_suffix_tokens[spec.name]
        if S not in self._kept:
            suffix = self.num_tokens + torch.arange(S, device=self.ids_keep.device)
            ids = torch.cat([self.ids_keep, suffix.expand(len(self.ids_keep), -1)], dim=1)  # (N, K + S)
            self._kept[S] = TokenSelection(ids, self.num_tokens + S, self.num_prefix_tokens)
        return self._kept[S]

    def put_back(self, output: Any, spec: BlockList, before: torch.Tensor) -> Any:
        """Put the bypassing tokens back into the output of a block.

        Args:
            before: tokens before the block, with prefix if the list is joint.
        """
        x, kept = spec.tokens_of(output), self.kept(spec)
        P = self.num_prefix_tokens if spec.joint else 0
        original = before[:, P:] if self.original is None else self.original
        # Use the wider dtype: under autocast, the tokens before a block may be narrower than its output.
        original = original.to(torch.promote_types(original.dtype, x.dtype))
        if (missing := kept.num_tokens - original.shape[1]) != 0:  # the first list has another S
            original = F.pad(original, (0, 0, 0, missing))
        tokens = end_route(x[:, P:], kept.ids, original)  # (N, T + S, D)
        if P:
            tokens = torch.cat([x[:, :P].to(tokens.dtype), tokens], dim=1)  # (N, P + T + S, D)
        return spec.with_tokens(output, tokens)


class _RoutedPass:
    def __init__(self, layers: Sequence[_Layer], windows: Sequence[_Window]):
        ranges = [range(w.route.start_layer_idx, w.route.end_layer_idx + 1) for w in windows]
        self.windows = {idx: w for w, layer_range in zip(windows, ranges, strict=True) for idx in layer_range}
        self.layers, self.idx = layers, -1  # idx: the current layer

    def wrap(self, idx: int, block: nn.Module) -> Any:
        """Return the block, wrapped if it is in a window."""
        self.idx = idx
        window = self.windows.get(idx)
        return block if window is None else _RoutedBlock(block, self.layers[idx], window, idx)

    def residual(self, x: torch.Tensor) -> torch.Tensor:
        """Gather a residual (N or 1, T + S, D) for the tokens after the current layer."""
        window = self.windows.get(self.idx)
        if window is None:
            return x
        kept = window.kept(self.layers[self.idx].spec)
        routed = kept.gather(x)  # (N, K + S, D)
        if self.idx < window.route.end_layer_idx and not window.adapter.whole_between_blocks:
            return routed
        # All tokens are back. The ones that bypassed the window get no residual.
        return end_route(routed, kept.ids, routed.new_zeros(routed.shape[0], *x.shape[1:]))

    def check_done(self, name: str) -> None:
        """Raise ValueError if a window has not ended."""
        for window in self.windows.values():
            if not window.is_done:
                first, last = window.route.start_layer_idx, window.route.end_layer_idx
                raise ValueError(
                    f"the route of layers {first} to {last} was not applied: {name} does not run its blocks "
                    "in order from the lists that the adapter names"
                )


class _Residuals(Sequence):
    """The residuals of a model's blocks, gathered for the current tokens when the model reads them.

    Args:
        values: a sequence, or a dictionary from block index to tensor.
    """

    def __init__(self, name: str, values: Any, routed_pass: _RoutedPass):
        self.name, self.values, self.routed_pass = name, values, routed_pass

    def __contains__(self, i: object) -> bool:
        return i in self.values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, i: Any) -> Any:
        with prefix_errors(self.name):
            return self.routed_pass.residual(self.values[i])


class _RoutedBlock:
    """A block of a window, called with the kept tokens.

    It holds its window, not the pass: the pass would form a reference cycle with the tensors that gradient
    checkpointing saves.
    """

    def __init__(self, block: nn.Module, layer: _Layer, window: _Window, idx: int):
        self._block, self._layer, self._window, self._idx = block, layer, window, idx
        self._has_ended = window.is_done  # a model may get a block without running it (DiT)
        self._records_gradients = torch.is_grad_enabled()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        spec, window, name = self._layer.spec, self._window, type(self._block).__name__
        first, last = window.route.start_layer_idx, window.route.end_layer_idx
        if self._has_ended or (self._idx > first and window.ids_keep is None):
            raise ValueError(f"layer {self._idx}, a {name}, runs twice, or before its route starts")
        if self._records_gradients and not torch.is_grad_enabled():
            raise ValueError(
                "checkpointing with use_reentrant=True would lose the gradients of bypassing tokens: "
                "set use_reentrant=False"
            )
        names, rest = self._layer.names, [self._layer.rest] * len(args)
        arguments = [*zip((*names, *rest), args, strict=False), *kwargs.items()]
        for key, value in arguments:
            if key not in (spec.tokens, *spec.by_token, *spec.shared) and value is not None:
                raise ValueError(
                    f"{key} of {name} is not supported with routing: the adapter does not name it"
                )
        values = dict(arguments)
        x = spec.batch_first(values[spec.tokens])
        if self._idx == first:
            window.start(x, spec)
        kept = window.kept(spec)
        if self._idx == first or window.adapter.whole_between_blocks:
            values[spec.tokens] = spec.batch_first(kept.gather_joint(x) if spec.joint else kept.gather(x))
        for key, gather in spec.by_token.items():
            if values.get(key) is not None:
                with prefix_errors(f"{key} of {name}"):
                    values[key] = gather(values[key], kept)
        # Positional or by name as in the model, because hooks of the block may read either.
        args = (*(values[key] for key, _ in zip(names, args, strict=False)), *args[len(names) :])
        output = self._block(*args, **{key: values[key] for key in kwargs})
        if self._idx == last:
            window.is_done = True
        if self._idx == last or window.adapter.whole_between_blocks:
            return window.put_back(output, spec, x)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)


class _RoutedBlocks(nn.ModuleList if TYPE_CHECKING else object):
    """A list of blocks that returns wrapped blocks during a routed pass."""

    first_idx = 0  # layer index of its first block, counted through all lists
    # By thread, because another thread may run a dense pass. None: a slice of such a list.
    routed_passes: dict[int, _RoutedPass] | None = None

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__() if self._active_pass() is None else (self[i] for i in range(len(self)))

    def __getitem__(self, i: int | slice) -> Any:
        if (routed_pass := self._active_pass()) is None:
            return super().__getitem__(i)
        if isinstance(i, slice):
            return [self[idx] for idx in range(len(self))[i]]
        return routed_pass.wrap(self.first_idx + range(len(self))[i], super().__getitem__(i))

    def _active_pass(self) -> _RoutedPass | None:
        return self.routed_passes.get(threading.get_ident()) if self.routed_passes else None


LISTS = (nn.ModuleList, nn.Sequential)


@cache
def _routed_list_class(kind: type[Any]) -> type[Any]:
    """Derive a class of lists that return wrapped blocks."""
    return type(f"_Routed{kind.__name__}", (_RoutedBlocks, kind), {})
