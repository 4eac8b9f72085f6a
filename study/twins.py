"""The twin study: networks that differ in one thing, over seeds, each at its best learning rate.

    python -m study.twins OUT                                all studies of a CPU; run it again to resume
    python -m study.twins OUT digits-200 --arms dense routed some arms of one study
    python -m study.twins OUT digits-200 --arms routed --change model.mlp_ratio=3
                                                             a changed arm, in addition to the recorded ones

For each arm, or the one whose rate it shares, short trainings on separate seeds search the learning rate with
the lowest held-out dense loss: they double or halve the rate until the best one has a worse neighbour on both
sides. Then train.py trains the seeds, and fid.py scores samples of chosen checkpoints. OUT gets the runs and
a record of each study, written after every training. Arms in a record of another machine or torch version are
not trained again. `--jobs` trainings run at once, on the GPU if there is one. Studies with gpu=True need one.
"""

import argparse
import math
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.processes import program_parser, record_all, start_program
from benchmarks.results import Record, Rows, markdown, read_environment, read_results
from benchmarks.runs import compose
from models import cost_of
from reports.runs import Run
from runtime.config import run_main
from runtime.files import read_json
from runtime.machine import device_type
from runtime.provenance import environment
from runtime.tables import aligned
from study.density import density_scores
from study.encoder import STEPS, write_features
from training.run_folder import RunFolder

UNGUIDED, NUM_SAMPLES, NUM_STEPS, NUM_NOISES = "none", 2000, 40, 3
MAX_LR = 0.1
LOSS = "val_loss_dense_ema"
SCORES = (LOSS, "val_loss_optimal", "excess", "sharpening", "fd_pixel", "fd_pixel_held_out", "memorised")
SCORES += ("fd_classifier", "fd_classifier_held_out", "fd_cells", "fd_cells_held_out")
SCORES += ("label_accuracy", "accuracy", "perplexity", "precision", "recall")
NOT_FINITE = "no finite loss or gradient"  # in the log of a training that diverged
ROUTED = ("model=tread",)
TWINS = {"dense": ("model=dit",), "routed": ROUTED}
NO_REMOVAL = {"no removal": (*ROUTED, "model.window=context")}
# separate: all tokens enter the window, as two sequences that cannot see each other.
MECHANISM = {"separate": (*ROUTED, "model.window=separate")}
MECHANISM |= {"self logit": (*ROUTED, "model/block=self_logit")}
# Half of the tokens enter no block and have no loss.
TOKEN_DROP = {"token drop": (*ROUTED, "train.kept_tokens_only=true")}
TOKEN_DROP["token drop"] += ("model.routes.0.start_layer_idx=0", "model.routes.0.end_layer_idx=-1")


@dataclass(frozen=True)
class Study:
    """A task, its arms and its trainings.

    Args:
        task: overrides of all arms.
        lr: a learning rate from which the search starts.
        search_seeds: of the search; (): train at `lr`, without a search.
        lr_of: arms that are trained at the best rate of another arm.
        evaluations: number of evaluations of the held-out loss, each with a checkpoint.
        scales: of classifier-free guidance, for samples of the last checkpoint; (): none.
        noises: number of sets of noise for samples of the best, last and equal-cost checkpoints.
        scored: keys of fid.py by arm, each a sweep of the last checkpoint.
        num_samples, num_steps: of each set of samples.
        features: prepare the data with features of a small encoder (study/encoder.py).
    """

    data: str
    task: tuple[str, ...]
    arms: Mapping[str, tuple[str, ...]]
    steps: int
    lr: float
    search_steps: int = 0
    search_seeds: tuple[int, ...] = (100, 101, 102)
    lr_of: Mapping[str, str] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0, 1, 2)
    evaluations: int = 20
    scales: tuple[float, ...] = ()
    noises: int = NUM_NOISES
    gpu: bool = False
    scored: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    num_samples: int = NUM_SAMPLES
    num_steps: int = NUM_STEPS
    features: bool = False


