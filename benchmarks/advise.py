"""Measure which routes suit a network: a trained or half-trained run, or a transformer from elsewhere.

    python -m benchmarks.advise run=runs/NAME
    python -m benchmarks.advise run=runs/NAME mask_coverage=0.4 batch_size=64

    from benchmarks.advise import advise_model
    print(advise_model(transformer, {"hidden_states": latents, "timestep": t, ...}).text)

Three things are measured: how alike the tokens are at any two depths (cosine similarity, as in the figure of
[TREAD] on the representations of layers), what the FLOPs of each candidate promise, and what a forward and
backward pass takes, again and again. The recommendation is the published window, blocks 2 to depth-4 at ratio
0.5, unless another candidate is faster by 5 % in three of four repeats and lets its tokens rejoin a state
that is as much alike, give or take 0.01. That rule is cautious on purpose: similarity has not been shown to
predict the quality of a route, and published quality is known for the published window alone. There is no
advice where the network has hardly been trained, or where the repeats do not agree.

A key of the program that is null is as in the run. Call `advise_model` in the precision of your training,
under its autocast.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from benchmarks.results import markdown
from benchmarks.runs import count_flops
from builders.experiment import Experiment
from builders.sampling import load_net, read_run
from data import LatentDataset
from routing import Adapter, Route, attach, detach, grow_ratio, num_tokens_kept, resolve_routes
from routing.adapters.families import adapter_of
from routing.adapters.proof import State
from runtime.config import command, run_main
from runtime.errors import check_positive
from runtime.files import write_json, write_text
from runtime.machine import compile_blocks, start_process
from runtime.output import claimed, place_of
from runtime.provenance import environment
from runtime.tables import aligned
from training.checkpoint import find_checkpoint
from training.speed import interleaved_seconds, micro_loss, most_graphs

MAX_BATCH = 4096  # of a run from elsewhere
MIN_DEPTH = 8  # below it fewer than three blocks lie between the dense ones of the published window
RATIOS = (0.25, 0.5)  # published: 0.75 is worse than dense
PUBLISHED = Route(0.5, 2, -4)
FASTER_BY, MIN_SPEEDUP = 1.05, 1.05  # than the published window; than no route at all
LESS_ALIKE_BY = 0.01
NEARLY_ALIKE = 0.97  # blocks start as the identity, where all states are alike
NOTES = """
Times are of a forward and backward pass. Measured: the median of the repeats, and what half of them lie
between; windows of as many blocks of each kind share one measurement.
Similarity: mean cosine between the states in which tokens leave and in which they rejoin, without routes.
Candidates are what published results allow: blocks 1 to 3 to depth-5 to depth-3, ratio up to 0.5.
Training with routes makes the states of their windows alike: ask a dense network as well.
"""
HARDLY_TRAINED = """\
No advice yet: all states are nearly the same, this network has hardly been trained. Ask again later."""
Routes = tuple[Route, ...]  # one, or none: dense


@dataclass
class AdviceConfig:
    """The keys of `benchmarks.advise`; None means: as in the run."""

    run: str
    checkpoint: str | None = None  # a step, a name or a path; None: the newest
    num_samples: int = 256
    batch_size: int | None = None
    repeats: int = 11
    mask_coverage: float | None = None  # None: from the masks of the data, where the run uses them
    data_path: str | None = None  # where the data of the run are found; None: in the folder that it names
    output: str | None = None  # None: inside the run
    overwrite: bool = False


@dataclass(frozen=True)
class Candidate:
    """A route, predicted and measured: `num_kept` includes the tokens that masks force to stay,
    `measured_quartiles` are the first and the last of the repeats.
    """

    route: Route
    num_kept: int
    predicted_speedup: float
    measured_speedup: float
    measured_quartiles: tuple[float, float]
    measured_sec: float
    similarity: float


class Advice(NamedTuple):
    """A table with its advice, all that was measured, and what is recommended, if anything is."""

    text: str
    candidates: list[Candidate]
    best: Candidate | None


@command("advise", AdviceConfig, __doc__)
def main(request: AdviceConfig) -> None:
    """Measure, recommend, and write table and figures."""
    experiment = read_run(request.run)
    depth = experiment.model_node.arguments["depth"]
    if depth < MIN_DEPTH:
        raise ValueError(
            f"run={request.run}: model.depth={depth} must be at least {MIN_DEPTH}: the first and the "
            "last blocks must see all tokens"
        )
    for key in ("num_samples", "repeats", "batch_size"):
        if (number := getattr(request, key)) is not None:
            check_positive(key, number)
    if request.mask_coverage is not None and not 0 <= request.mask_coverage <= 1:
        raise ValueError(f"mask_coverage={request.mask_coverage} must be in [0, 1]")
    checkpoint = find_checkpoint(Path(request.run), request.checkpoint)
    resolved = _resolved(request, experiment)
    experiment = _with_data(request, experiment)
    device = start_process().device
    net = load_net(experiment, checkpoint / "ema.safetensors")[0].to(device)
    dataset = experiment.data_node.bind()()
    coverage = request.mask_coverage
    coverage = experiment.mask_coverage(dataset) if coverage is None else coverage
    file = place_of("output", request.output, Path(request.run), "advice") / "advice.json"
    with claimed("output", file, [file.with_suffix(".md")], request.overwrite):
        batch_size = resolved["micro_batch_size"]
        alike = similarity(experiment, net, dataset, request.num_samples, batch_size, device)
        advice = advise_run(experiment, resolved, alike, coverage, request.repeats, device)
        figures = {
            "checkpoint": str(checkpoint),
            "mask_coverage": coverage,
            "batch_size": batch_size,
            "candidates": [asdict(candidate) for candidate in advice.candidates],
            "recommended": asdict(advice.best) if advice.best else None,
            "similarity": alike.tolist(),
            "environment": environment(device),
        }
        write_text(file.with_suffix(".md"), advice.text + "\n")
        write_json(file, figures)
    print(f"{aligned(advice.text)}\n\nthe table is {file.with_suffix('.md')}, the figures are {file}")


def _resolved(request: AdviceConfig, experiment: Experiment) -> dict[str, Any]:
    """Precision, compilation and batch size of the manifest of the run, with those of the request."""
    resolved = experiment.details.get("resolved")
    resolved = resolved if isinstance(resolved, dict) else {}
    batch_size = request.batch_size or resolved.get("micro_batch_size")
    if type(batch_size) is not int or not (request.batch_size or 1 <= batch_size <= MAX_BATCH):
        raise ValueError(
            f"run={request.run}: its manifest has micro_batch_size={batch_size}: set batch_size=N"
        )
    return {**resolved, "micro_batch_size": batch_size}


def _with_data(request: AdviceConfig, experiment: Experiment) -> Experiment:
    """Find the data: a run of somebody else must not make a program fetch or write any."""
    node, asked = experiment.data_node, request.data_path
    data = node.arguments
    if "path" not in data:
        return experiment
    if asked is None and not Path(data["path"]).is_dir():
        given = f"run={request.run}: data.path={data['path']}"
        raise FileNotFoundError(f"{given} is not a folder here: set data_path=PATH")
    return replace(experiment, data_node=node.changed({"path": asked or data["path"]}))


@torch.no_grad()
def similarity(
    experiment: Experiment,
    net: nn.Module,
    dataset: LatentDataset,
    num_samples: int,
    batch_size: int,
    device: torch.device,
) -> np.ndarray:
    """The mean cosine similarity of tokens before and after each block: (depth + 1, depth + 1).

    Entry [i, j] compares the state before block i with that before block j; index depth is the state after
    the last block. The network is dense, at the noise levels of its training, on entries that it was not
    trained on where there are any.
    """
    ids = dataset.held_out_ids if len(dataset.held_out_ids) else dataset.train_ids
    ids, total = ids[:num_samples], 0.0
    precond, loss_fn = experiment.precond(net).eval(), experiment.loss_node.bind()()
    generator, states = torch.Generator(device).manual_seed(0), []
    hooks = [block.register_forward_pre_hook(lambda _, args: states.append(args[0])) for block in net.blocks]
    hooks.append(net.blocks[-1].register_forward_hook(lambda _, __, output: states.append(output)))
    for start in tqdm(range(0, len(ids), batch_size), desc="similarity", unit="batch"):
        stored, labels = dataset.read(ids[start : start + batch_size])
        latents = dataset.manifest.to_latents(stored.to(device), generator)
        loss_fn(precond, latents, None if labels is None else labels.to(device), generator=generator)
        total += len(latents) * mean_cosines([x[:, net.num_prefix_tokens :] for x in states])
        states.clear()
    for hook in hooks:
        hook.remove()
    return (total / len(ids)).cpu().numpy()


def mean_cosines(states: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean cosine (L, L) of the tokens of any two of L states (N, T, D)."""
    unit = torch.stack([F.normalize(x.float(), dim=-1) for x in states]).flatten(1)  # (L, N * T * D)
    return (unit @ unit.T).double() / states[0][..., 0].numel()


