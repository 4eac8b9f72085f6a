"""What a run says of its length, memory and disk, against what then happens."""

import json
import math
import re
import shutil
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn as nn

from builders.estimate import CGROUPS, Estimate, free_disk, free_memory, kept_bytes, optimizer_bytes
from builders.evaluators import drawing_flops
from builders.network import build_net
from builders.summary import check_resources, duration, warnings
from data import LatentManifest
from runtime.launch import ALONE, Launch
from tests.faults.killing import ENVIRONMENT
from tests.runs import ROOT, TINY, tiny_run, tiny_trainer, validated
from training.checkpoint import latest_checkpoint

GIB = 2**30
MANIFEST = LatentManifest(100, (4, 8, 8), "float32", "samples", 10, "identity", num_held_out=10)
# Reads the memory of the process until it ends, in a thread: the highest that two steps take.
PEAK = """
import json, sys, threading, psutil
from tests.runs import tiny_trainer
from training.fit import run_training
trainer, run = tiny_trainer(sys.argv[1], *sys.argv[2:])
process, peak, done = psutil.Process(), 0, threading.Event()
before = process.memory_info().rss
def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, process.memory_info().rss)
thread = threading.Thread(target=watch)
thread.start()
run_training(trainer, run)
done.set()
thread.join()
print(json.dumps({"took": peak - before}))
"""


def test_a_forward_keeps_its_inputs_and_what_it_computes():
    layers = nn.Sequential(nn.Linear(10, 20), nn.GELU(), nn.Linear(20, 5))
    x = torch.zeros(3, 10)
    # The input of each layer; the weights are not counted.
    assert kept_bytes(lambda: layers(x).sum(), layers.parameters()) == 4 * 3 * (10 + 20 + 20)


def test_what_a_forward_keeps_is_gone_after_it():
    x, freed = torch.zeros(10, requires_grad=True), []

    def forward():
        y = x.exp()  # which keeps its output
        weakref.finalize(y.untyped_storage(), freed.append, True)
        return y.sum()

    kept_bytes(forward, [])
    assert freed == [True]


@pytest.mark.parametrize(("precision", "bytes_of_weight"), [("no", 0), ("bf16", 2)])
def test_weights_in_bf16_are_kept_once_for_all_images(tmp_path, capsys, precision, bytes_of_weight):
    said = []
    for batch_size in (20, 200):
        options = (f"train.batch_size={batch_size}", f"train.mixed_precision={precision}")
        trainer = tiny_run(
            tmp_path / f"{batch_size}", *options, "train.total_steps=1", "model.hidden_size=256"
        )
        said.append(GIB * float(re.search(r"at most ([\d.]+) GiB", told(capsys, "needs "))[1]))
    num_weights = sum(parameter.numel() for parameter in trainer.net.parameters())
    beside_images = (10 * said[0] - said[1]) / 9
    assert beside_images == pytest.approx(bytes_of_weight * num_weights, abs=0.3 * num_weights)


def test_what_is_drawn_takes_its_time(tmp_path, capsys):
    times = []
    for pictures in ("null", "1"):
        options = ("sampler.num_steps=200", "train.log_every=1", f"train.sample_every={pictures}")
        trainer, run = tiny_trainer(tmp_path / pictures, *options, "train.total_steps=1")
        run.unlock()
        times.append(drawing_flops(trainer.evaluators))
    assert times[0] == 0
    # Ten images, two evaluations a step but in the last.
    assert times[1] == 10 * 399 * trainer.net.flops([trainer.net.num_tokens]).forward


def test_a_loss_that_needs_two_images_is_estimated(tmp_path):
    tiny_run(tmp_path / "run", "diffusion=flow", "diffusion.loss.contrastive_weight=0.05")


@pytest.mark.parametrize(
    ("choice", "bytes_of_weight"),
    [("adamw", (8, 8)), ("sgd", (4, 4)), ("sgd optimizer.momentum=0", (0, 0)), ("muon", (4, 8))],
)
def test_the_state_of_an_optimizer_is_counted(choice, bytes_of_weight):
    net = build_net(config := validated(*TINY, *f"optimizer={choice}".split()))
    matrices = sum(p.numel() for name, p in net.named_parameters() if p.ndim == 2 and "blocks." in name)
    others = sum(p.numel() for p in net.parameters()) - matrices
    assert optimizer_bytes(config, net) == bytes_of_weight[0] * matrices + bytes_of_weight[1] * others


def told(capsys, label):
    (line,) = {line for line in capsys.readouterr().out.splitlines() if line.startswith(label)}
    return line


def test_the_banner_says_what_will_happen(tmp_path, capsys):
    tiny_run(tmp_path / "run", "data.num_held_out=24", "train.sample_every=3")
    banner = capsys.readouterr().out
    assert "data       1000 entries are trained on, 24 held out, 10 classes\n" in banner
    assert "length     6 steps, 0.048 epochs, checkpoint every 2: about " in banner
    assert ", the first pictures after " in banner
    assert "needs      " in banner
    assert "warning" not in banner


def test_checkpoints_take_the_disk_that_was_said(tmp_path, capsys):
    tiny_run(tmp_path / "run", "model.hidden_size=256", "train.keep_last=2")
    folder = latest_checkpoint(tmp_path / "run").parent
    found = sum(file.stat().st_size for file in folder.rglob("*.safetensors")) / GIB
    said = float(told(capsys, "needs ").split(";")[1].split()[0])
    assert said == pytest.approx(1.5 * found, rel=0.1)  # a third is written before the first goes
    assert free_disk(folder) - shutil.disk_usage(tmp_path).free == pytest.approx(found * GIB, rel=0.5)


