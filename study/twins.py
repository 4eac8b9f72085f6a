"""The twin study: networks that differ in one thing, over seeds, each at the learning rate that suits it.

    python -m study.twins OUT                                all studies; the same command goes on
    python -m study.twins OUT digits --arms dense routed     some
    python -m study.twins OUT digits --arms routed --change model.mlp_ratio=3
                                                                  a changed arm, beside those that are there
    python -m study.twins OUT --time                         the time of a step of each arm: alone!

Of each arm a short training at each of three learning rates chooses the one with the lowest held-out dense
loss, on a seed of its own; then the seeds are trained by train.py, and samples scored by it and fid.py. OUT
gets a record of each study, written after every training, and the runs; what the record of another machine,
or torch, has there is not trained again. Everything runs on the CPU, a training on each core: seconds are
steps times the time of a step that is measured with nothing beside it.
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

# At 4e-3 a search of half the steps looks as good, and one seed in a few never recovers from its start.
LRS, SEARCH_SEED = (5e-4, 1e-3, 2e-3), 100
CFG = ("guidance=cfg guidance_scale=1.25", "guidance=cfg guidance_scale=1.75")
SPARSE = "guidance=sparse guidance_scale=1.5 guidance.strong_ratio=0.5 guidance.weak_ratio=0.9"
GUIDED = {"routed": (*CFG, SPARSE)}  # in the end; all other arms: CFG
UNGUIDED, NUM_SAMPLES, NUM_STEPS = "none", 500, 12
TURNS = 15  # of a step that is timed
LOSS = "val_loss_dense_ema"
SCORES = (LOSS, "val_loss_optimal", "fd_pixel", "fd_classifier", "label_accuracy", "precision", "recall")
TINY_STEPS = 4
ROUTED = ("model=tread",)


def route(changed: str) -> tuple[str, ...]:
    """The overrides of the published route with one of its keys changed."""
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
LONGER = ("routed, equal FLOPs",)  # for as many steps as cost what the dense arm's do


@dataclass(frozen=True)
class Study:
    """A task, the arms that are trained on it, and for how long.

    Args:
        task: further overrides of all arms.
        samples: True to draw and score samples.
    """

    data: str
    task: tuple[str, ...]
    arms: Mapping[str, tuple[str, ...]]
    steps: int
    samples: bool = False


def series(key: str, values: Iterable[Any]) -> dict[str, tuple[str, ...]]:
    """Dense and routed arms at several values of a key."""
    return {f"{arm}, {key}={v}": (*own, f"model.{key}={v}") for v in values for arm, own in TWINS.items()}


def sampled(tiny: bool) -> tuple[str, str]:
    """How many samples are scored, and in how many steps they are drawn."""
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
    """The request of the command line."""
    parser = study_parser("study.twins", __doc__)
    parser.add_argument(
        "studies", nargs="*", metavar="study", help=f"some of {', '.join(STUDIES)}; none: all"
    )
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="those of them that a study has; none: all")
    parser.add_argument("--change", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of all arms")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="default: 0 1 2")
    parser.add_argument("--time", action="store_true", help="time the steps of the arms instead")
    asked = parser.parse_intermixed_args(arguments)
    asked.studies = asked.studies or list(STUDIES)
    known = {arm for name in asked.studies if name in STUDIES for arm in STUDIES[name].arms}
    for given, choices in ((asked.studies, STUDIES), (asked.arms or (), known)):
        if unknown := [each for each in given if each not in choices]:
            parser.error(f"{', '.join(unknown)}: choose from {', '.join(choices)}")
    return asked


def main() -> None:
    """Train and score what is not in the records, and print them."""
    asked = parse()
    asked.out.mkdir(parents=True, exist_ok=True)
    about = environment(torch.device("cpu")) | {"tiny": asked.tiny}
    complete = True
    for name in asked.studies:
        study, arms = STUDIES[name], arms_of(STUDIES[name], asked.arms, asked.change)
        if asked.time:
            record = Record("twins_steps", asked.out, about)
            record.add(name, time_steps(study, arms, asked.tiny))
        else:
            record = Record(f"twins_{name}", asked.out, about)
            complete &= Work(name, study, arms, asked, record).done()
        print(f"\n{name}\n{aligned(markdown(record.rows, COLUMNS | {'ms': '{:.1f}'}))}", flush=True)
    sys.exit(not complete)


def arms_of(study: Study, chosen: Sequence[str] | None, change: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Overrides by name of arm; a changed arm has the change in its name."""
    arms = {name: own for name, own in study.arms.items() if chosen is None or name in chosen}
    return {", ".join([name, *change]): (*own, *change) for name, own in arms.items()}