def advise_run(
    experiment: Experiment,
    resolved: dict[str, Any],
    alike: np.ndarray,
    coverage: float,
    repeats: int,
    device: torch.device,
) -> Advice:
    """Measure windows of a run, in its precision, compiled as it was, with room for masks."""
    # A route may have weights.
    net = experiment.with_model({"routes": [asdict(PUBLISHED)]}).net().to(device)
    precond, loss_fn = experiment.precond(net).train(), experiment.loss_node.bind()()
    bf16 = torch.autocast(device.type, torch.bfloat16, enabled=resolved.get("mixed_precision") == "bf16")
    loss, batch_size, depth, T = bf16(loss_fn), resolved["micro_batch_size"], len(net.blocks), net.num_tokens
    num_forced = int(np.ceil(coverage * T))

    def step(routes: Routes) -> None:
        grown = [grow_ratio(route.selection_ratio, T, num_forced) for route in routes]
        net.routes = tuple(replace(r, selection_ratio=ratio) for r, ratio in zip(routes, grown, strict=True))
        micro_loss(precond, net, loss, batch_size, device, None).mean().backward()
        net.zero_grad()

    def prepare() -> None:
        if resolved.get("compile"):
            compile_blocks(net.blocks, most_graphs(len(RATIOS) + 1))

    found = measure(net.blocks, T, alike, step, repeats, device, prepare=prepare, num_forced=num_forced)

    def take(best: Route) -> str:
        return f"model=tread {override(best, depth)} run_name=NAME"

    return advice_of(found, depth, take, "train the dense twin, model=dit")