STABLE = ("train.grad_clip=1", "optimizer.warmup_steps=200", "optimizer.betas=[0.9,0.99]")
DEEP = ("model/size=tiny", "model.depth=12", "ema.decay=0.999", *STABLE)
DEEP_PATCH_2 = (*DEEP, "model.patch_size=2")
DIGITS = {"data": "digits", "arms": TWINS | NO_REMOVAL | TOKEN_DROP}
DIGITS |= {"seeds": (0, 1, 2, 3, 4), "scales": (1.5, 2.0)}
MIXTURE = {"data": "mixture", "arms": TWINS | NO_REMOVAL | MECHANISM}
MIXTURE |= {"steps": 8000, "lr": 0.004, "search_steps": 5000, "search_seeds": (100,)}
MIXTURE |= {"scales": (1.25,), "num_samples": 250}
MIXTURE["lr_of"] = dict.fromkeys(NO_REMOVAL | MECHANISM, "routed")
S_4 = ("model/size=s_4", "ema.decay=0.999", "train.batch_size=64", "train.num_workers=0", *STABLE)
S_2 = ("ema.decay=0.999", "train.grad_clip=1", "optimizer.warmup_steps=500")
ON_GPU = {"data": "glyphs", "task": S_2, "arms": TWINS, "lr": 5e-4, "search_seeds": (), "seeds": (0, 1)}
ON_GPU |= {"scales": (1.5, 2.0, 3.0), "noises": 1, "gpu": True}
STUDIES = {
    "digits-200": Study(
        task=(*DEEP_PATCH_2, "data.num_images=200", "model.hidden_size=64"),
        **{**DIGITS, "steps": 6000, "lr": 0.008, "search_steps": 3000, "evaluations": 24},
    ),
    "digits-1500": Study(
        task=(*DEEP_PATCH_2, "data.num_images=1500"),
        **{**DIGITS, "steps": 20_000, "lr": 0.004, "search_steps": 5000, "search_seeds": (100,)},
        **{"lr_of": dict.fromkeys(NO_REMOVAL, "routed"), "noises": 1, "num_samples": 1000, "num_steps": 20},
    ),
    "mixture-64": Study(task=DEEP, **MIXTURE),
    "mixture-256": Study(task=(*DEEP, "data.input_size=16"), **MIXTURE),
    "glyphs-50k": Study(
        *("glyphs", S_4, TWINS | NO_REMOVAL, 50_000, 0.002, 5000, (100,)), scales=(1.5, 2.0, 3.0), gpu=True
    ),
    "glyphs-s2": Study(steps=8000, evaluations=4, **ON_GPU),
    "glyphs-s2-32k": Study(steps=32_000, evaluations=16, **ON_GPU),
}
# What may stack with routing. The blocks are B's published ones: 1 is before the window, 3 is in it.
METHODS = {
    "SRA 2": ("alignment=sra2",),
    "REPA": ("alignment=repa", "alignment.width=96"),
    "internal": ("model.inner_head=3",),
    "Muon": ("optimizer=muon",),
    "post hoc": ("ema=post_hoc", "train.milestone_every=20", "train.save_every=20"),
}
STACKS = {
    f"{twin}, {name}".removesuffix(", "): (*keys, *more)
    for name, more in {"": (), **METHODS}.items()
    for twin, keys in TWINS.items()
}
STACKS["routed, REPA kept"] = (*STACKS["routed, REPA"], "alignment.tokens=kept")
STACKS["routed, REPA delayed"] = (*STACKS["routed, REPA"], "model.routes.0.start_layer_idx=4")
SMALL = ("data.input_size=16", "model.hidden_size=48", "model.depth=12", "model.num_heads=3", *STABLE)
SCORE_KEYS = dict.fromkeys(TWINS, ("guidance=cfg", "guidance_scale=1.5"))
for twin in TWINS:
    SCORE_KEYS[f"{twin}, internal"] = ("guidance=internal", "guidance_scale=1.25,1.5")
    SCORE_KEYS[f"{twin}, post hoc"] = ("checkpoint=std0.03,std0.1,std0.15",)
