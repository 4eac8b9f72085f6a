"""Prove an adapter: compare a routed model with the same model in which attention hides bypassing tokens.

In the second model all tokens go through the window. Attention masks the keys of bypassing tokens, and after
the window these tokens get back the state that they had before it. Nothing is gathered, so that positions,
modulation and masks are the model's own.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from routing.adapters.adapter import Adapter, BlockList
from routing.adapters.attached import attach, detach
from routing.routes import Route, Routing
from routing.tokens import num_tokens_kept

# Fractions of the change that routes make.
EXACT = 1e-9  # an error below it ends the search for the way to hide keys
MAX_ERROR = 0.01  # rounding in bf16 stays below it; in fp64 the error of a correct adapter is below 1e-9
MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)  # torch's own layers call it


class Proof(NamedTuple):
    """Largest absolute differences, divided by the largest change that routes make."""

    dense: float  # between the model at ratio 0 and the model without routes
    routed: float  # between the routed model and the model with hidden keys

    @property
    def passes(self) -> bool:
        """True if `dense` is 0 and `routed` is below MAX_ERROR."""
        return self.dense == 0 and self.routed < MAX_ERROR


class _HiddenKeys(TorchFunctionMode):
    """Attention that masks the keys of the tokens `hidden`, (N, T + S) bool. None: masks nothing.

    Args:
        num_first: number of other tokens that attention puts before these. None: all others.
        alone: True to also mask calls whose queries are only these tokens, while keys include others.
        between: True to mask also attention between the blocks of a window.
    """

    def __init__(self, num_first: int | None, alone: bool, between: bool):
        super().__init__()
        self.num_first, self.alone, self.between = num_first, alone, between
        self.hidden: torch.Tensor | None = None
        self.was_observed, self.sample = False, -1

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:  # (L, N, D)
            inputs = MULTI_HEAD.bind(*args, **kwargs).arguments
            query, padding = inputs["query"], inputs.get("key_padding_mask")  # torch's layers pass floats
            hidden = self._keys(len(query), len(inputs["key"]), query.shape[1])
            if hidden is not None:
                return func(**{**inputs, "key_padding_mask": _hide(padding, hidden, query[0])})
        if func is F.scaled_dot_product_attention:  # (N, ..., L, D)
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            inputs = {**dict(zip(names, args, strict=False)), **kwargs}
            query = inputs["query"]
            sizes = query.shape[-2], inputs["key"].shape[-2], len(query)
            hidden = None if inputs.get("is_causal") else self._keys(*sizes)
            if hidden is not None:
                return func(**{**inputs, "attn_mask": _hide(inputs.get("attn_mask"), hidden, query)})
        return func(*args, **kwargs)

    def _keys(self, num_queries: int, num_keys: int, num_samples: int) -> torch.Tensor | None:
        """Return the keys to hide, (N, L) bool. None: the tokens are not among the keys."""
        if self.hidden is None:
            return None
        hidden, num_others = self.hidden, num_keys - self.hidden.shape[1]
        alone = (self.alone and num_queries == hidden.shape[1]) or not num_others
        num_first = num_others if self.num_first is None or not num_others else self.num_first
        if not (num_queries == num_keys or alone) or num_others < max(num_first, 0):
            return None
        self.was_observed = True
        if num_samples != len(hidden):  # one call per sample
            self.sample = (self.sample + 1) % len(hidden)
            hidden = hidden[self.sample][None]
        return F.pad(hidden, (num_first, num_others - num_first))


def _hide(mask: torch.Tensor | None, hidden: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return an additive mask that hides keys (N, L) in addition to another mask."""
    hidden = hidden.view(len(hidden), *(1,) * (query.ndim - 2), -1)
    if mask is None:
        mask = query.new_zeros(())
    elif mask.dtype == torch.bool:
        mask = query.new_zeros(mask.shape).masked_fill(~mask, -torch.inf)
    return mask.to(query.dtype).masked_fill(hidden, -torch.inf)


def prove(model: nn.Module, adapter: Adapter, arguments: Mapping[str, Any], route: Route) -> Proof:
    """Compare an adapter with a model that hides keys. The model is not changed.

    Args:
        model: a model without routes. It runs in `eval()` mode.
        arguments: arguments of its forward, by name. The samples must differ, and no other sequence (text,
            audio) may be as long as the image.
        route: the window to prove.

    Raises:
        ValueError: the model cannot be routed, routes change nothing, or no attention was observed.
    """
    mha = torch.backends.mha
    with ExitStack() as after, torch.no_grad():
        after.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
        mha.set_fastpath_enabled(False)  # its kernel would bypass torch functions and hooks
        for module in model.modules():
            after.callback(setattr, module, "training", module.training)
        model.eval()
        return _prove(model, adapter, arguments, route)