def measure(
    blocks: Sequence[nn.Module],
    num_tokens: int,
    alike: np.ndarray,
    step: Callable[[Routes], None],
    repeats: int,
    device: torch.device,
    prepare: Callable[[], None] = lambda: None,
    num_forced: int = 0,
) -> list[Candidate]:
    """Count the FLOPs of a step with each candidate, and time it against a dense one.

    Args:
        alike: similarities, as `similarity` gives them.
        step: runs forward and backward with a route, or none.
        prepare: called between counting and timing.
        num_forced: tokens that masks force to stay.
    """

    def work(route: Route) -> tuple[Any, ...]:
        """What time depends on: how many blocks of each kind, not where they are."""
        return route.selection_ratio, *map(type, blocks[route.start_layer_idx : route.end_layer_idx + 1])

    routes, found = candidates_of(len(blocks)), []
    steps = {(): partial(step, ())} | {work(route): partial(step, (route,)) for route in routes}
    flops = {key: count_flops(run) for key, run in steps.items()}
    prepare()
    with tqdm(total=len(steps) * (repeats + 1), desc="time", unit="step") as bar:
        timed = {key: lambda run=run: (run(), bar.update()) for key, run in steps.items()}
        seconds = interleaved_seconds(timed, device, repeats)
    for route in routes:
        faster = [a / b for a, b in zip(seconds[()], seconds[work(route)], strict=True)]
        quartiles = tuple(np.quantile(faster, (0.25, 0.75)).tolist())
        measured = (median(faster), quartiles, median(seconds[work(route)]))
        kept = num_tokens_kept(num_tokens, grow_ratio(route.selection_ratio, num_tokens, num_forced))
        similar = float(alike[route.start_layer_idx, route.end_layer_idx + 1])
        found.append(Candidate(route, kept, flops[()] / flops[work(route)], *measured, similar))
    return found


def candidates_of(depth: int) -> list[Route]:
    """The windows that published results allow, at each ratio."""
    windows = product((1, 2, 3), range(depth - 5, depth - 2), RATIOS)
    return [Route(ratio, start, end) for start, end, ratio in windows if start < end]


