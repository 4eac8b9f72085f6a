"""The programs as a user starts them: train, resume, sample, score, sweep; one process and two."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from diffusion import random_labels
from tests.programs import start
from tests.runs import ROOT, metrics

BIN = Path(sys.executable).parent

DIGITS = ("model.hidden_size=32", "model.num_heads=4", "train.total_steps=4", "train.batch_size=32")
DIGITS += ("train.micro_batch_size=16", "train.log_every=1", "train.save_every=2", "train.eval_every=4")
DIGITS += ("train.sample_every=4", "train.mixed_precision=no", "train.compile=false", "sampler.num_steps=3")
DIGIT_SCORES = ("suite=digits", "reference=latents/digits")


@pytest.mark.slow
def test_two_processes_train_sample_and_score(tmp_path):
    """tests/test_two_processes.py compares their numbers with those of one."""
    where = {"folder": tmp_path, "num_processes": 2}
    start("train.py", "run_name=r", *DIGITS, "evaluation=digits", **where)
    start("sample.py", "run=runs/r", "num_samples=23", "batch_size=4", "output=out/s.npz", **where)
    result = start("fid.py", *DIGIT_SCORES, "samples=out/s.npz", **where)
    for word in ("held-out real", "class means", "fd_pixel", "label_accuracy", "out/s.scores.json"):
        assert word in result.stdout
    run, out = tmp_path / "runs/r", tmp_path / "out"
    assert json.loads((run / "manifest.json").read_text())["num_processes"] == 2
    assert (run / "samples/step_00000004.png").exists()
    with np.load(out / "s.npz") as samples:
        assert samples["arr_0"].shape == (23, 8, 8, 1)
        assert samples["arr_1"].tolist() == random_labels(range(23), 10).tolist()
        np.savez(tmp_path / "others.npz", arr_0=samples["arr_0"], arr_1=samples["arr_1"] + 50)
    refused = start("fid.py", *DIGIT_SCORES, "samples=others.npz", folder=tmp_path, check=False)
    assert "must be a class of the reference, from 0 to 9" in refused.stderr
    assert {path.name for path in out.iterdir()} == {"s.json", "s.npz", "s.png", "s.scores.json"}


@pytest.mark.slow
def test_accelerate_launch_resumes_and_a_finished_run_says_so(tmp_path):
    """The commands of README, started by accelerate."""

    def launch(*overrides):
        command = [BIN / "accelerate", "launch", ROOT / "train.py", "run_name=r", *DIGITS, *overrides]
        environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}
        options = {"env": environment, "capture_output": True, "text": True, "check": True}
        result = subprocess.run(command, cwd=tmp_path, **options)
        return result.stdout, [line["step"] for line in metrics(tmp_path / "runs/r")]

    short = ("train.sample_every=null", "train.eval_every=null")
    launch(*short, "train.total_steps=2")
    resumed, steps = launch(*short)
    assert "resumed at step 2" in resumed
    assert "runs/r is finished. Sample from it: python sample.py run=runs/r " in resumed
    assert steps == [1, 2, 3, 4]
    again, steps = launch(*short)
    assert "runs/r is finished: raise train.total_steps to continue it" in again
    assert steps == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_sweep_runs_each_job_in_its_own_folder_as_if_alone_and_continues(tmp_path):
    short = (*DIGITS, "train.sample_every=null", "train.eval_every=null")
    start("train.py", "-m", "model=dit,tread", "seed=0,1", *short, folder=tmp_path)
    folders = sorted((tmp_path / "runs").glob("*/"))
    assert len(folders) == 4
    assert all(re.fullmatch(r"[\w.-]+", folder.name) for folder in folders)  # usable as run=runs/NAME
    start("train.py", "model=tread", "seed=1", "run_name=alone", *short, folder=tmp_path)
    (last,) = [folder for folder in folders if folder.name.startswith("tread") and "seed1" in folder.name]
    assert metrics(last) == metrics(tmp_path / "runs/alone")
    configs = [yaml.safe_load((folder / "config.yaml").read_text()) for folder in folders]
    jobs = {(config["method"], config["seed"]) for config in configs}
    assert jobs == {(method, seed) for method in ("dit", "tread") for seed in (0, 1)}
    again = start("train.py", "-m", "model=dit,tread", "seed=0,1", *short, folder=tmp_path)
    assert again.stdout.count("is finished: raise train.total_steps") == 4
    start("train.py", "-m", "optimizer.lr=1e-4,3e-4", *short, folder=tmp_path)
    assert len(list((tmp_path / "runs").glob("*/"))) == 7


@pytest.mark.slow
def test_masked_training_compiles_and_agrees_on_two_processes(tmp_path):
    """All that changes the length of a sequence at once; blocks that fall back to eager are an error."""
    options = ("data=digits_masked", *DIGITS, "train.total_steps=8", "train.eval_every=8")
    options += ("train.micro_batch_size=4", "train.batch_size=8", "train.sample_every=null")
    options += ("model.patch_size=2", "model/block=modern", "model.num_prefix_tokens=2")
    options += ("model.gradient_checkpointing=true", "model.fp32_after_route=true")
    options += ("model.routes.0.selection_ratio=0.6", "routing.schedule=linear")
    options += ("routing.end_factor=0.5", "routing.num_levels=2")
    start("train.py", "run_name=eager", *options, folder=tmp_path)
    start("train.py", "run_name=two", *options, num_processes=2, folder=tmp_path)
    start("train.py", "run_name=compiled", *options, "train.compile=true", folder=tmp_path)
    eager = metrics(tmp_path / "runs/eager")
    assert len({line.get("selection_ratio") for line in eager}) > 2
    assert all(line.get("num_forced_bypassed", 0) == 0 for line in eager)
    for name in ("two", "compiled"):
        for line, other in zip(eager, metrics(tmp_path / "runs" / name), strict=True):
            for key in line:
                assert other[key] == pytest.approx(line[key], rel=1e-4), (name, key)


@pytest.mark.slow
def test_compiled_training_resumes_bitwise(tmp_path):
    short = (*DIGITS, "train.sample_every=null", "train.compile=true", "train.eval_every=2")
    start("train.py", "run_name=whole", *short, folder=tmp_path)
    start("train.py", "run_name=parts", *short, "train.total_steps=2", folder=tmp_path)
    start("train.py", "run_name=parts", *short, folder=tmp_path)
    whole, parts = (tmp_path / "runs" / name for name in ("whole", "parts"))
    assert json.loads((whole / "manifest.json").read_text())["resolved"]["compile"]
    assert metrics(whole) == metrics(parts)
    for file in ("net", "ema", "optimizer"):
        path = f"checkpoints/step_00000004/{file}.safetensors"
        assert (whole / path).read_bytes() == (parts / path).read_bytes()


@pytest.mark.parametrize(
    ("program", "overrides", "message"),
    [
        (
            "train.py",
            ["model/size=huge"],
            "Could not find 'model/size/huge' Available options in 'model/size': ",
        ),
        ("sample.py", ["run=nowhere"], "run=nowhere is not a run directory"),
        ("fid.py", ["samples=floats.npz", *DIGIT_SCORES], "arr_0 is float64 (4, 8, 8, 1), must be uint8"),
    ],
)
def test_a_mistake_ends_in_one_line_and_no_traceback(tmp_path, program, overrides, message):
    np.savez(tmp_path / "floats.npz", np.zeros((4, 8, 8, 1)), np.zeros(4))
    (tmp_path / "latents/digits").mkdir(parents=True)
    result = start(program, *overrides, folder=tmp_path, check=False)
    assert result.returncode == 1
    (line,) = [line for line in result.stderr.splitlines() if line.strip()]
    assert line.startswith("error: ") and message in line
    assert not (tmp_path / "runs").exists()
