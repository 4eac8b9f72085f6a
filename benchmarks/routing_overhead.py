"""What routing itself costs: select, start and end against a whole routed training step, and other ways to do
the same.

    python -m benchmarks.routing_overhead

The setting is DiT-S/2 at 256 tokens, batch 64, one route. Each part is timed with its backward pass. The
record goes to benchmarks/results/.
"""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.results import measured, write_results
from builders.auto import resolve_auto
from diffusion import EDMLoss, EDMPrecond
from models import DiT
from routing import Route, end_route, sample_ids_keep, start_route, token_importance
from runtime.machine import keep_freed_memory, start_process
from runtime.provenance import environment
from training.ema import EMA
from training.speed import interleaved_seconds

N, T, D, K = 64, 256, 384, 128
REPEATS, STEP_REPEATS = 25, 3
LARGEST_SHARE = 0.02


def select_topk(device: torch.device) -> torch.Tensor:
    """The K largest of the noise by partial sort, then ascending."""
    return torch.rand(N, T, device=device).topk(K, dim=1, sorted=False).indices.sort(dim=1).values


def select_threshold(device: torch.device) -> torch.Tensor:
    """Where the noise lies below its K-th smallest value; `nonzero` gives ascending order, and waits for the
    device.
    """
    noise = torch.rand(N, T, device=device)
    return (noise <= noise.kthvalue(K, dim=1, keepdim=True).values).nonzero()[:, 1].view(N, K)


def select_multinomial(device: torch.device) -> torch.Tensor:
    """Draw without replacement, then ascending."""
    return torch.ones(1, T, device=device).expand(N, T).multinomial(K).sort(dim=1).values


def select_permutations(device: torch.device) -> torch.Tensor:
    """A permutation for each sample, in a loop, then ascending."""
    return torch.stack([torch.randperm(T, device=device)[:K] for _ in range(N)]).sort(dim=1).values


def select_by_importance(device: torch.device, x: torch.Tensor) -> torch.Tensor:
    """Half noise, half L1 norm."""
    return sample_ids_keep(N, T, 0.5, device=device, importance=token_importance(x), importance_weight=0.5)


def move(x: torch.Tensor, ids_keep: torch.Tensor) -> torch.Tensor:
    """Gather and scatter, as `routing` does."""
    return end_route(start_route(x, ids_keep), ids_keep, x)


def move_by_rows(x: torch.Tensor, ids_keep: torch.Tensor) -> torch.Tensor:
    """The tokens of all samples as rows of one table: index_select, index_copy."""
    rows = (ids_keep + torch.arange(N, device=x.device).unsqueeze(1) * T).flatten()
    routed = x.flatten(0, 1).index_select(0, rows)
    return x.flatten(0, 1).index_copy(0, rows, routed).view_as(x)


def move_by_advanced_index(x: torch.Tensor, ids_keep: torch.Tensor) -> torch.Tensor:
    """x[samples, ids] and index_put."""
    samples = torch.arange(N, device=x.device).unsqueeze(1)
    return x.index_put((samples, ids_keep), x[samples, ids_keep])


def move_by_shuffle(x: torch.Tensor, ids_keep: torch.Tensor) -> torch.Tensor:
    """Shuffle the whole sequence, cut it, join it and shuffle it back, as public routers do."""
    kept = torch.zeros(N, T, device=x.device).scatter(1, ids_keep, 1.0)
    shuffle = kept.argsort(dim=1, descending=True, stable=True).unsqueeze(-1)
    shuffled = x.gather(1, shuffle.expand_as(x))
    joined = torch.cat([shuffled[:, :K], shuffled[:, K:]], dim=1)
    return joined.gather(1, shuffle.argsort(dim=1).expand_as(x))


def main() -> None:
    """Measure, print and record."""
    device = start_process().device
    found = environment(device)
    settings = dict.fromkeys(("mixed_precision", "compile", "keep_freed_memory"), "auto")
    settings |= {"batch_size": N, "micro_batch_size": None, "num_workers": 0}
    resolved = resolve_auto({"train": settings}, {}, device, 1)  # as a run would
    if resolved["keep_freed_memory"]:
        keep_freed_memory()
    x = torch.randn(N, T, D, device=device)
    ids_keep = sample_ids_keep(N, T, 0.5, device=device)
    selections = {
        "argsort (routing.sample_ids_keep)": lambda: sample_ids_keep(N, T, 0.5, device=device),
        "importance 0.5 (routing.sample_ids_keep)": lambda: select_by_importance(device, x),
        "topk": lambda: select_topk(device),
        "threshold": lambda: select_threshold(device),
        "multinomial": lambda: select_multinomial(device),
        "loop of permutations": lambda: select_permutations(device),
    }
    moves = {
        "gather, scatter (routing)": move,
        "index_select, index_copy": move_by_rows,
        "advanced index, index_put": move_by_advanced_index,
        "shuffle and back": move_by_shuffle,
    }
    for name, function in moves.items():
        assert torch.equal(function(x, ids_keep), x), name
    seconds = {}
    for group in (
        selections,
        {name: with_backward(function, x, ids_keep) for name, function in moves.items()},
    ):
        seconds |= interleaved_seconds(group, device, REPEATS)
    step = training_step(device, resolved)
    seconds |= interleaved_seconds({"whole routed step": step}, device, STEP_REPEATS)
    rows = [measured(name, "ms", [1000 * t for t in times]) for name, times in seconds.items()]
    milliseconds = {row["what"]: row["median"] for row in rows}
    ours = [
        name
        for name in milliseconds
        if name.endswith("(routing.sample_ids_keep)") and "importance" not in name
    ]
    overhead = sum(milliseconds[name] for name in [*ours, "gather, scatter (routing)"])
    share = overhead / milliseconds["whole routed step"]
    print(f"| part, N={N} T={T} D={D}, forward and backward | milliseconds |\n|---|--:|")
    print("\n".join(f"| {name} | {value:.2f} |" for name, value in milliseconds.items()))
    verdict = "within" if share <= LARGEST_SHARE else "ABOVE"
    print(
        f"\nselect, start and end take {share:.2%} of a routed step, {verdict} the {LARGEST_SHARE:.0%} "
        f"allowed: {resolved}"
    )
    how = {key: resolved[key] for key in ("mixed_precision", "compile", "keep_freed_memory")}
    write_results("routing_overhead", [row | how for row in rows], found)


def with_backward(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], x: torch.Tensor, ids_keep: torch.Tensor
) -> Callable[[], None]:
    """Return a function that moves the tokens and takes the gradient."""
    tokens, gradient = x.clone().requires_grad_(), torch.randn_like(x)

    def run() -> None:
        function(tokens, ids_keep).backward(gradient)
        tokens.grad = None

    return run


def training_step(device: torch.device, resolved: dict[str, Any]) -> Callable[[], None]:
    """Return a whole step of DiT-S/2 with the published route: forward, backward, AdamW, average of the
    weights.
    """
    net = DiT(32, 2, 4, D, 12, 6, routes=[Route(0.5, 2, -4)]).to(device).train()
    precond, ema = EDMPrecond(net), EMA(net, decay=0.9999, warmup=False)
    for block in net.blocks if resolved["compile"] else ():
        block.compile(dynamic=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    latents, labels = (
        torch.randn(N, 4, 32, 32, device=device),
        torch.zeros(N, dtype=torch.int64, device=device),
    )
    skipped = torch.zeros((), device=device)

    def run() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=resolved["mixed_precision"] == "bf16"):
            EDMLoss()(precond, latents, labels).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update(net, skipped)

    return run


if __name__ == "__main__":
    main()
