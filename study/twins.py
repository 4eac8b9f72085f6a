"""The twin study: networks that differ in one thing, over seeds, each at its best learning rate.

    python -m study.twins OUT                                all studies; run it again to resume
    python -m study.twins OUT digits --arms dense routed     some arms of one study
    python -m study.twins OUT digits --arms routed --change model.mlp_ratio=3
                                                             a changed arm, in addition to the recorded ones
    python -m study.twins OUT --time                         the time of a step of each arm; run nothing else

For each arm, short trainings at three learning rates, on a separate seed, choose the rate with the lowest
held-out dense loss. Then train.py trains the seeds, and train.py and fid.py score samples. OUT gets the runs
and a record of each study, written after every training. Arms in a record of another machine or torch version
are not trained again. Everything runs on the CPU, one training per core. Seconds are steps times the time of
a step, which `--time` measures alone.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.processes import Worker, record_all, start_program, study_parser, take_turns
from benchmarks.results import Record, Rows, markdown, read_environment, read_results, spread
from benchmarks.runs import QUIET, compose
from benchmarks.train_step import ours
from models import cost_of
from reports.runs import Run
from runtime.provenance import environment
from runtime.tables import aligned
from training.run_folder import RunFolder

# 4e-3 looks as good in a search of half the steps, but a seed did not recover from its start.
LRS, SEARCH_SEED = (5e-4, 1e-3, 2e-3), 100
CFG = ("guidance=cfg guidance_scale=1.25", "guidance=cfg guidance_scale=1.75")
SPARSE = "guidance=sparse guidance_scale=1.5 guidance.strong_ratio=0.5 guidance.weak_ratio=0.9"
GUIDED = {"routed": (*CFG, SPARSE)}  # guidances of the final scores; other arms: CFG
UNGUIDED, NUM_SAMPLES, NUM_STEPS = "none", 500, 12
TURNS = 15  # of a timed step
LOSS = "val_loss_dense_ema"
SCORES = (LOSS, "val_loss_optimal", "fd_pixel", "fd_classifier", "label_accuracy", "precision", "recall")
TINY_STEPS = 4
ROUTED = ("model=tread",)


def route(changed: str) -> tuple[str, ...]:
    """Return the overrides of the published route with one changed key."""
    return (*ROUTED, f"model.routes.0.{changed}")


TWINS = {"dense": ("model=dit",), "routed": ROUTED}
ARMS = TWINS | {
    "no removal": (*ROUTED, "model.removal=false"),
    "ratio 0.25": route("selection_ratio=0.25"),
    "ratio 0.75": route("selection_ratio=0.75"),
    "late end": route("end_layer_idx=-2"),
    "early start": route("start_layer_idx=0"),
    "sprint": ("model=sprint",),
    "importance": (*ROUTED, "model/router=norm"),
    "dense end": (*ROUTED, "routing.off_last_steps=200"),
    "routed, equal FLOPs": ROUTED,
}
LONGER = ("routed, equal FLOPs",)  # trained for the FLOPs of the dense arm


@dataclass(frozen=True)
class Study:
    """A task, its arms and its number of steps.

    Args:
        task: overrides of all arms.
        samples: True to draw and score samples.
    """

    data: str
    task: tuple[str, ...]
    arms: Mapping[str, tuple[str, ...]]
    steps: int
    samples: bool = False


def series(key: str, values: Iterable[Any]) -> dict[str, tuple[str, ...]]:
    """Return dense and routed arms at several values of a key."""
    return {f"{arm}, {key}={v}": (*keys, f"model.{key}={v}") for v in values for arm, keys in TWINS.items()}


def sampled(tiny: bool) -> tuple[str, str]:
    """Return the overrides for the number of scored samples and their steps."""
    num_samples, num_steps = (20, 2) if tiny else (NUM_SAMPLES, NUM_STEPS)
    return f"evaluation.num_samples={num_samples}", f"sampler.num_steps={num_steps}"


STUDIES = {
    "digits": Study("digits", (), ARMS, 1000, samples=True),
    "mixture": Study("mixture", (), ARMS, 2000),
    "glyphs": Study(
        "glyphs",
        (
            *("data.num_images=32768", "model/size=tiny", "model.patch_size=2", "train.batch_size=32"),
            *("train.num_workers=0", "train.log_every=50", "optimizer.betas=[0.9,0.99]", "ema.decay=0.999"),
        ),
        ARMS,
        1000,
        samples=True,
    ),
    "depth": Study("mixture", (), series("depth", (6, 12, 16)), 2000),
    "width": Study("mixture", (), series("hidden_size", (64, 192)), 2000),
    "tokens": Study("mixture", ("data.input_size=16",), series("patch_size", (4, 2, 1)), 2000),
}
TINY = ("model.hidden_size=32", "train.batch_size=4", "train.log_every=1", "train.compile=false")
COLUMNS = {
    "arm": "{}",
    "seed": "{}",
    "lr": "{}",
    "step": "{}",
    "gflop": "{:.0f}",
    "guidance": "{}",
    "train_loss": "{:.4f}",
    **dict.fromkeys(SCORES, "{:.4f}"),
    "failed": "{}",
}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = study_parser("study.twins", __doc__)
    parser.add_argument("studies", nargs="*", metavar="study", help=f"{', '.join(STUDIES)} (default: all)")
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="arms of these studies (default: all)")
    parser.add_argument("--change", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of all arms")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--time", action="store_true", help="time the steps of the arms instead of training")
    request = parser.parse_intermixed_args(arguments)
    request.studies = request.studies or list(STUDIES)
    arms = {arm for name in request.studies if name in STUDIES for arm in STUDIES[name].arms}
    for names, choices in ((request.studies, STUDIES), (request.arms or (), arms)):
        if unknown := [name for name in names if name not in choices]:
            parser.error(f"{', '.join(unknown)}: must be one of {', '.join(choices)}")
    return request


def main() -> None:
    """Train and score everything that is not in the records, and print the records."""
    request = parse()
    request.out.mkdir(parents=True, exist_ok=True)
    header = environment(torch.device("cpu")) | {"tiny": request.tiny}
    complete = True
    for name in request.studies:
        study, arms = STUDIES[name], arms_of(STUDIES[name], request.arms, request.change)
        if request.time:
            record = Record("twins_steps", request.out, header)
            record.add(name, time_steps(study, arms, request.tiny))
        else:
            record = Record(f"twins_{name}", request.out, header)
            complete &= Work(name, study, arms, request, record).run()
        print(f"\n{name}\n{aligned(markdown(record.rows, COLUMNS | {'ms': '{:.1f}'}))}", flush=True)
    sys.exit(not complete)


def arms_of(study: Study, chosen: Sequence[str] | None, change: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the overrides of the chosen arms by name. The name of a changed arm contains the change."""
    arms = {name: keys for name, keys in study.arms.items() if chosen is None or name in chosen}
    return {", ".join([name, *change]): (*keys, *change) for name, keys in arms.items()}


