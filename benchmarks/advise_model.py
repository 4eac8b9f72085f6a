"""Which routes suit a transformer from elsewhere, on a batch of yours:

    from benchmarks.advise_model import advise_model
    print(advise_model(transformer, {"hidden_states": latents, "timestep": t, ...}).text)

As `python -m benchmarks.advise` does for a run: the similarity of states over depth, what FLOPs promise, and
measured steps, of the windows that published results allow and, by name, of what SimpleTuner recommends. Call
it in the precision of your training, under its autocast.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import yaml
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.advise import (
    MIN_DEPTH,
    NOTES,
    RATIOS,
    Candidate,
    Words,
    candidate,
    recommend,
    report,
    windows_of,
)
from routing import Adapter, Route, attach, detach, num_tokens_kept, resolve_routes
from routing.adapters.families import adapter_of
from routing.adapters.proof import State
from runtime.provenance import PROJECT
from training.speed import interleaved_seconds

OTHERS = """\
Rows with a name are what SimpleTuner recommends. Training with routes makes states of their windows alike.
"""
PRESETS = ("basic", "advanced", "balanced", "max_speed", "high_res", "lora", "masked", "wan")


class Advice(NamedTuple):
    """A table with its advice, all that was measured, and what is recommended, if anything is."""

    text: str
    candidates: list[Candidate]
    best: Candidate | None


def square(output: Any) -> torch.Tensor:
    """The mean square of a model's first output, in place of a loss."""
    return tree_leaves(output)[0].float().square().mean()


def advise_model(
    model: nn.Module,
    arguments: Mapping[str, Any],
    *,
    adapter: Adapter | None = None,
    loss: Callable[[Any], torch.Tensor] = square,
    repeats: int = 11,
) -> Advice:
    """Measure routes of a model, which keeps those that it has; its gradients are cleared.

    Args:
        arguments: of its forward, by name: a batch as in training.
        adapter: None: that of its routes, or the one that is known for its class.
        loss: of what the model returns.

    Raises:
        ValueError: the class is not known, or has too few blocks.
    """
    attached = getattr(model, "_attached", None)
    adapter = adapter or (attached.adapter if attached else adapter_of(model))
    with _without_routes(model):
        alike, num_tokens = similarity(model, adapter, arguments)
        depth = len(alike) - 1
        if depth < MIN_DEPTH:
            raise ValueError(f"{type(model).__name__} has {depth} blocks: advice needs {MIN_DEPTH}")
        routes = _candidates(depth)
        steps = {name: partial(_step, model, adapter, arguments, loss, of) for name, of in routes.items()}
        flops = {name: _flops(step) for name, step in steps.items()}
        seconds = interleaved_seconds(steps, next(model.parameters()).device, repeats)
    found = [
        candidate(
            of,
            tuple(num_tokens_kept(num_tokens, route.selection_ratio) for route in of),
            flops["dense"] / flops[name],
            seconds["dense"],
            seconds[name],
            alike,
            name if name in PRESETS else "",
        )
        for name, of in routes.items()
        if of
    ]
    words = Words(lambda best: f"attach(model, {_shown(best, depth)})", "train without routes")
    best, advice = recommend(found, depth, words)
    return Advice(report(found, best, [NOTES, OTHERS, advice]), found, best)


@contextmanager
def _without_routes(model: nn.Module) -> Iterator[None]:
    attached = getattr(model, "_attached", None)
    if attached:
        detach(model)
    try:
        yield
    finally:
        if attached:
            attach(model, attached.routes, adapter=attached.adapter, router=attached.router)


@torch.no_grad()
def similarity(model: nn.Module, adapter: Adapter, arguments: Mapping[str, Any]) -> tuple[np.ndarray, int]:
    """The mean cosine similarity of the tokens before any two blocks, and after the last: (depth + 1,
    depth + 1), and T.
    """
    layers = [(spec, block) for spec in adapter.block_lists for block in model.get_submodule(spec.name)]
    P, S = adapter.num_prefix_tokens(model, arguments), adapter.num_suffix_tokens(model, arguments)
    states = [State(spec, block, P) for spec, block in layers]
    with ExitStack() as reading:
        for state in states:
            reading.enter_context(state.reading())
        model(**arguments)
    tokens = [state.value for state in states] + [states[-1].output]
    num_tokens = tokens[0].shape[1] - S
    unit = torch.stack([F.normalize(x[:, :num_tokens].float(), dim=-1) for x in tokens]).flatten(1)
    return ((unit @ unit.T).double() / (len(tokens[0]) * num_tokens)).cpu().numpy(), num_tokens


def _candidates(depth: int) -> dict[str, tuple[Route, ...]]:
    """Routes by name: none, windows at each ratio, and recommendations that fit the depth."""
    routes = {"dense": ()}
    for (start, end), ratio in product(windows_of(depth), RATIOS):
        routes[f"{start} to {end} at {ratio}"] = (Route(ratio, start, end),)
    for name in PRESETS:
        given = yaml.safe_load((PROJECT / f"configs/model/routes/{name}.yaml").read_text())["routes"]
        try:
            routes[name] = resolve_routes([Route(**route) for route in given], depth)
        except ValueError:
            continue  # of another depth
    return routes


def _step(
    model: nn.Module,
    adapter: Adapter,
    arguments: Mapping[str, Any],
    loss: Callable[[Any], torch.Tensor],
    routes: Sequence[Route],
) -> None:
    if routes:
        attach(model, routes, adapter=adapter)
    try:
        loss(model(**arguments)).backward()
    finally:
        if routes:
            detach(model)
    model.zero_grad(set_to_none=True)


def _flops(step: Callable[[], None]) -> int:
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def _shown(routes: Sequence[Route], depth: int) -> str:
    shown = (f"Route({r.selection_ratio}, {r.start_layer_idx}, {r.end_layer_idx - depth})" for r in routes)
    return f"[{', '.join(shown)}]"
