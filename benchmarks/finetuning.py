"""What routing does to a fine-tune: the claims that circulate, on a DiT that was pretrained on digits.

    python -m benchmarks.finetuning
    python -m benchmarks.finetuning --steps 20 --seeds 1 --pretraining-steps 50

A dense DiT is trained on scikit-learn's digits, then fine-tuned on the same digits turned by 90 degrees, with
blocks 2 to depth-2 routed at several ratios or dense, all weights or LoRA. What is reported, as means over
seeds:

- rise: loss of the network with its routes over that without, on held-out entries, before the first step;
- recovered: the first step (of every fifth) after which the loss with routes is as low as the dense one was
before the first; - dense loss after equal steps, and after as many steps as fit into the time of the dense
fine-tune, over its loss there.

The time of a step is measured once for each arm, dense and routed in turn, without evaluation. LoRA needs
what is in requirements-finetune.txt. The record goes to benchmarks/results/.
"""

import argparse
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.results import write_results
from data import LatentDataset, StreamOrder, digits
from diffusion import EDMLoss, EDMPrecond
from models import DiT
from routing import Route
from runtime.machine import keep_freed_memory, start_process
from runtime.provenance import environment
from training.speed import interleaved_seconds, speedup

RATIOS = (0.1, 0.25, 0.35, 0.5, 0.7)
START, END = 2, -2
BATCH_SIZE, TIMED_REPEATS, EVALUATE_EVERY = 16, 15, 5
LEARNING_RATES = {"full": 1e-4, "lora": 1e-3}
RANK = 8


@dataclass(frozen=True)
class Outcome:
    """What a fine-tune came to.

    Args:
        before: the dense loss before the first step.
        rise: how many times higher the loss with routes was then.
        recovered_step: the first step after which it was as low as `before`; None: never.
        dense_losses: by the number of steps.
    """

    before: float
    rise: float
    recovered_step: int | None
    dense_losses: dict[int, float]


