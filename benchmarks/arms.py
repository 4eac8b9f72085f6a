"""Ways to train a network on digits, each for as many steps as cost the same FLOPs: dense, routed, fused,
masked, and each kind of block dense and routed.

    python -m benchmarks.arms OUT                                   all arms, three seeds, two at a time
    python -m benchmarks.arms OUT --arms dense tread --seeds 0 1    some

Each arm is trained by train.py and scored by fid.py, in OUT; the same command goes on. The record is written
after every seed of an arm, and the table of all of them is printed in the end. Everything runs on the CPU.
Seconds are not compared: jobs share the cores.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.results import Record, Rows, markdown
from benchmarks.runs import compose_config
from builders.network import build_net
from models import cost_of
from runtime.provenance import PROJECT, environment

KINDS = ("lightning", "mamba", "rwkv")
ARMS = {
    "dense": ("model=dit",),
    "tread": ("model=tread",),
    "sprint": ("model=sprint",),
    "sprint, random": ("model=sprint", "model/router=random"),
    "masking": ("experiment=ablation_masking",),
    "token dropping": ("experiment=ablation_token_drop",),
    **{
        f"{kind}, {name}": (model, f"model/block={kind}")
        for kind in KINDS
        for name, model in (("dense", "model=dit"), ("tread", "model=tread"))
    },
}
UNGUIDED, SCALE = "none", 1.25
GUIDED = {"dense": ("cfg",), "tread": ("cfg",), "sprint": ("cfg", "path_drop"), "masking": ("cfg",)}
SCORES = ("fd_pixel", "label_accuracy")
INTERVALS = ("train.sample_every=null", "train.eval_every=null")
TINY = (  # of a rehearsal
    "model.hidden_size=32",
    "model.depth=7",
    "train.batch_size=4",
    "train.log_every=1",
    "train.compile=false",
)
COLUMNS = {
    "arm": "{}",
    "guidance": "{}",
    "steps": "{}",
    "parameters": "{}",
    "gflop_a_step": "{:.1f}",
    "n": "{}",
    "fd_pixel": "{:.3f}",
    "fd_pixel_of_seeds": "{}",
    "label_accuracy": "{:.3f}",
    "label_accuracy_of_seeds": "{}",
}


def parse() -> argparse.Namespace:
    """Return what the command line asks."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.arms", None, __doc__, formatter_class=raw)
    parser.add_argument("out", type=Path, help="folder of the runs and the record")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS, metavar="ARM")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1000, help="of the dense arm, whose FLOPs all get")
    parser.add_argument("--num-samples", type=int, default=500)
    parser.add_argument("--num-steps", type=int, default=18, help="of the sampler")
    parser.add_argument("--jobs", type=int, default=2, help="at a time, each on its share of the cores")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal, at sizes that take seconds")
    return parser.parse_args()


def main() -> None:
    """Train and score what is not in the record, and print the table."""
    asked = parse()
    about = environment(torch.device("cpu")) | {"tiny": asked.tiny}
    fixed = {"steps": asked.steps, "num_samples": asked.num_samples, "num_steps": asked.num_steps}
    asked.out.mkdir(parents=True, exist_ok=True)
    record = Record("arms", asked.out, about | fixed, tuple(fixed))
    # Seed by seed: where time is short, all arms have as many.
    todo = [(arm, seed) for seed in asked.seeds for arm in asked.arms]
    todo = [each for each in todo if name_of(*each) not in record.done()]
    equal = {arm: equal_steps(ARMS[arm], asked.steps) for arm in asked.arms}
    cores = sorted(os.sched_getaffinity(0))
    shares = [set(cores[i :: asked.jobs]) or set(cores) for i in range(asked.jobs)]
    # What a thread starts runs on the cores of that thread: programs that share cores wait for each other.
    with ThreadPoolExecutor(asked.jobs, initializer=lambda: os.sched_setaffinity(0, shares.pop())) as pool:
        started = {pool.submit(train_and_score, *each, equal[each[0]], asked): each for each in todo}
        for ended in as_completed(started):
            name = name_of(*started[ended])
            try:
                record.add(name, ended.result())
            except subprocess.CalledProcessError as error:  # the same command tries again
                record.add(name, [{"failed": str(error)}])
            print(f"{len(record.done())} of {len(asked.arms) * len(asked.seeds)}: {name}", flush=True)
    print(markdown(table(row for row in record.rows if not row.get("failed")), COLUMNS))
    sys.exit(record.done() != record.started())