class Work:
    """The trainings of a study: first the search, then all arms of one seed after the other."""

    def __init__(
        self,
        name: str,
        study: Study,
        arms: Mapping[str, Sequence[str]],
        request: argparse.Namespace,
        record: Record,
    ):
        self.name, self.study, self.arms, self.request, self.record = name, study, arms, request, record
        self.steps = TINY_STEPS if request.tiny else study.steps
        # Computed here, because two threads cannot compose a configuration at once.
        self.factors = {arm: self._factor(arm) for arm in arms}

    def run(self) -> bool:
        """Run the trainings that are not recorded yet. True if nothing failed."""
        self._run("searches", [(arm, SEARCH_SEED, lr) for arm in self.arms for lr in LRS])
        rates = {arm: chosen_lr([*self._other_rows(), *self.record.rows], arm) for arm in self.arms}
        seeds = [(arm, seed, rates[arm]) for seed in self.request.seeds for arm in self.arms]
        self._run("trainings", [unit for unit in seeds if unit[2]])
        return all(rates.values()) and self.record.started() <= self._done()

    def _done(self) -> set[str]:
        return self.record.done() | {row["setting"] for row in self._other_rows()}

    def _other_rows(self) -> Rows:  # of other machines
        files = {*self.request.out.glob(f"twins_{self.name}_*.csv")} - {self.record.file}
        same = [file for file in sorted(files) if read_environment(file)["tiny"] == str(self.request.tiny)]
        return [row for file in same for row in read_results(file) if not row.get("failed")]

    def _run(self, kind: str, units: Sequence[tuple[str, int, float]]) -> None:
        calls, done = {self.setting(*unit): partial(self._train, *unit) for unit in units}, self._done()
        calls = {setting: call for setting, call in calls.items() if setting not in done}
        recorded = f"{len(units) - len(calls)} already recorded"
        print(f"{self.name}: {len(calls)} {kind}, {recorded}; logs: {self.request.out}", flush=True)
        record_all(calls, self.record, self.request.jobs)

    def _factor(self, arm: str) -> float:
        if not arm.startswith(LONGER):  # includes changed arms
            return 1.0
        task = (f"data={self.study.data}", *self.study.task)
        return gflop_a_step((*task, *TWINS["dense"])) / gflop_a_step((*task, *self.arms[arm]))

    def setting(self, arm: str, seed: int, lr: float) -> str:
        """Return the name of a training."""
        return f"{self.name}: {arm}, lr {lr:g}, seed {seed}"

    def _train(self, arm: str, seed: int, lr: float) -> Rows:
        """Train once. Return a row for each evaluation, and for each guidance of the final scores."""
        out, search = self.request.out.resolve(), seed == SEARCH_SEED
        run = out / file_name(self.setting(arm, seed, lr))
        keys = [f"data={self.study.data}", *self.study.task, *self.arms[arm], f"optimizer.lr={lr}"]
        keys += TINY if self.request.tiny else ()
        keys += [f"data.path={out / self.study.data}"] if self.study.samples else []  # a mixture has no file
        scored = self.study.samples and not search
        keys += [f"evaluation={self.study.data}", *sampled(self.request.tiny)] if scored else []
        steps = round(self.factors[arm] * (self.steps // 2 if search else self.steps))
        every = steps // (1 if search else 2 if scored else 4)
        keys += [f"seed={seed}", f"output_dir={run}", f"train.total_steps={steps}", "train.sample_every=null"]
        keys += [f"train.eval_every={every}", f"train.save_every={every}"]
        start_program("train.py", Path(f"{run}.log"), *keys)
        shared = {"arm": arm, "seed": seed, "lr": f"{lr:g}", "part": "search" if search else "training"}
        rows = [{**shared, **row} for row in evaluations_of(run)]
        if scored:
            last = {**shared, **{key: rows[-1][key] for key in ("step", "gflop")}}
            rows += [{**last, **self._guided(run, guidance)} for guidance in GUIDED.get(arm, CFG)]
        return rows

    def _guided(self, run: Path, guidance: str) -> dict[str, Any]:
        out, data = run / "scores" / f"{file_name(guidance)}.json", self.study.data
        if not out.exists():
            sampling = (*guidance.split(), *(key.partition(".")[2] for key in sampled(self.request.tiny)))
            scoring = (f"suite={data}", f"reference={run.parent / data}", f"out={out}")
            start_program("fid.py", Path(f"{run}.log"), f"run={run}", *scoring, *sampling)
        return {"guidance": guidance, **json.loads(out.read_text())["values"]}


def file_name(text: str) -> str:
    """Turn a text into a file name that can be part of a Hydra override."""
    return re.sub(r"[^\w.-]+", "_", text)


def evaluations_of(run: Path) -> Rows:
    """Return step, cost, scores and the mean training loss since the previous one, for each evaluation."""
    rows, losses, record = [], [], Run(RunFolder(run))
    for line in record.lines:
        if line.get("loss") is not None:
            losses.append(line["loss"])
        if LOSS in line:
            spent = {"step": line["step"], "gflop": 1000 * record.spent("TFLOPs", line["step"])}
            scores = {key: value for key, value in line.items() if key.startswith(SCORES)}
            rows.append({**spent, "guidance": UNGUIDED, "train_loss": mean(losses), **scores})
            losses.clear()
    return rows


def chosen_lr(rows: Sequence[Mapping[str, Any]], arm: str) -> float | None:
    """Return the learning rate whose search ended with the lowest held-out loss; None if a search failed."""
    losses = {
        float(row["lr"]): float(row[LOSS])
        for row in rows
        if (row.get("arm"), row.get("part")) == (arm, "search") and row[LOSS] and float(row["lr"]) in LRS
    }
    return min(losses, key=losses.get) if len(losses) == len(LRS) else None


def gflop_a_step(overrides: Sequence[str]) -> float:
    """Return the cost of a training step by the cost model."""
    experiment = compose(overrides)
    return experiment.train.batch_size * cost_of(experiment.meta_net).routed_training_flops / 1e9


def time_steps(study: Study, arms: Mapping[str, Sequence[str]], tiny: bool) -> Rows:
    """Time a step of each arm in turn, each in a separate process."""
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        task = [f"data={study.data}", *study.task]
        task += [f"data.path={folder / 'latents'}"] if study.samples else []
        workers = {}
        for name, keys in arms.items():
            overrides = (*task, *keys, *(TINY if tiny else ()), *QUIET)
            workers[name] = stack.enter_context(Worker(ours, folder, overrides))
            workers[name].ask("warm up")
        seconds = take_turns(workers, "step", TURNS)
    return [{"arm": name, **spread(times)} for name, times in seconds.items()]


if __name__ == "__main__":
    main()