class Work:
    """What a study asks: first the search, then the seeds, all arms of one seed before those of the next."""

    def __init__(
        self,
        name: str,
        study: Study,
        arms: Mapping[str, Sequence[str]],
        asked: argparse.Namespace,
        record: Record,
    ):
        self.name, self.study, self.arms, self.asked, self.record = name, study, arms, asked, record
        self.steps = TINY_STEPS if asked.tiny else study.steps
        # Here: what composes a configuration cannot be run by two threads.
        self.factors = {arm: self._factor(arm) for arm in arms}

    def done(self) -> bool:
        """Do it; True if nothing failed."""
        self._do("searches", [(arm, SEARCH_SEED, lr) for arm in self.arms for lr in LRS])
        chosen = {arm: chosen_lr([*self._of_others(), *self.record.rows], arm) for arm in self.arms}
        seeds = [(arm, seed, chosen[arm]) for seed in self.asked.seeds for arm in self.arms]
        self._do("trainings", [unit for unit in seeds if unit[2]])
        return all(chosen.values()) and self.record.started() <= self._done()

    def _done(self) -> set[str]:
        return self.record.done() | {row["setting"] for row in self._of_others()}

    def _of_others(self) -> Rows:
        files = {*self.asked.out.glob(f"twins_{self.name}_*.csv")} - {self.record.file}
        same = [file for file in sorted(files) if read_environment(file)["tiny"] == str(self.asked.tiny)]
        return [row for file in same for row in read_results(file) if not row.get("failed")]

    def _do(self, what: str, units: Sequence[tuple[str, int, float]]) -> None:
        calls, done = {self.setting(*unit): partial(self._train, *unit) for unit in units}, self._done()
        calls = {setting: call for setting, call in calls.items() if setting not in done}
        recorded = f"{len(units) - len(calls)} more are recorded"
        print(f"{self.name}: {len(calls)} {what}, {recorded}; logs are in {self.asked.out}", flush=True)
        record_all(calls, self.record, self.asked.jobs)

    def _factor(self, arm: str) -> float:
        if not arm.startswith(LONGER):  # changed ones, too
            return 1.0
        task = (f"data={self.study.data}", *self.study.task)
        return gflop_a_step((*task, *TWINS["dense"])) / gflop_a_step((*task, *self.arms[arm]))

    def setting(self, arm: str, seed: int, lr: float) -> str:
        """The name of a training."""
        return f"{self.name}: {arm}, lr {lr:g}, seed {seed}"

    def _train(self, arm: str, seed: int, lr: float) -> Rows:
        """Train once: a row for each evaluation, and for each scale of guidance in the end."""
        out, search = self.asked.out.resolve(), seed == SEARCH_SEED
        run = out / named(self.setting(arm, seed, lr))
        own = [f"data={self.study.data}", *self.study.task, *self.arms[arm], f"optimizer.lr={lr}"]
        own += TINY if self.asked.tiny else ()
        own += [f"data.path={out / self.study.data}"] if self.study.samples else []  # a mixture has no file
        scored = self.study.samples and not search
        own += [f"evaluation={self.study.data}", *sampled(self.asked.tiny)] if scored else []
        steps = round(self.factors[arm] * (self.steps // 2 if search else self.steps))
        every = steps // (1 if search else 2 if scored else 4)
        own += [f"seed={seed}", f"output_dir={run}", f"train.total_steps={steps}", "train.sample_every=null"]
        own += [f"train.eval_every={every}", f"train.save_every={every}"]
        start_program("train.py", Path(f"{run}.log"), *own)
        same = {"arm": arm, "seed": seed, "lr": f"{lr:g}", "part": "search" if search else "training"}
        rows = [{**same, **row} for row in evaluations_of(run)]
        if scored:
            last = {**same, **{key: rows[-1][key] for key in ("step", "gflop")}}
            rows += [{**last, **self._guided(run, guidance)} for guidance in GUIDED.get(arm, CFG)]
        return rows

    def _guided(self, run: Path, guidance: str) -> dict[str, Any]:
        out, data = run / "scores" / f"{named(guidance)}.json", self.study.data
        if not out.exists():
            drawn = (*guidance.split(), *(each.partition(".")[2] for each in sampled(self.asked.tiny)))
            judged = (f"suite={data}", f"reference={run.parent / data}", f"out={out}")
            start_program("fid.py", Path(f"{run}.log"), f"run={run}", *judged, *drawn)
        return {"guidance": guidance, **json.loads(out.read_text())["values"]}


def named(text: str) -> str:
    """A text as the name of a file, which may stand in an override of Hydra."""
    return re.sub(r"[^\w.-]+", "_", text)


def evaluations_of(run: Path) -> Rows:
    """Step, cost, scores and the mean loss of training since the last one, of each evaluation."""
    rows, losses, read = [], [], Run(RunFolder(run))
    for line in read.lines:
        if line.get("loss") is not None:
            losses.append(line["loss"])
        if LOSS in line:
            spent = {"step": line["step"], "gflop": 1000 * read.spent("TFLOPs", line["step"])}
            scores = {key: value for key, value in line.items() if key.startswith(SCORES)}
            rows.append({**spent, "guidance": UNGUIDED, "train_loss": mean(losses), **scores})
            losses.clear()
    return rows


def chosen_lr(rows: Sequence[Mapping[str, Any]], arm: str) -> float | None:
    """The learning rate whose search ended with the lowest held-out loss; None if some failed."""
    found = {
        float(row["lr"]): float(row[LOSS])
        for row in rows
        if (row.get("arm"), row.get("part")) == (arm, "search") and row[LOSS] and float(row["lr"]) in LRS
    }
    return min(found, key=found.get) if len(found) == len(LRS) else None


def gflop_a_step(overrides: Sequence[str]) -> float:
    """The cost of a training step, by the cost model."""
    experiment = compose(overrides)
    return experiment.train.batch_size * cost_of(experiment.meta_net).routed_training_flops / 1e9


def time_steps(study: Study, arms: Mapping[str, Sequence[str]], tiny: bool) -> Rows:
    """Time a step of each arm in turn, each in a process of its own."""
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        task = [f"data={study.data}", *study.task]
        task += [f"data.path={folder / 'latents'}"] if study.samples else []
        workers = {}
        for name, own in arms.items():
            overrides = (*task, *own, *(TINY if tiny else ()), *QUIET)
            workers[name] = stack.enter_context(Worker(ours, folder, overrides))
            workers[name].ask("warm up")
        seconds = take_turns(workers, "step", TURNS)
    return [{"arm": name, **spread(found)} for name, found in seconds.items()]


if __name__ == "__main__":
    main()
