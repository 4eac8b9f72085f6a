"""Measure which routes suit a network, on a trained or half-trained run.

    python -m benchmarks.advise run=runs/NAME

Three things are measured: how alike the tokens are at any two depths (cosine similarity, as in the figure of
[TREAD] on the representations of layers), what the FLOPs of each candidate promise, and what a forward and
backward pass takes. The recommendation is the published window, blocks 2 to depth-4 at ratio 0.5, unless
another candidate is faster by 5 % and lets its tokens rejoin a state that is as much alike, give or take
0.01. That rule is cautious on purpose: similarity has not been shown to predict the quality of a route, and
published quality is known for the published window alone.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import hydra
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from omegaconf import DictConfig
from tqdm import tqdm

from builders import config as configuration
from builders.network import build_precond
from builders.sampling import find_checkpoint, load_net, read_run
from data import LatentDataset, mask_coverage
from models import cost_of, token_mask
from routing import Route, grow_ratio, num_tokens_kept, resolve_routes
from runtime.config import build_node, run_main, user_mistakes
from runtime.errors import check_positive
from runtime.files import atomic_write, write_json, write_text
from runtime.machine import start_process
from runtime.output import claimed, place_of
from runtime.provenance import environment
from training.speed import fp32_slowdown, interleaved_seconds, most_graphs, speedup

MAX_BATCH = 4096  # that a run from elsewhere may ask for
MIN_DEPTH = 8  # below it fewer than three blocks lie between the dense ones of the published window
COLORS = {0.25: "tab:gray", 0.5: "tab:blue"}
RATIOS = tuple(COLORS)  # published: 0.75 is worse than dense
PUBLISHED = Route(0.5, 2, -4)
FASTER_BY = 1.05
LESS_ALIKE_BY = 0.01
NEARLY_ALIKE = 0.97  # blocks start as the identity: then all states are alike, and that says nothing
MIN_SPEEDUP = 1.05  # below it routes do not pay for what they may cost in quality

configuration.register()


@dataclass(frozen=True)
class Candidate:
    """One route, what it promises and what was measured; `num_kept` includes what masks force to stay.

    Times are of a forward and backward pass; the predicted one is the dense time over the promised speed-up.
    """

    route: Route
    num_kept: int
    predicted_speedup: float
    measured_speedup: float
    predicted_sec: float
    measured_sec: float
    similarity: float


@hydra.main(version_base="1.3", config_path="../configs", config_name="advise")
def main(cfg: DictConfig) -> None:
    """Measure, recommend, and write table, figures and picture."""
    with user_mistakes():
        request = configuration.resolve(cfg)
        config, details = read_run(request["run"])
        depth = config["model"]["depth"]
        if depth < MIN_DEPTH:
            raise ValueError(
                f"run={request['run']}: routes make no sense at model.depth={depth}, it must be at least "
                f"{MIN_DEPTH}: "
                "the first and the last blocks must see all tokens, and hardly any would be left to bypass"
            )
        for key in ("num_samples", "repeats", "batch_size"):
            if request[key] is not None:
                check_positive(key, request[key])
        if request["mask_coverage"] is not None and not 0 <= request["mask_coverage"] <= 1:
            raise ValueError(f"mask_coverage={request['mask_coverage']} must be in [0, 1]")
        checkpoint = find_checkpoint(Path(request["run"]), request["checkpoint"])
        resolved = _resolved(request, details)
        _find_data(request, config)
        device = start_process().device
        net = load_net(config, checkpoint / "ema.safetensors").to(device)
        dataset = build_node(config, "data")()
        coverage = _coverage(request["mask_coverage"], config, dataset)
        file = place_of("output", request["output"], Path(request["run"]), "advice") / "advice.json"
        with claimed(
            "output", file, [file.with_suffix(".md"), file.with_suffix(".png")], request["overwrite"]
        ):
            batch_size = resolved["micro_batch_size"]
            alike = similarity(config, net, dataset, request["num_samples"], batch_size, device)
            candidates = measure(
                config, resolved, net, alike, coverage, batch_size, request["repeats"], device
            )
            best = recommend(candidates, depth)
            text = report(candidates, best, depth, coverage, routed=bool(config["model"]["routes"]))
            figures = {
                "checkpoint": str(checkpoint),
                "mask_coverage": coverage,
                "batch_size": batch_size,
                "candidates": [asdict(candidate) for candidate in candidates],
                "recommended": asdict(best) if best else None,
                "similarity": alike.tolist(),
                "environment": environment(device),
            }
            write_text(file.with_suffix(".md"), text + "\n")
            write_json(file, figures)
            with atomic_write(file.with_suffix(".png")) as partial:
                draw(alike, candidates, best, partial)
    print(f"{text}\n\ntable   {file.with_suffix('.md')}\npicture {file.with_suffix('.png')}")


def _resolved(request: dict[str, Any], details: dict[str, Any]) -> dict[str, Any]:
    """Return precision, mode and batch of the run, as its manifest tells them, and as the request changes
    them.
    """
    told = details.get("resolved")
    told = told if isinstance(told, dict) else {}
    batch_size = request["batch_size"] or told.get("micro_batch_size")
    if type(batch_size) is not int or not (request["batch_size"] or 1 <= batch_size <= MAX_BATCH):
        raise ValueError(
            f"run={request['run']}: its manifest tells micro-batches of {batch_size}: give batch_size=N"
        )
    return {**told, "micro_batch_size": batch_size}


def _find_data(request: dict[str, Any], config: dict[str, Any]) -> None:
    """Put the place of the data into the configuration of a run, which may not send a program anywhere, or
    write there.
    """
    data, asked = config["data"], request["data_path"]
    if "path" not in data:
        return
    if asked is None and not Path(data["path"]).is_dir():
        raise FileNotFoundError(
            f"run={request['run']}: data.path={data['path']} is no folder here: give data_path=PATH"
        )
    data["path"] = asked or data["path"]


def _coverage(requested: float | None, config: dict[str, Any], dataset: LatentDataset) -> float:
    if requested is not None:
        return requested
    if not config["train"]["masked_loss"] or config["routing"]["force_keep_overflow"] != "grow":
        return 0.0
    patch_size = config["model"]["patch_size"]
    return mask_coverage(dataset, lambda masks: token_mask(masks, patch_size), config["train"]["batch_size"])


@torch.no_grad()
def similarity(
    config: dict[str, Any],
    net: nn.Module,
    dataset: LatentDataset,
    num_samples: int,
    batch_size: int,
    device: torch.device,
) -> np.ndarray:
    """Return the mean cosine similarity of tokens before and after each block: (depth + 1, depth + 1).

    Entry [i, j] compares the state before block i with that before block j; index depth is the state after
    the last block. The network is dense, at the noise levels of its training, on entries that it was not
    trained on where there are any.
    """
    ids = dataset.held_out_ids if len(dataset.held_out_ids) else dataset.train_ids
    ids, depth, states = ids[:num_samples], len(net.blocks), []
    precond, loss_fn = build_precond(config, net).eval(), build_node(config, "diffusion.loss")()
    hooks = [block.register_forward_pre_hook(lambda _, args: states.append(args[0])) for block in net.blocks]
    hooks.append(net.blocks[-1].register_forward_hook(lambda _, __, output: states.append(output)))
    total = torch.zeros(depth + 1, depth + 1, dtype=torch.float64, device=device)
    generator = torch.Generator(device).manual_seed(0)
    for start in tqdm(range(0, len(ids), batch_size), desc="similarity", unit="batch"):
        stored, labels = dataset.read(ids[start : start + batch_size])
        latents = dataset.manifest.to_latents(stored.to(device), generator)
        loss_fn(precond, latents, None if labels is None else labels.to(device), generator=generator)
        unit = torch.stack(
            [F.normalize(x[:, net.num_prefix_tokens :].float(), dim=-1) for x in states]
        ).flatten(1)
        total += (unit @ unit.T).double() / net.num_tokens
        states.clear()
    for hook in hooks:
        hook.remove()
    return (total / len(ids)).cpu().numpy()


def measure(
    config: dict[str, Any],
    resolved: dict[str, Any],
    net: nn.Module,
    alike: np.ndarray,
    coverage: float,
    batch_size: int,
    repeats: int,
    device: torch.device,
) -> list[Candidate]:
    """Return all candidates, with the time of a forward and backward pass in the precision and mode of the
    run.
    """
    depth, T = len(net.blocks), net.num_tokens
    num_forced = int(np.ceil(coverage * T))
    if resolved.get("compile"):
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        torch._dynamo.config.recompile_limit = most_graphs(len(RATIOS) + 1)
        for block in net.blocks:
            block.compile(dynamic=False)
    precond, loss_fn = build_precond(config, net).train(), build_node(config, "diffusion.loss")()
    x = torch.zeros(batch_size, net.in_channels, net.input_size, net.input_size, device=device)
    labels = torch.zeros(batch_size, dtype=torch.int64, device=device) if net.num_classes else None

    def step(route: Route) -> None:
        net.routes = (route,)
        with torch.autocast(device.type, torch.bfloat16, enabled=resolved.get("mixed_precision") == "bf16"):
            loss_fn(precond, x, labels).mean().backward()
        net.zero_grad()

    windows = sorted(
        {(start, end) for start, end in product((1, 2, 3), (depth - 5, depth - 4, depth - 3)) if start < end}
    )
    # Time depends on how long a window is, not on where it is: each length is measured once.
    lengths = {end - start + 1: (start, end) for start, end in windows}
    steps = {"dense": lambda: step(Route(0.0, 2, depth - 4))}
    for (length, window), ratio in product(lengths.items(), RATIOS):
        route = Route(grow_ratio(ratio, T, num_forced), *window)
        steps[length, ratio] = lambda route=route: step(route)
    with tqdm(total=len(steps) * (repeats + 1), desc="time", unit="step") as bar:
        seconds = interleaved_seconds(
            {key: _counted(step, bar) for key, step in steps.items()}, device, repeats
        )
    slowdown = fp32_slowdown(net, device, bf16=resolved.get("mixed_precision") == "bf16")
    candidates = []
    for (start, end), ratio in product(windows, RATIOS):
        grown = grow_ratio(ratio, T, num_forced)
        net.routes = resolve_routes([Route(ratio, start, end)], depth)
        candidates.append(
            Candidate(
                Route(ratio, start, end),
                num_tokens_kept(T, grown),
                promised := cost_of(net, mask_coverage=coverage, fp32_slowdown=slowdown).predicted_speedup,
                speedup(seconds["dense"], seconds[end - start + 1, ratio]),
                median(seconds["dense"]) / promised,
                median(seconds[end - start + 1, ratio]),
                float(alike[start, end + 1]),
            )
        )
    return candidates


def _counted(function: Callable[[], None], bar: tqdm) -> Callable[[], None]:
    def run() -> None:
        function()
        bar.update()

    return run


def recommend(candidates: list[Candidate], depth: int) -> Candidate | None:
    """Return the candidate to take by the rule above; None where routes save too little to be worth it."""
    (published_route,) = resolve_routes([PUBLISHED], depth)
    (published,) = (c for c in candidates if c.route == published_route)
    eligible = [c for c in candidates if c.similarity >= published.similarity - LESS_ALIKE_BY]
    fastest = max(eligible, key=lambda c: c.measured_speedup)
    deviates = fastest.measured_speedup >= FASTER_BY * published.measured_speedup and not hardly_trained(
        candidates
    )
    best = fastest if deviates else published
    return best if best.measured_speedup >= MIN_SPEEDUP else None


def hardly_trained(candidates: list[Candidate]) -> bool:
    """Return whether all states are so alike that the similarity tells candidates not apart."""
    return min(c.similarity for c in candidates) > NEARLY_ALIKE


def override(route: Route, depth: int) -> str:
    """Return the route as it is given on the command line, its end counted from the last block as in
    `model/routes`.
    """
    fields = ", ".join(
        f"{k}: {v}" for k, v in asdict(replace(route, end_layer_idx=route.end_layer_idx - depth)).items()
    )
    return f"'model.routes=[{{{fields}}}]'"


def report(
    candidates: list[Candidate], best: Candidate | None, depth: int, coverage: float, routed: bool
) -> str:
    """Return the table and the recommendation as markdown; `routed` says that the run was trained with
    routes.
    """
    lines = [
        f"Candidate routes at depth {depth}"
        + (f", masks force up to {coverage:.0%} of the tokens to stay" if coverage else ""),
        "",
        "| blocks bypassed | ratio | tokens kept | predicted | measured | predicted ms | measured ms | "
        "similarity at end | |",
        "|---|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for c in sorted(candidates, key=lambda c: -c.measured_speedup):
        notes = [
            *(["published"] if (c.route,) == resolve_routes([PUBLISHED], depth) else []),
            *(["recommended"] if c == best else []),
        ]
        lines.append(
            f"| {c.route.start_layer_idx} to {c.route.end_layer_idx} | {c.route.selection_ratio} | "
            f"{c.num_kept} "
            f"| {c.predicted_speedup:.2f}x | {c.measured_speedup:.2f}x "
            f"| {1000 * c.predicted_sec:.1f} | {1000 * c.measured_sec:.1f} | {c.similarity:.3f} | "
            f"{', '.join(notes)} |"
        )
    if best is None:
        advice = f"No route makes a step {MIN_SPEEDUP:.2f}x as fast here: train the dense twin, model=dit."
    else:
        advice = f"Recommended: model=tread {override(best.route, depth)} run_name=NAME"
    dense_sec = candidates[0].predicted_sec * candidates[0].predicted_speedup
    notes = [
        f"Times are of a forward and backward pass; a dense one takes {1000 * dense_sec:.1f} ms. Windows of "
        "one length "
        "share one measurement: time does not depend on where a window lies.",
        "Similarity: mean cosine between the state in which tokens leave and the one in which they rejoin, "
        "without routes.",
        "Candidates are what published results allow: first block 1 to 3, last block depth-5 to depth-3, "
        "ratio up to 0.5.",
    ]
    if routed:
        notes.append(
            "This run was trained with routes, which makes the states of its own window alike: ask a dense "
            "run for an opinion "
            "that is free of it."
        )
    if hardly_trained(candidates):
        notes.append(
            "All states are nearly the same: this network has hardly been trained, and similarity says "
            "nothing yet. "
            "Ask again later."
        )
    return "\n".join([*lines, "", *notes, "", advice])


def draw(alike: np.ndarray, candidates: list[Candidate], best: Candidate | None, file: Path) -> None:
    """Draw the similarity of the layers, and speed-up against similarity for the candidates."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    image = left.imshow(alike, vmin=alike.min(), vmax=1, cmap="viridis", origin="lower")
    figure.colorbar(image, ax=left, label="cosine similarity of tokens")
    left.set(
        title="How alike the states are" + (" (red: the recommended window)" if best else ""),
        xlabel="before block (last: output)",
        ylabel="before block (last: output)",
    )
    for c in candidates:
        name, chosen = f"{c.route.start_layer_idx}..{c.route.end_layer_idx}", c == best
        color = "tab:red" if chosen else COLORS[c.route.selection_ratio]
        right.scatter(c.similarity, c.measured_speedup, color=color, zorder=3 if chosen else 2)
        below = c.route.selection_ratio == RATIOS[0]
        offset = (4, -11 if below else 4)
        right.annotate(
            name, (c.similarity, c.measured_speedup), xytext=offset, textcoords="offset points", fontsize=8
        )
    labels = {color: f"ratio {ratio}" for ratio, color in COLORS.items()} | (
        {"tab:red": "recommended"} if best else {}
    )
    for color, label in labels.items():
        right.scatter([], [], color=color, label=label)
    right.set(
        title="What each window gives",
        xlabel="similarity where tokens rejoin",
        ylabel="measured speed-up of a step",
    )
    right.margins(x=0.08)
    right.axhline(1, color="black", linewidth=0.8, linestyle=":")
    right.legend()
    if best:
        start, end = best.route.start_layer_idx, best.route.end_layer_idx + 1
        left.scatter(
            [start, end],
            [end, start],
            marker="s",
            s=120,
            facecolors="none",
            edgecolors="tab:red",
            linewidths=2,
        )
    figure.savefig(file, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    run_main(main)