def name_of(arm: str, seed: int) -> str:
    """Return the name of one training."""
    return f"{arm}, seed {seed}"


def equal_steps(arm: Sequence[str], steps: int) -> dict[str, Any]:
    """Return how many steps of an arm cost what `steps` of the dense one do, and what it is made of."""
    costs = []
    for overrides in (ARMS["dense"], arm):
        with torch.device("meta"):
            net = build_net(config := compose_config(overrides))
        costs.append(cost_of(net))
    dense, own = costs[0].dense_training_flops, costs[1].routed_training_flops
    gflop = config["train"]["batch_size"] * own / 1e9
    return {"steps": round(steps * dense / own), "parameters": costs[1].num_parameters, "gflop_a_step": gflop}


def train_and_score(arm: str, seed: int, equal: Mapping[str, Any], asked: argparse.Namespace) -> Rows:
    """Train one arm from one seed for so many steps; return a row of scores for each guidance."""
    run = asked.out.resolve() / re.sub(r"\W+", "_", name_of(arm, seed))
    keys = (f"seed={seed}", f"output_dir={run}", f"train.total_steps={equal['steps']}", *INTERVALS)
    latents = asked.out.resolve() / "latents"
    tiny = TINY if asked.tiny else ()
    _start("train.py", run, *ARMS[arm], f"data.path={latents}", *keys, *tiny)
    rows = []
    for guidance in (UNGUIDED, *GUIDED.get(arm, ())):
        out = run / "scores" / f"{guidance}.json"
        if not out.exists():
            drawn = (
                f"num_samples={asked.num_samples}",
                f"num_steps={asked.num_steps}",
                f"guidance={guidance}",
            )
            drawn += () if guidance == UNGUIDED else (f"guidance_scale={SCALE}",)
            judged = ("suite=digits", f"reference={latents}", f"out={out}")
            _start("fid.py", run, f"run={run}", *judged, *drawn)
        found = json.loads(out.read_text())
        scores = {key: scored(found, key) for key in SCORES}
        rows.append({"arm": arm, "seed": seed, "guidance": guidance, **equal, **scores})
    return rows


def scored(record: Mapping[str, Any], key: str) -> float:
    """Return a score of a record of fid.py, whose name says the number of samples."""
    return next(value for name, value in record["values"].items() if name.startswith(key))


def table(rows: Iterable[Mapping[str, Any]]) -> Rows:
    """Return a row for each arm and guidance: means over seeds, and each seed's."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["arm"], row["guidance"]].append(row)
    found = []
    for (arm, guidance), of_seeds in groups.items():
        first = {key: of_seeds[0][key] for key in ("steps", "parameters", "gflop_a_step")}
        line = {"arm": arm, "guidance": guidance, **first, "n": len(of_seeds)}
        for key in SCORES:
            values = [float(row[key]) for row in sorted(of_seeds, key=lambda row: int(row["seed"]))]
            line |= {key: mean(values), f"{key}_of_seeds": " ".join(f"{value:.3f}" for value in values)}
        found.append(line)
    return sorted(found, key=lambda line: (list(ARMS).index(line["arm"]), line["guidance"] != UNGUIDED))


def _start(program: str, run: Path, *overrides: str) -> None:
    """Run a program of the project; its output goes to a file beside the run."""
    command = [sys.executable, program, *overrides]
    with run.with_suffix(".log").open("ab") as log:
        on_cpu = {**os.environ, "ACCELERATE_USE_CPU": "true"}
        subprocess.run(command, cwd=PROJECT, env=on_cpu, stdout=log, stderr=subprocess.STDOUT, check=True)


if __name__ == "__main__":
    main()