FIVE_SEEDS = {"search_seeds": (), "seeds": (0, 1, 2, 3, 4), "evaluations": 5}
# The rate is the best of 0.002 to 0.016 on glyphs, for "dense", "routed" and "dense, Muon" after 300 steps.
STUDIES["stacks-256"] = Study(
    *("digits", SMALL, STACKS, 500, 0.008),
    **FIVE_SEEDS | {"noises": 1, "scored": SCORE_KEYS, "num_samples": 500, "num_steps": 10, "features": True},
)
# The same scenes at 32, 64 and 128 pixels, with captions in two ways. One head of 64 channels, the size of
# DiT's heads, makes 1,024 tokens cheaper than several. The rate is the best of 0.001 to 0.008 for "routed,
# prefix", and of 0.001 to 0.004 for "dense, prefix", on 256 tokens. Twice the side needs twice the noise to
# hide the same objects.
CONDITIONING_ARMS = {
    name: {f"{twin}, {name}": (*keys, f"model/conditioning={name}") for twin, keys in TWINS.items()}
    for name in ("prefix", "cross", "class")
}
SCENE_KEYS = ("diffusion=x0", "model.patch_size=4", "model.depth=12")
SCENE_KEYS += ("optimizer.schedule=constant", "guidance=none")  # so that all steps can be compared
TEXT = ("model.hidden_size=64", "model.num_heads=1", "model.pool_text=false", *SCENE_KEYS, *STABLE)
TEXT += ("optimizer=adamw_by_width", "train.batch_size=8")
for tokens, side in ((64, 32), (256, 64), (1024, 128)):
    size = ("data.num_images=10000", f"data.input_size={side}", f"diffusion.loss.shift={side / 32:g}")
    STUDIES[f"scenes-{tokens}"] = Study(
        *("scenes", (*TEXT, *size), CONDITIONING_ARMS["prefix"] | CONDITIONING_ARMS["cross"], 500, 0.004),
        **FIVE_SEEDS,
    )