def _prove(model: nn.Module, adapter: Adapter, arguments: Mapping[str, Any], route: Route) -> Proof:
    (route,) = attach(model, [route], adapter=adapter)  # raises if something does not fit
    detach(model)
    layers = [(spec, block) for spec in adapter.block_lists for block in spec.blocks(model)]
    window = layers[route.start_layer_idx : route.end_layer_idx + 1]
    P, S = adapter.num_prefix_tokens(model, arguments), adapter.num_suffix_tokens_of(model, arguments)
    start = _Tokens(*window[0], P)
    with start.recording():
        plain = _output(model, arguments)
    N, T = start.value.shape[0], start.value.shape[1] - S[start.spec.name]
    num_draws, generator = 1 if adapter.one_subset else N, torch.Generator().manual_seed(0)
    noise = torch.rand(num_draws, T, generator=generator).to(start.value.device)
    num_kept = num_tokens_kept(T, route.selection_ratio)
    hidden = (noise.argsort(dim=1).argsort(dim=1) >= num_kept).expand(N, T)
    hidden_in = {name: F.pad(hidden, (0, num_suffix)) for name, num_suffix in S.items()}  # (N, T + S)

    attach(model, [route], adapter=adapter)
    try:
        dense = _output(model, {**arguments, "routing": Routing(0)})
        routed = _output(model, {**arguments, "routing": Routing(route.selection_ratio, noise=[noise])})
    finally:
        detach(model)
    effect = _max_error(routed, plain)
    if not effect > 0:
        raise ValueError("routes change nothing: the output does not depend on the blocks of the window")
    # The order of other tokens in attention is unknown. One of these options must be right.
    options = product((None, P if start.spec.joint else 0), (True, False), (True, False))
    errors: list[float] = []
    for option in options:
        output = _run_hidden(model, arguments, window, hidden_in, P, _HiddenKeys(*option))
        errors += [] if output is None else [_max_error(output, routed) / effect]
        if errors and errors[-1] < EXACT:
            break
    if not errors:
        raise ValueError(
            "no attention to the tokens was observed: blocks must call F.scaled_dot_product_attention, or be "
            "torch's own layers"
        )
    return Proof(_max_error(dense, plain) / effect, min(errors))


class _Tokens:
    """The tokens (N, T + S, D) before or after a block."""

    value: torch.Tensor

    def __init__(self, spec: BlockList, block: nn.Module, num_prefix_tokens: int):
        self.spec, self.block = spec, block
        self.first = num_prefix_tokens if spec.joint else 0
        self.signature = inspect.signature(type(block).forward)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Store the tokens before the block in `value`."""

        def before(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            arguments = self.signature.bind(block, *args, **kwargs).arguments
            self.value = self.spec.batch_first(arguments[self.spec.tokens])[:, self.first :]

        with self.block.register_forward_pre_hook(before, with_kwargs=True):
            yield

    def replace(self, output: Any, mask: torch.Tensor, values: torch.Tensor) -> Any:
        """Replace the tokens of `mask` (N, T + S) in the output of the block by `values` (N, T + S, D)."""
        x = self.spec.tokens_of(output)
        values = F.pad(values, (0, 0, 0, mask.shape[1] - values.shape[1]))  # from a list with another S
        tokens = torch.where(mask.unsqueeze(-1), values, x[:, self.first :])
        return self.spec.with_tokens(output, torch.cat([x[:, : self.first], tokens], dim=1))


def _run_hidden(
    model: nn.Module,
    arguments: Mapping[str, Any],
    window: Sequence[tuple[BlockList, nn.Module]],
    hidden_in: Mapping[str, torch.Tensor],
    num_prefix_tokens: int,
    keys: _HiddenKeys,
) -> torch.Tensor | None:
    """Run a model whose window hides tokens, and restore these after it. None: no attention was observed.

    Args:
        hidden_in: the hidden tokens, (N, T + S) bool, by name of the list of blocks.
    """
    start, end = (_Tokens(*layer, num_prefix_tokens) for layer in (window[0], window[-1]))

    def hide(hidden: torch.Tensor, *_: Any) -> None:
        keys.hidden = hidden

    def after(*_: Any) -> None:
        keys.hidden = keys.hidden if keys.between else None

    def rejoin(block: nn.Module, args: tuple, output: Any) -> Any:
        keys.hidden = None
        return end.replace(output, hidden_in[end.spec.name], start.value)

    with ExitStack() as hooks:
        for spec, block in window:
            hooks.enter_context(block.register_forward_pre_hook(partial(hide, hidden_in[spec.name])))
            hooks.enter_context(block.register_forward_hook(after))
        hooks.enter_context(end.block.register_forward_hook(rejoin))
        hooks.enter_context(start.recording())
        with keys:
            output = _output(model, arguments)
    return output if keys.was_observed else None


def _output(model: nn.Module, arguments: Mapping[str, Any]) -> torch.Tensor:
    output = tree_leaves(model(**arguments))
    return torch.cat([x.flatten() for x in output if isinstance(x, torch.Tensor) and x.is_floating_point()])


def _max_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()
