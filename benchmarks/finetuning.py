"""Do routes pay in a fine-tune? All weights or LoRA, with and without routes, in the same time.

    python -m benchmarks.finetuning OUT           run it again to resume
    python -m benchmarks.finetuning OUT --tiny    a rehearsal at sizes that take seconds

A small Stable Diffusion 3 of diffusers is trained on digits, without routes. `examples.finetune` fine-tunes
it on the same digits rotated by 90 degrees. The learning rate is the one, of three, at which a dense
fine-tune of half the steps ends lowest on a separate seed, so that routes are added to a recipe that works.
First the steps are timed (run nothing else meanwhile). Then each arm gets the seconds of the dense one.
Scores are the dense loss of held-out digits, and `fid.py`'s for samples that are rotated back.
"""

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.processes import record_all, start_program, study_parser
from benchmarks.results import Record, Rows, markdown, spread
from data import digits
from examples import finetune
from runtime.launch import ALONE
from runtime.provenance import environment
from runtime.tables import aligned
from training.run_folder import RunFolder
from training.speed import interleaved_seconds

LRS = {"full": (1e-4, 3e-4, 1e-3), "lora": (1e-3, 3e-3, 1e-2)}
SEARCH_SEED, SEEDS = 100, (0, 1, 2)
RANK, NUM_HELD_OUT = 8, 256
REPEATS = 15
NUM_SAMPLES, NUM_STEPS = 500, 25
LOSS = "val_loss_dense"
DIVERGED = "no finite loss or gradient"  # in the error message of examples.finetune
SCORES = ("fd_pixel", "label_accuracy", "precision", "recall")
COLUMNS = {
    **dict.fromkeys(("kind", "arm", "seed", "lr", "step"), "{}"),
    "sec": "{:.0f}",
    **dict.fromkeys((LOSS, *SCORES), "{:.4f}"),
    "failed": "{}",
}


class Sizes(NamedTuple):
    """The sizes of the network and of the trainings."""

    width: int = 96
    pretraining_steps: int = 1500
    steps: int = 2000  # of a dense fine-tune
    batch_size: int = 16


# The ratio on blocks 2 to -2 of 8, and the fraction of the time at the end that is dense.
ARMS = {
    "dense": (0.0, 0.0),
    "ratio 0.25": (0.25, 0.0),
    "ratio 0.5": (0.5, 0.0),
    "ratio 0.25, dense end": (0.25, 0.2),
    "ratio 0.5, dense end": (0.5, 0.2),
}


def main() -> None:
    """Train, time, fine-tune and score everything that is not in the record, and print it."""
    request = study_parser("benchmarks.finetuning", __doc__).parse_args()
    torch.set_num_threads(1)  # as for programs that have one core
    os.environ["ACCELERATE_USE_CPU"] = "true"
    header = environment(torch.device("cpu")) | {"tiny": request.tiny}
    request.out.mkdir(parents=True, exist_ok=True)
    record = Record("finetuning_twins", request.out, header)
    sizes = Sizes(32, 4, 4, 4) if request.tiny else Sizes()
    work = Work(request.out.resolve(), sizes, record, request.jobs)
    work.prepare()
    for kind in LRS:
        work.do([(kind, "dense", SEARCH_SEED, lr) for lr in LRS[kind]])
        lr = work.chosen_lr(kind)
        work.do([(kind, arm, seed, lr) for seed in SEEDS for arm in ARMS])
    print(aligned(markdown([row for row in record.rows if row.get("fd_pixel")], COLUMNS)))
    sys.exit(record.done() != record.started())


