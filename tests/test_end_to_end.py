"""Trainings as a user starts them: by accelerate, masked on two processes, compiled."""

import json
import subprocess

import pytest

from tests.faults.killing import BIN, ENVIRONMENT
from tests.programs import start
from tests.runs import ROOT, metrics

DIGITS = ("model.hidden_size=32", "model.num_heads=4", "train.total_steps=4", "train.batch_size=32")
DIGITS += ("train.micro_batch_size=16", "train.log_every=1", "train.save_every=2", "train.eval_every=4")
DIGITS += ("train.sample_every=4", "train.mixed_precision=no", "train.compile=false", "sampler.num_steps=3")


@pytest.mark.slow
def test_accelerate_launch_resumes_and_a_finished_run_says_so(tmp_path):
    """The commands of README, started by accelerate."""

    def launch(*overrides):
        command = [BIN / "accelerate", "launch", ROOT / "train.py", "run_name=r", *DIGITS, *overrides]
        options = {"env": ENVIRONMENT, "capture_output": True, "text": True, "check": True}
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