@pytest.mark.slow
def test_a_step_takes_the_memory_that_was_said(tmp_path):
    size = ("model.hidden_size=256", "model.depth=8", "data.input_size=32", "train.batch_size=32")
    options = (*size, "train.keep_last=1", "train.total_steps=2")
    command = [sys.executable, "-c", PEAK, str(tmp_path / "run"), *options]
    result = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    said = result.stdout.split("needs      ")[1].split()
    activations, weights = float(said[said.index("most") + 1]), float(said[0])
    took = json.loads(result.stdout.splitlines()[-1])["took"] / GIB
    assert 0.6 * activations < took < 1.3 * activations + weights


@pytest.mark.parametrize(
    ("overrides", "takes", "message"),
    [
        ("train.batch_size=90", {"activations": 19 * GIB, "checkpoints": 5 * GIB}, None),
        ("train.batch_size=91", {}, "train.batch_size=91: a step sees some of the 90 entries more than once"),
        (
            "",
            {"activations": 30 * GIB},
            "about 31 GiB of memory are needed, 20 GiB are free: lower train.micro",
        ),
        (
            "",
            {"checkpoints": 6 * GIB},
            "about 6 GiB of disk are needed for checkpoints, 5 GiB are free: lower",
        ),
        (
            "",
            {"step_sec": 864_000},
            "this would take about 60 days here: choose a smaller model/size or fewer",
        ),
    ],
)
def test_what_is_not_there_is_warned_of(overrides, takes, message):
    config = validated(*TINY, *overrides.split())
    usual = {"step_sec": 1.0, "weights": GIB, "activations": GIB, "checkpoints": GIB}
    found = warnings(config, MANIFEST, Estimate(**usual | takes), 6, 20 * GIB, 5 * GIB)
    assert len(found) == (message is not None)
    assert all(warning.startswith(f"warning: {message}") for warning in found)


@pytest.mark.parametrize(
    ("takes", "steps", "message"),
    [
        ({"activations": 38 * GIB}, 1, None),  # compiled blocks may keep half of it
        ({"activations": 40 * GIB}, 1, "about 41 GiB of memory are needed, 20 GiB are free: "),
        ({"weights": 299 * GIB, "step_sec": 1e6}, 9, "about 300 GiB of memory are needed, 20 GiB are free: "),
        ({"checkpoints": 6 * GIB}, 1, "about 6 GiB of disk are needed for checkpoints, 5 GiB are free: "),
        ({"step_sec": 864_000}, 2, None),
        ({"step_sec": 864_000}, 4, "this would take about 40 days here: "),
    ],
)
def test_hopeless_runs_are_refused_unless_the_user_insists(takes, steps, message):
    usual = {"step_sec": 1.0, "weights": GIB, "activations": GIB, "checkpoints": GIB}
    asked = (Estimate(**usual | takes), steps, 20 * GIB, 5 * GIB)
    check_resources({"check_resources": False, "milestone_every": None}, *asked)
    train = {"check_resources": True, "milestone_every": None}
    if message is None:
        check_resources(train, *asked)
        return
    with pytest.raises(ValueError) as error:
        check_resources(train, *asked)
    assert str(error.value).startswith(message) and "(train.check_resources=false" in str(error.value)


@pytest.mark.parametrize("free", ["memory", "disk"])
def test_a_hopeless_run_ends_before_anything_is_written_or_its_memory_taken(tmp_path, monkeypatch, free):
    monkeypatch.setattr(f"builders.trainer.free_{free}", lambda _: 0)
    if free == "memory":
        monkeypatch.setattr("builders.trainer.build_ema", None)  # is not reached
    with pytest.raises(ValueError, match=f"of {free} are needed"):
        tiny_trainer(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    if free == "disk":
        tiny_run(tmp_path / "run", "train.total_steps=1", "train.check_resources=false")


@pytest.mark.parametrize("names", CGROUPS.values())
@pytest.mark.parametrize("group", [".", "slurm/job_7/step_0", "slurm/job_7", "slurm"])
@pytest.mark.parametrize(("limit", "free"), [("max", math.inf), (3 * GIB, 2.5 * GIB)])
def test_the_limit_of_a_container_or_a_job_counts(tmp_path, monkeypatch, names, group, limit, free):
    (tmp_path / group).mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, GIB, f"anon 5\n{names[2]} {GIB // 2}"), strict=True):
        (tmp_path / group / ("memory.stat" if name == names[2] else name)).write_text(f"{value}\n")
    own = tmp_path / "own"
    own.write_text("5:cpu,cpuacct:/slurm/job_8\n4:memory:/slurm/job_7/step_0\n0::/slurm/job_7/step_0\n")
    (tmp_path / "slurm/job_8").mkdir(parents=True)  # not our memory group
    for name in names[:2]:
        (tmp_path / "slurm/job_8" / name).write_text("0\n")
    (tmp_path / "slurm/job_8/memory.stat").write_text("")
    monkeypatch.setattr("builders.estimate.OWN_GROUPS", own)
    monkeypatch.setattr("builders.estimate.CGROUPS", {tmp_path: names, tmp_path / "none": names})
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=8 * GIB))
    assert free_memory(ALONE) == min(free, 8 * GIB)
    assert free_memory(Launch(world_size=2)) == min(free, 8 * GIB) // 2


def test_times_are_one_number():
    lengths = {0.4: "0 s", 119: "119 s", 120: "2 min", 7199: "120 min", 7200: "2 h", 172_800: "2 days"}
    assert {sec: duration(sec) for sec in lengths} == lengths