@dataclass
class Work:
    """The fine-tunes in a folder."""

    out: Path
    sizes: Sizes
    record: Record
    jobs: int  # fine-tunes at once

    def prepare(self) -> None:
        """Write inputs, train the network to fine-tune, and time the arms, unless done already."""
        write_inputs(self.out)
        if not (self.out / "pretrained/model").exists():
            write_network(self.out / "untrained", self.sizes.width)
            steps = {"total_steps": self.sizes.pretraining_steps, "eval_every": self.sizes.steps}
            keys = {"train": "full", "lr": 1e-3, "batch_size": 32, "num_held_out": NUM_HELD_OUT, **steps}
            paths = {"transformer": self.out / "untrained", "inputs": self.out / "upright"}
            self._finetune("pretrained", paths | keys)
        if "times" not in self.record.done():
            self.record.add("times", self._time())

    def do(self, units: Sequence[tuple[str, str, int, float]]) -> None:
        """Fine-tune and score the units (kind, arm, seed, learning rate) that are not in the record."""
        settings = {
            f"{kind}: {arm}, lr {lr:g}, seed {seed}": (kind, arm, seed, lr) for kind, arm, seed, lr in units
        }
        calls = {name: partial(self._train, name, *unit) for name, unit in settings.items()}
        record_all(calls, self.record, self.jobs)

    def chosen_lr(self, kind: str) -> float:
        """Return the learning rate whose search ended with the lowest loss."""
        search = [row for row in self.record.rows if row.get("part") == "search" and row["kind"] == kind]
        ends = {float(row["lr"]): float(row[LOSS]) for row in search}
        if len(ends) < len(LRS[kind]) or min(ends.values()) == math.inf:
            raise SystemExit(f"the search of a learning rate failed: see {self.record.file}")
        return min(ends, key=ends.get)

    def steps_of(self, kind: str, arm: str, search: bool) -> tuple[int, int]:
        """Return the number of steps of an arm with routes, and of dense steps after them."""
        (ratio, end), dense = ARMS[arm], self.sizes.steps // 2 if search else self.sizes.steps
        last, faster = round(end * dense), self._seconds(kind, 0.0) / self._seconds(kind, ratio)
        return round((dense - last) * faster), last

    def _keys(self, kind: str, ratio: float) -> dict[str, Any]:
        route = {"selection_ratio": ratio, "start_layer_idx": 2, "end_layer_idx": -2}
        paths = {"transformer": f"{self.out}/pretrained/model", "inputs": f"{self.out}/rotated"}
        sizes = {"rank": RANK, "batch_size": self.sizes.batch_size, "num_held_out": NUM_HELD_OUT}
        return {**paths, "train": kind, **sizes, "routes": [route] if ratio else []}

    def _finetune(self, run: str, keys: dict[str, Any]) -> None:
        text = [f"{key}={value}".replace("'", "") for key, value in keys.items()]
        start_program("-m examples.finetune", self.out / f"{run}.log", f"output_dir={self.out / run}", *text)

    def _time(self) -> Rows:
        steps = {}
        for kind, ratio in product(LRS, sorted({ratio for ratio, _ in ARMS.values()})):
            # No log point within the timed steps.
            request = finetune.FinetuneConfig(**self._keys(kind, ratio), log_every=REPEATS + 1)
            folder, inputs = RunFolder(self.out / "timed"), finetune.open_inputs(request)
            trainer = finetune.build_trainer(request, *inputs, folder, ALONE)
            batches = trainer.batches.from_step(0)
            steps[kind, ratio] = lambda step=trainer.train_step, batches=batches: step(next(batches))
        seconds = interleaved_seconds(steps, torch.device("cpu"), REPEATS)
        return [{"kind": kind, "ratio": ratio, **spread(secs)} for (kind, ratio), secs in seconds.items()]

    def _seconds(self, kind: str, ratio: float) -> float:
        rows = [row for row in self.record.rows if row["setting"] == "times" and row["kind"] == kind]
        (ms,) = (float(row["ms"]) for row in rows if float(row["ratio"]) == ratio)
        return ms / 1000

    def _train(self, name: str, kind: str, arm: str, seed: int, lr: float) -> Rows:
        """Fine-tune once. Return a row for each evaluation; the last one has the scores of samples."""
        search, run = seed == SEARCH_SEED, name.replace(":", "").replace(",", "").replace(" ", "_")
        routed, last = self.steps_of(kind, arm, search)
        ratio, _ = ARMS[arm]
        dense_sec, routed_sec = self._seconds(kind, 0.0), self._seconds(kind, ratio)
        every = max(1, self.sizes.steps // 10)
        keys = {"lr": lr, "seed": seed, "total_steps": routed + last, "off_last_steps": last}
        keys |= {"eval_every": every, "save_every": every}
        part = "search" if search else "training"
        shared = {"kind": kind, "arm": arm, "seed": seed, "lr": f"{lr:g}", "part": part}
        try:
            self._finetune(run, self._keys(kind, ratio) | keys)
        except OSError:
            if search and DIVERGED in (self.out / f"{run}.log").read_text():
                return [{**shared, LOSS: math.inf}]
            raise
        rows = []
        for line in map(json.loads, (self.out / run / "metrics.jsonl").read_text().splitlines()):
            if LOSS in line:
                step, loss = line["step"], math.inf if line[LOSS] is None else line[LOSS]
                sec = min(step, routed) * routed_sec + max(0, step - routed) * dense_sec
                rows.append({**shared, "step": step, "sec": sec, LOSS: loss})
        return rows[-1:] if search else [*rows[:-1], rows[-1] | self._scores(kind, run)]

    def _scores(self, kind: str, run: str) -> dict[str, float]:
        base = self.out / "pretrained/model" if kind == "lora" else None
        samples, scores = self.out / run / "samples.npz", self.out / run / "scores.json"
        images, labels = drawn(self.out / run / "model", base)
        np.savez(samples, arr_0=images, arr_1=labels)
        keys = (f"samples={samples}", f"reference={self.out / 'digits'}", f"out={scores}", "overwrite=true")
        start_program("fid.py", self.out / f"{run}.log", "suite=digits", *keys)
        values = json.loads(scores.read_text())["values"]
        return {key: values[key] for key in SCORES}


def write_inputs(out: Path) -> None:
    """Write the digits, upright and rotated, in the format of `examples.finetune`."""
    from sklearn.datasets import load_digits

    digits(str(out / "digits"), 8, 1, 10)  # the reference of scores
    source = load_digits()
    latents = (source.images[:, None] / 8 - 1).astype(np.float32)  # (1797, 1, 8, 8) in [-1, 1]
    one_hot = np.eye(10, dtype=np.float32)[source.target]
    order = np.random.default_rng(0).permutation(len(latents))  # the first rows are held out
    for name, x in {"upright": latents, "rotated": np.rot90(latents, axes=(2, 3))}.items():
        (out / name).mkdir(exist_ok=True)
        for key, array in {"latents": x, "text": one_hot[:, None], "pooled": one_hot}.items():
            np.save(out / name / f"{key}.npy", np.ascontiguousarray(array[order]))


def write_network(folder: Path, width: int) -> None:
    """Write a Stable Diffusion 3 with random weights. Its tokens are pixels and its text is a class."""
    from diffusers import SD3Transformer2DModel

    torch.manual_seed(0)
    heads = {"num_layers": 8, "num_attention_heads": 4, "attention_head_dim": width // 4}
    inputs = {"in_channels": 1, "out_channels": 1, "joint_attention_dim": 10, "pooled_projection_dim": 10}
    sizes = {"patch_size": 1, "sample_size": 8, "pos_embed_max_size": 8, "caption_projection_dim": width}
    SD3Transformer2DModel(**heads, **inputs, **sizes).save_pretrained(folder)


@torch.no_grad()
def drawn(model: Path, base: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """Draw upright digits (N, 8, 8, 1) and their classes (N,).

    Args:
        base: the model that the adapters in `model` belong to; None: `model` has all weights.
    """
    from diffusers import AutoModel

    network = AutoModel.from_pretrained(str(base or model))
    if base:
        from peft import PeftModel

        network = PeftModel.from_pretrained(network, model)
    labels = np.arange(NUM_SAMPLES) % 10
    one_hot = torch.eye(10)[labels]
    inputs = finetune.Inputs(text=one_hot[:, None], pooled=one_hot)
    net = finetune.Net(network.eval(), finetune.FAMILIES["SD3Transformer2DModel"], ())
    x = torch.randn(NUM_SAMPLES, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for i in range(NUM_STEPS):
        # x_(t - dt) = x_t - dt v(x_t, t)
        t = torch.full((NUM_SAMPLES,), 1 - i / NUM_STEPS)
        x = x - net(x, t, inputs) / NUM_STEPS
    images = ((x + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    return upright(images), labels


def upright(images: Tensor) -> np.ndarray:
    """Rotate images (N, C, H, W) back: (N, H, W, C)."""
    return torch.rot90(images, k=-1, dims=(2, 3)).permute(0, 2, 3, 1).contiguous().numpy()


if __name__ == "__main__":
    main()