# Scenes of 32 pixels, trained long enough to follow captions. The arms "class" have their kinds as classes.
CAPTION_TASK = {"data": "scenes", "task": ("model.hidden_size=96", "model.num_heads=3", *SCENE_KEYS)}
CAPTION_TASK |= {"lr": 0.005, "search_seeds": (), "noises": 1, "num_steps": 10}
STUDIES["captions-64"] = Study(
    arms={arm: keys for arms in CONDITIONING_ARMS.values() for arm, keys in arms.items()},
    **CAPTION_TASK | {"steps": 2000, "evaluations": 10, "scales": (2.0,), "num_samples": 350},
)
# The prefix arms of captions-64 and "no removal", trained eight times as long.
STUDIES["captions-16k"] = Study(
    arms=CONDITIONING_ARMS["prefix"]
    | {"no removal, prefix": (*NO_REMOVAL["no removal"], "model/conditioning=prefix")},
    **CAPTION_TASK | {"steps": 16_000, "evaluations": 16, "scales": (1.5, 2.0, 3.0), "num_samples": 700},
)
TINY = ("model.hidden_size=32", "train.batch_size=4", "train.log_every=1", "train.compile=false")
TINY += ("optimizer.warmup_steps=0", "model.num_heads=2")
TINY_DATA = {"glyphs": ("data.num_images=2048",), "scenes": ("data.num_images=640",)}
TINY_STEPS = 4
COLUMNS = dict.fromkeys(("arm", "seed", "lr", "step"), "{}") | {"gflop": "{:.0f}"}
COLUMNS |= {"guidance": "{}", "noise": "{}"} | dict.fromkeys(("train_loss", *SCORES), "{:.4f}")
COLUMNS["failed"] = "{}"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = program_parser("study.twins", __doc__)
    parser.add_argument("out", type=Path, help="folder of the runs and the records")
    parser.add_argument("--tiny", action="store_true", help="rehearse the same code at small sizes")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, sharing the cores (default: 2)")
    on_cpu = [name for name, study in STUDIES.items() if not study.gpu]
    parser.add_argument(
        "studies", nargs="*", metavar="study", help=f"of {', '.join(STUDIES)} (default: all on a CPU)"
    )
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="arms of these studies (default: all)")
    parser.add_argument("--change", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of all arms")
    parser.add_argument("--seeds", nargs="+", type=int, help="default: the study's")
    request = parser.parse_intermixed_args(arguments)
    if str(request.out) in STUDIES:
        parser.error(f"{request.out} is a study: the first argument is the folder of the results")
    request.studies = request.studies or on_cpu
    arms = dict.fromkeys(arm for name in request.studies if name in STUDIES for arm in STUDIES[name].arms)
    for what, names, choices in (("study", request.studies, STUDIES), ("arm", request.arms or (), arms)):
        if unknown := [name for name in names if name not in choices]:
            parser.error(f"unknown {what} {', '.join(map(repr, unknown))}: choose from {[*choices]}")
    searched = {seed for name in request.studies for seed in STUDIES[name].search_seeds}
    if taken := sorted(searched.intersection(request.seeds or ())):
        parser.error(f"--seeds {taken[0]}: the search of the learning rate uses this seed")
    if any(STUDIES[name].gpu for name in request.studies) and not request.tiny and device_type() == "cpu":
        parser.error(f"{', '.join(request.studies)}: needs a GPU, or --tiny")
    return request


def main() -> None:
    """Train and score everything that is not in the records, and print the records."""
    request = parse()
    request.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: trainings save before they end
    failures, header = [], environment(torch.device(device_type())) | {"tiny": request.tiny}
    for name in request.studies:
        study = STUDIES[name]
        record = Record(f"twins_{name}", request.out, header)
        failures += Work(name, study, request, record).run()
        print(f"\n{name}\n{aligned(markdown(record.rows, COLUMNS))}", flush=True)
    sys.exit(bool(failures))


class Work:
    """The trainings of a study: first the searches, then all arms of one seed after the other."""

    def __init__(self, name: str, study: Study, request: argparse.Namespace, record: Record):
        self.name, self.study, self.request, self.record = name, study, request, record
        change, names = request.change, request.arms or study.arms
        arms = {name: keys for name, keys in study.arms.items() if name in names}
        # The name of a changed arm contains the change.
        self.arms = {", ".join([name, *change]): (*keys, *change) for name, keys in arms.items()}
        self.keys = {**study.arms, **self.arms}
        self.steps = TINY_STEPS if request.tiny else study.steps
        self.every = max(1, self.steps // (2 if request.tiny else study.evaluations))
        task = (f"data={study.data}", *study.task)
        # Computed here, because two threads cannot compose a configuration at once.
        gflops = {arm: gflop_a_step((*task, *keys)) for arm, keys in {**TWINS, **self.arms}.items()}
        # The step at which an arm has cost as much as the routed one.
        steps = {arm: min(self.steps, self.steps * gflops["routed"] / gflops[arm]) for arm in self.arms}
        self.equal_cost_steps = {arm: self._nearest_evaluation(step) for arm, step in steps.items()}

    def run(self) -> list[str]:
        """Run the trainings that are not recorded yet. Return the failures."""
        rates = dict.fromkeys(self.arms, self.study.lr)
        if self.study.features:
            self._prepare()
        if self.study.search_seeds:
            searched = {arm: self.study.lr_of.get(arm, arm) for arm in self.arms}
            arms = dict.fromkeys(searched.values())
            while searches := [(a, seed, lr) for a in arms for seed, lr in self._next_searches(a)]:
                if failures := self._run("searches", searches):
                    return failures
            rates = {arm: best_lr(self._rows(), searched[arm]) for arm in self.arms}
        seeds = self.request.seeds or (self.study.seeds[:1] if self.request.tiny else self.study.seeds)
        return self._run("trainings", [(arm, seed, rates[arm]) for seed in seeds for arm in self.arms])

    def _prepare(self) -> None:
        """Write the data of the study with features."""
        keys = [f"data={self.study.data}", *self.study.task]
        keys += TINY_DATA.get(self.study.data, ()) if self.request.tiny else ()
        path = self.request.out.resolve() / self.name
        compose(("model=dit", *keys, f"data.path={path}")).data()
        write_features(path, TINY_STEPS if self.request.tiny else STEPS)

    def _nearest_evaluation(self, step: float) -> int:
        return max(1, round(step / self.every)) * self.every

    def _rows(self) -> Rows:
        """Return the rows of this record and of other machines'."""
        files = {*self.request.out.glob(f"twins_{self.name}_*.csv")} - {self.record.file}
        same = [file for file in sorted(files) if read_environment(file)["tiny"] == str(self.request.tiny)]
        others = [row for file in same for row in read_results(file) if not row.get("failed")]
        return [*others, *self.record.rows]

    def _next_searches(self, arm: str) -> list[tuple[int, float]]:
        """Return the seeds and rates that the search of an arm needs next; []: its optimum is found."""
        seeds = self.study.search_seeds[:1] if self.request.tiny else self.study.search_seeds
        losses = search_losses(self._rows(), arm)
        best = min(losses, key=losses.get) if losses else self.study.lr
        around = (best,) if self.request.tiny else (best / 2, best, best * 2)
        rates = [rate for rate in around if rate <= MAX_LR]
        searched = searches_by_rate(self._rows(), arm)
        return [(s, lr) for lr in rates for s in seeds if str(s) not in searched.get(float(f"{lr:g}"), ())]

    def _run(self, kind: str, units: Sequence[tuple[str, int, float]]) -> list[str]:
        """Train what is not recorded yet. Return the failures."""
        done = {row["setting"] for row in self._rows() if not row.get("failed")}
        calls = {self.setting(*unit): partial(self._train, *unit) for unit in units}
        calls = {setting: call for setting, call in calls.items() if setting not in done}
        recorded = f"{len(units) - len(calls)} already recorded"
        print(f"{self.name}: {len(calls)} {kind}, {recorded}; logs: {self.request.out}", flush=True)
        record_all(calls, self.record, self.request.jobs)
        return [row["failed"] for row in self.record.rows if row["setting"] in calls and row.get("failed")]

    def setting(self, arm: str, seed: int, lr: float) -> str:
        """Return the name of a training."""
        return f"{self.name}: {arm}, lr {lr:g}, seed {seed}"

    def _train(self, arm: str, seed: int, lr: float) -> Rows:
        """Train once. Return a row for each evaluation, and for each set of scored samples."""
        study, search = self.study, seed in self.study.search_seeds
        out = self.request.out.resolve()
        run = out / file_name(self.setting(arm, seed, lr))
        steps = TINY_STEPS if self.request.tiny else study.search_steps if search else self.steps
        every = steps if search else self.every
        shared = {"arm": arm, "seed": seed, "lr": f"{lr:g}", "part": "search" if search else "training"}
        keys = [f"data={study.data}", *study.task]
        # Milestones stay, even if a stopped training saves a checkpoint between two of them.
        keys += [f"train.{key}={every}" for key in ("eval_every", "save_every", "milestone_every")]
        keys += [*self.keys[arm], f"optimizer.lr={lr:g}"]
        keys += (*TINY, *TINY_DATA.get(study.data, ())) if self.request.tiny else ()
        keys += [f"data.path={out / self.name}"] if study.data != "mixture" else []  # a mixture has no file
        keys += [f"seed={seed}", f"output_dir={run}", f"train.total_steps={steps}", "train.sample_every=null"]
        try:
            start_program("train.py", Path(f"{run}.log"), *keys)
        except OSError:
            if search and NOT_FINITE in Path(f"{run}.log").read_text():
                return [{**shared, "step": steps, LOSS: math.inf}]  # the rate is too high
            raise
        rows = [{**shared, **row} for row in evaluations_of(run)]
        costs = {row["step"]: {**shared, "gflop": row["gflop"]} for row in rows}
        if study.data == "mixture" and not search:
            rows += [{**costs[row["step"]], **row} for row in self._judge(run, arm, seed)]
        elif (study.scales or study.scored) and not search:
            best = min(rows, key=lambda row: row[LOSS])["step"]
            rows += [{**costs[row["step"]], **row} for row in self._score(run, arm, seed, best)]
        return rows

    def _judge(self, run: Path, arm: str, seed: int) -> Rows:
        """Judge samples by the density of the mixture: of the last and the equal-cost step without guidance,
        and of the last step with each guidance scale.
        """
        samples, num_steps = (20, 10) if self.request.tiny else (self.study.num_samples, self.study.num_steps)
        sets = {(step, UNGUIDED): 1.0 for step in (self.equal_cost_steps[arm], self.steps)}
        sets |= {(self.steps, f"guidance=cfg guidance_scale={scale:g}"): scale for scale in self.study.scales}
        seeds, rows = range(seed * samples, (seed + 1) * samples), []
        for (step, guidance), scale in sets.items():
            scores = density_scores(run, step, scale, seeds=seeds, num_steps=num_steps)
            rows.append({"step": step, "guidance": guidance, "noise": 0, **scores})
        return rows

    def _score(self, run: Path, arm: str, seed: int, best: int) -> Rows:
        """Score samples of a training: `noises` sets at the best, the last and the equal-cost step, one set
        at quarters of the training, and one at the last step for each guidance scale. With `scored`, one set
        at the last step, and one for each value of the sweep. The seeds of an arm do not share noise.
        """
        noises, samples = (1, 20) if self.request.tiny else (self.study.noises, self.study.num_samples)
        first_seed = seed * NUM_NOISES * samples
        steps = [best, self.steps, self.equal_cost_steps[arm]]
        quarters = {self._nearest_evaluation(share * self.steps) for share in (0.25, 0.5, 0.75)}
        steps += quarters if noises == 1 else ()
        seeds = ",".join(str(first_seed + noise * samples) for noise in range(noises))
        one_set = [f"first_seed={first_seed}"]
        scales = ",".join(map(str, self.study.scales))
        last = [f"checkpoint={self.steps}", *one_set]
        if self.study.scored:
            sweeps = [last, *([[*last, *keys]] if (keys := self.study.scored.get(arm)) else [])]
        else:
            sweeps = [[f"checkpoint={join_steps(steps)}", f"first_seed={seeds}"]]
            sweeps += [[f"checkpoint={join_steps(rest)}", *one_set]] if (rest := quarters - {*steps}) else []
            sweeps += [[*last, "guidance=cfg", f"guidance_scale={scales}"]]
        shared = [f"run={run}", f"suite={self.study.data}", f"reference={run.parent / self.name}"]
        shared += [f"num_samples={samples}", f"num_steps={2 if self.request.tiny else self.study.num_steps}"]
        shared += [f"compile={not self.request.tiny}"]
        for sweep in sweeps:
            start_program("fid.py", Path(f"{run}.log"), "-m", *shared, *sweep)
        return [scores_of(file, samples) for file in sorted(run.glob("scores/*.json"))]


def join_steps(steps: Sequence[int] | set[int]) -> str:
    """Return different steps as a list of a sweep."""
    return ",".join(str(step) for step in sorted({*steps}))


def scores_of(file: Path, num_samples: int) -> dict[str, Any]:
    """Return step, guidance, set of noise and scores of a record of fid.py."""
    record = read_json(file)
    drawn = record["samples"]["drawn"]
    scale, target = drawn["guidance"].get("guidance_scale"), drawn["guidance"]["_target_"]
    name = "internal" if target == "diffusion.InternalGuidance" else "cfg"
    guidance = UNGUIDED if scale in (None, 1) else f"guidance={name} guidance_scale={scale:g}"
    _, step, *width = Path(drawn["checkpoint"]).name.split("_")
    if width:
        guidance = f"checkpoint={width[0]}"
    noise = drawn["first_seed"] // num_samples % NUM_NOISES
    return {"step": int(step), "guidance": guidance, "noise": noise, **record["values"]}


def file_name(text: str) -> str:
    """Turn a text into a file name that can be part of a Hydra override."""
    return re.sub(r"[^\w.-]+", "_", text)


def evaluations_of(run: Path) -> Rows:
    """Return step, cost, losses and the mean training loss since the previous one, for each evaluation."""
    rows, losses, record = [], [], Run(RunFolder(run))
    for line in record.lines:
        if line.get("loss") is not None:
            losses.append(line["loss"])
        if LOSS in line:
            spent = {"step": line["step"], "gflop": 1000 * record.cost_at("TFLOPs", line["step"])}
            scores = {k: math.inf if v is None else v for k, v in line.items() if k.startswith(SCORES)}
            rows.append({**spent, "guidance": UNGUIDED, "train_loss": mean(losses or [math.inf]), **scores})
            losses.clear()
    return rows


def searches_by_rate(rows: Sequence[Mapping[str, Any]], arm: str) -> dict[float, dict[str, float]]:
    """Return {learning rate: {seed: held-out loss}} of an arm's search."""
    by_rate: dict[float, dict[str, float]] = {}
    for row in rows:
        if (row.get("arm"), row.get("part")) == (arm, "search") and row.get(LOSS):
            by_rate.setdefault(float(row["lr"]), {})[str(row["seed"])] = float(row[LOSS])
    return dict(sorted(by_rate.items()))


def search_losses(rows: Sequence[Mapping[str, Any]], arm: str) -> dict[float, float]:
    """Return the mean held-out loss of each learning rate in an arm's search, over the seeds that all rates
    share (if there are any); inf if a training diverged.
    """
    by_rate = searches_by_rate(rows, arm)
    shared = set.intersection(*map(set, by_rate.values())) if by_rate else set()
    means = {}
    for lr, losses in by_rate.items():
        is_finite = math.isfinite(sum(losses.values()))
        means[lr] = mean(losses[seed] for seed in shared or losses) if is_finite else math.inf
    return means


def best_lr(rows: Sequence[Mapping[str, Any]], arm: str) -> float:
    """Return the learning rate with the lowest mean loss of an arm's search."""
    losses = search_losses(rows, arm)
    return min(losses, key=losses.get)


def gflop_a_step(overrides: Sequence[str]) -> float:
    """Return the cost of a training step by the cost model."""
    experiment = compose(overrides)
    return experiment.train.batch_size * cost_of(experiment.meta_net).routed_training_flops / 1e9


if __name__ == "__main__":
    run_main(main)