class Digits:
    """Training batches and held-out entries, turned by quarters of a circle."""

    def __init__(self, dataset: LatentDataset, quarters: int, seed: int):
        self.dataset, self.quarters = dataset, quarters
        share = {"start_step": 0, "rank": 0, "world_size": 1}
        self.order = StreamOrder(
            dataset.train_ids, seed=seed, batch_size=BATCH_SIZE, micro_batch_size=BATCH_SIZE, **share
        )

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._read(self.order.batch(step))

    def held_out(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for ids in np.array_split(self.dataset.held_out_ids, 3):
            yield self._read(ids)

    def _read(self, ids: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        stored, labels = self.dataset.read(ids)
        return self.dataset.manifest.to_latents(stored.float()).rot90(
            self.quarters, (-2, -1)
        ).contiguous(), labels


class Training:
    """A network on its way, as plain as can be: AdamW, no average of the weights, one process."""

    def __init__(self, net: DiT, data: Digits, lr: float, seed: int):
        self.net, self.data, self.seed, self.num_steps = net.train(), data, seed, 0
        self.precond, self.loss_fn = (
            EDMPrecond(net, sigma_data=0.5),
            EDMLoss(P_mean=-1.2, P_std=1.2, sigma_data=0.5),
        )
        self.optimizer = torch.optim.AdamW(
            [p for p in net.parameters() if p.requires_grad], lr=lr, weight_decay=0.0
        )

    def step(self) -> None:
        x, labels = self.data.batch(self.num_steps)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.num_steps)
        self.loss_fn(self.precond, x, labels, generator=generator).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1

    @torch.no_grad()
    def evaluate(self, selection_ratio: float) -> float:
        """Return the loss on the held-out entries, without dropped labels, with the same noise each time."""
        self.net.eval()
        losses = [
            self.loss_fn(
                self.precond,
                x,
                labels,
                generator=torch.Generator().manual_seed(i),
                selection_ratio=selection_ratio,
            )
            for i, (x, labels) in enumerate(self.data.held_out())
        ]
        self.net.train()
        return torch.cat(losses).double().mean().item()


def main() -> None:
    """Pretrain, fine-tune, print and record."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.finetuning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=200, help="of each dense fine-tune; default 200")
    parser.add_argument("--pretraining-steps", type=int, default=1000, help="default 1000")
    parser.add_argument("--seeds", type=int, default=3, help="default 3")
    arguments = parser.parse_args()
    device = start_process().device
    keep_freed_memory()
    found = environment(device)
    dataset = digits("latents/digits", input_size=8, in_channels=1, num_classes=10)
    pretrained = pretrain(dataset, arguments.pretraining_steps)
    arms = [(kind, ratio) for kind in LEARNING_RATES for ratio in RATIOS]
    faster = {arm: measure_speedup(pretrained, dataset, *arm) for arm in tqdm(arms, desc="time of a step")}
    rows = []
    with tqdm(total=arguments.seeds * (len(arms) + len(LEARNING_RATES)), desc="fine-tunes") as bar:
        for seed in range(arguments.seeds):
            for kind in LEARNING_RATES:
                dense = finetune(pretrained, dataset, kind, 0.0, seed, [arguments.steps])
                bar.update()
                for ratio in RATIOS:
                    in_time = math.ceil(arguments.steps * faster[kind, ratio])
                    outcome = finetune(
                        pretrained, dataset, kind, ratio, seed, sorted({arguments.steps, in_time})
                    )
                    bar.update()
                    rows.append(
                        {
                            "kind": kind,
                            "ratio": ratio,
                            "seed": seed,
                            "speedup": faster[kind, ratio],
                            "rise": outcome.rise,
                            "recovered_step": outcome.recovered_step,
                            "dense_loss_before": dense.before,
                            "dense_loss_of_dense": dense.dense_losses[arguments.steps],
                            "dense_loss_equal_steps": outcome.dense_losses[arguments.steps],
                            "steps_in_equal_time": in_time,
                            "dense_loss_equal_time": outcome.dense_losses[in_time],
                        }
                    )
    show(rows)
    write_results("finetuning", rows, found)


def pretrain(dataset: LatentDataset, num_steps: int) -> DiT:
    """Return a dense DiT trained on upright digits; it has routes, which are used only where a ratio is
    given.
    """
    torch.manual_seed(0)
    net = DiT(8, 1, 1, hidden_size=128, depth=8, num_heads=4, num_classes=10)
    training = Training(net, Digits(dataset, 0, seed=0), lr=1e-3, seed=0)
    for _ in tqdm(range(num_steps), desc="pretraining"):
        training.step()
    return net


def routed(pretrained: DiT, kind: str, ratio: float, seed: int) -> DiT:
    """Return a copy of the network with a route, all its weights to train or LoRA beside them."""
    routes = [Route(ratio, START, END)] if ratio else []
    net = DiT(8, 1, 1, hidden_size=128, depth=8, num_heads=4, num_classes=10, routes=routes)
    net.load_state_dict(copy.deepcopy(pretrained.state_dict()))
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(seed)
        get_peft_model(
            net, LoraConfig(r=RANK, target_modules=["attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2"])
        )
    return net


def measure_speedup(pretrained: DiT, dataset: LatentDataset, kind: str, ratio: float) -> float:
    """Return how much faster a step is with the route than without."""
    data = Digits(dataset, 1, seed=0)
    steps: dict[float, Callable[[], None]] = {
        r: Training(routed(pretrained, kind, r, 0), data, LEARNING_RATES[kind], 0).step for r in (0.0, ratio)
    }
    times = interleaved_seconds(steps, torch.device("cpu"), TIMED_REPEATS)
    return speedup(times[0.0], times[ratio])


def finetune(
    pretrained: DiT, dataset: LatentDataset, kind: str, ratio: float, seed: int, evaluate_at: Sequence[int]
) -> Outcome:
    """Train a copy, dense at ratio 0, and evaluate it after so many steps."""
    training = Training(
        routed(pretrained, kind, ratio, seed), Digits(dataset, 1, seed), LEARNING_RATES[kind], seed
    )
    before = training.evaluate(0.0)
    rise = training.evaluate(ratio) / before
    recovered_step, dense_losses = (None if ratio else 0), {}
    for step in range(1, max(evaluate_at) + 1):
        training.step()
        if recovered_step is None and step % EVALUATE_EVERY == 0 and training.evaluate(ratio) <= before:
            recovered_step = step
        if step in evaluate_at:
            dense_losses[step] = training.evaluate(0.0)
    return Outcome(before, rise, recovered_step, dense_losses)


def show(rows: list[dict[str, Any]]) -> None:
    """Print the means over seeds."""
    print(
        "| | ratio | step | rise of the loss | recovered after | dense loss, equal steps | dense loss, equal "
        "time |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|")
    for kind in LEARNING_RATES:
        for ratio in RATIOS:
            arm = [row for row in rows if (row["kind"], row["ratio"]) == (kind, ratio)]
            recovered = [row["recovered_step"] for row in arm]
            after = "not all" if None in recovered else f"{mean(recovered):.0f} steps"
            over_dense = [
                [row[key] / row["dense_loss_of_dense"] - 1 for row in arm]
                for key in ("dense_loss_equal_steps", "dense_loss_equal_time")
            ]
            equal = " | ".join(f"{mean(x):+.1%} ({min(x):+.1%} to {max(x):+.1%})" for x in over_dense)
            rise = mean(row["rise"] for row in arm) - 1
            print(f"| {kind} | {ratio:g} | {arm[0]['speedup']:.2f}x | {rise:+.1%} | {after} | {equal} |")


if __name__ == "__main__":
    main()