def recommend(
    candidates: Sequence[Candidate], depth: int, take: Callable[[Route], str], dense: str
) -> tuple[Candidate | None, str]:
    """The candidate to take by the rule above, None for none, and the advice.

    Args:
        take: says how a route is taken.
        dense: says how to go without.
    """
    if min(c.similarity for c in candidates) > NEARLY_ALIKE:  # it cannot rank them
        return None, HARDLY_TRAINED
    (best,) = (c for c in candidates if c.route == resolve_routes([PUBLISHED], depth)[0])
    eligible = [c for c in candidates if c.similarity >= best.similarity - LESS_ALIKE_BY]
    fastest = max(eligible, key=lambda c: c.measured_quartiles[0])
    enough = FASTER_BY * best.measured_speedup if best.measured_quartiles[0] >= MIN_SPEEDUP else MIN_SPEEDUP
    if fastest.measured_quartiles[0] >= enough:
        best = fastest
    low, high = best.measured_quartiles
    if low >= MIN_SPEEDUP:
        return best, f"Recommended: {take(best.route)}"
    window = f"blocks {best.route.start_layer_idx} to {best.route.end_layer_idx}"
    speedups = f"{low:.2f}x to {high:.2f}x as fast ({best.predicted_speedup:.2f}x by FLOPs)"
    between = f"a step with {window} at a ratio of {best.route.selection_ratio} is {speedups}"
    if high < MIN_SPEEDUP:
        return None, f"No route is worth it here ({between}): {dense}."
    return None, f"No advice ({between}): measure while nothing else runs, or with repeats=50."


def override(route: Route, depth: int) -> str:
    """A route for the command line, its end counted from the last block as in `model/routes`."""
    given = asdict(replace(route, end_layer_idx=route.end_layer_idx - depth))
    return f"'model.routes=[{{{', '.join(f'{key}: {value}' for key, value in given.items())}}}]'"


def report(candidates: Sequence[Candidate], best: Candidate | None, advice: str) -> str:
    """The table, and what is to be said below it, as markdown."""
    rows = [
        {
            "blocks bypassed": f"{c.route.start_layer_idx} to {c.route.end_layer_idx}",
            "ratio": c.route.selection_ratio,
            "tokens kept": c.num_kept,
            "predicted": f"{c.predicted_speedup:.2f}x",
            "measured": f"{c.measured_speedup:.2f}x",
            "half of the repeats": "{:.2f}x to {:.2f}x".format(*c.measured_quartiles),
            "ms": f"{1000 * c.measured_sec:.1f}",
            "similarity at end": f"{c.similarity:.3f}",
            "": "recommended" if c == best else "",
        }
        for c in sorted(candidates, key=lambda c: -c.measured_speedup)
    ]
    return "\n".join([markdown(rows, dict.fromkeys(rows[0], "{}"), everything=True), NOTES, advice])


def advice_of(candidates: list[Candidate], depth: int, take: Callable[[Route], str], dense: str) -> Advice:
    """Recommend one of the candidates, and write the table."""
    best, advice = recommend(candidates, depth, take, dense)
    return Advice(report(candidates, best, advice), candidates, best)


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

    def step(routes: Routes) -> None:
        if routes:
            attach(model, routes, adapter=adapter)
        loss(model(**arguments)).backward()
        model.zero_grad(set_to_none=True)
        if routes:
            detach(model)

    if attached:
        detach(model)
    try:
        alike, num_tokens = model_similarity(model, adapter, arguments)
        depth = len(alike) - 1
        if depth < MIN_DEPTH:
            raise ValueError(f"{type(model).__name__} has {depth} blocks: advice needs {MIN_DEPTH}")
        blocks = [block for spec in adapter.block_lists for block in model.get_submodule(spec.name)]
        found = measure(blocks, num_tokens, alike, step, repeats, next(model.parameters()).device)
    finally:
        if hasattr(model, "_attached"):  # where a step failed
            detach(model)
        if attached:
            attach(model, attached.routes, adapter=attached.adapter, router=attached.router)

    def take(best: Route) -> str:
        window = f"{best.start_layer_idx}, {best.end_layer_idx - depth}"
        return f"attach(model, [Route({best.selection_ratio}, {window})])"

    return advice_of(found, depth, take, "train without routes")


@torch.no_grad()
def model_similarity(
    model: nn.Module, adapter: Adapter, arguments: Mapping[str, Any]
) -> tuple[np.ndarray, int]:
    """The mean cosine similarity of the tokens before any two blocks, and after the last: (depth + 1,
    depth + 1), and T.
    """
    layers = [(spec, block) for spec in adapter.block_lists for block in model.get_submodule(spec.name)]
    states = [State(*layer, adapter.num_prefix_tokens(model, arguments)) for layer in layers]
    with ExitStack() as reading:
        for state in states:
            reading.enter_context(state.reading())
        model(**arguments)
    tokens = [state.value for state in states] + [states[-1].output]
    num_tokens = tokens[0].shape[1] - adapter.num_suffix_tokens(model, arguments)
    return mean_cosines([x[:, :num_tokens] for x in tokens]).cpu().numpy(), num_tokens


if __name__ == "__main__":
    run_main(main)
