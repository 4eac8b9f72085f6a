"""A sibling of each choice is one file and one YAML file: used by the programs without an edit elsewhere."""

import json
import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from builders.sampling import open_run
from diffusion import Branch, EDMPath, on_path
from tests.programs import ROOT, start
from tests.runs import metrics
from tests.siblings.toy import VelocityPrecond

CONFIGS = ROOT / "tests/siblings/configs"
TOYS = f"--config-dir={CONFIGS}"
CHOICES = ("diffusion=toy", "sampler=toy", "guidance=toy", "model/router=toy", "evaluation=toy")
CHOICES += ("data=toy", "optimizer=toy", "ema=toy")
SHORT = ("train.total_steps=2", "train.save_every=2", "train.eval_every=2", "train.sample_every=2")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose every choice is a sibling of our own."""
    folder = tmp_path_factory.mktemp("siblings")
    options = ("train.compile=false", "train.mixed_precision=no", f"data.path={folder}/digits")
    model = ("model=toy", "~model/size")
    ended = start("train.py", TOYS, *model, *CHOICES, *SHORT, *options, f"output_dir={folder}/run")
    assert f"Sample from it: python sample.py {TOYS} run={folder}/run " in ended.stderr + ended.stdout
    return folder / "run"


@pytest.fixture
def opened(run, monkeypatch):
    folders = (ROOT / "configs", CONFIGS)
    for place in ("builders.experiment", "runtime.nodes"):
        monkeypatch.setattr(f"{place}.config_folders", lambda: folders)
    return open_run(run)


def test_a_run_trains_and_is_scored_by_siblings(run):
    state = load_file(run / "checkpoints/step_00000002/optimizer.safetensors")
    assert {name.rpartition("/")[2] for name in state} == {"average"}
    ema = json.loads((run / "checkpoints/step_00000002/state.json").read_text())["ema"]
    assert ema["num_updates"] == 2
    keys = {key for line in metrics(run) for key in line}
    assert {"loss", "val_loss_dense_ema"} <= keys
    assert any(key.startswith("brightness") for key in keys)
    scores = json.loads((run / "manifest.json").read_text())["scores"]
    assert [{"name": "Brightness", "scale": 255.0}] in [entry.get("metrics") for entry in scores]


def test_blocks_and_the_target_of_an_alignment_come_from_outside(tmp_path):
    shape = ("model.hidden_size=32", "model.patch_size=2", "model.depth=8", "model.num_heads=2")
    options = ("train.compile=false", "train.mixed_precision=no", f"output_dir={tmp_path}/run")
    keys = ("model=tread", "model/block=toy", "alignment=toy", "data=synthetic", *shape, *SHORT)
    start("train.py", TOYS, *keys, "train.log_every=1", *options)
    weights = load_file(tmp_path / "run/checkpoints/step_00000002/net.safetensors")
    assert weights["projector.weight"].shape == (1, 32)
    assert weights["blocks.7.norm2.bias"].shape == (32,)
    losses = [line["alignment_loss"] for line in metrics(tmp_path / "run") if "loss" in line]
    assert len(losses) == 2 and all(loss > 0 for loss in losses)
    start("sample.py", TOYS, f"run={tmp_path}/run", "num_samples=2", "num_steps=1", f"out={tmp_path}/a.npz")


@pytest.mark.parametrize("choices", [(), ("sampler=edm", "guidance=cfg", "num_steps=2")])
def test_samples_are_drawn_by_siblings_or_by_others_in_their_place(run, choices):
    output = run.parent / f"drawn{len(choices)}.npz"
    start("sample.py", TOYS, f"run={run}", "num_samples=10", *choices, f"out={output}")
    record = json.loads(output.with_suffix(".json").read_text())
    target = "diffusion.edm_sampler" if choices else "tests.siblings.toy.euler_sampler"
    assert record["sampler"]["_target_"] == target
    with np.load(output) as arrays:
        assert arrays["arr_0"].shape == (10, 8, 8, 1)
    if not choices:
        start("fid.py", TOYS, "suite=toy", f"samples={output}", f"reference={run.parent}/digits")
        (key,) = json.loads(output.with_suffix(".scores.json").read_text())["values"]
        assert key.startswith("brightness")


def test_a_run_opens_in_three_lines_of_python(opened):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "diffusion/README.md").read_text(), flags=re.S)
    assert example.count("runs/tread_tiny_digits_seed0") == 1
    exec(example.replace("runs/tread_tiny_digits_seed0", str(opened.path)), names := {})
    assert names["latents"].shape == (10, 1, 8, 8)
    assert names["latents"].isfinite().all()
    assert names["images"].shape == (10, 8, 8, 1)
    assert (opened.path / "digits.png").is_file()


@dataclass(frozen=True)
class ScaledPath(EDMPath):
    """x_t = x_0 + scale * t * eps."""

    scale: float = 1.0

    def sigma(self, t):
        return self.scale * t

    def time_at(self, noise_to_signal):
        return noise_to_signal / self.scale


def test_paths_of_one_class_differ_by_their_parameters():
    x, t = torch.zeros(1, 1, 1, 1), torch.tensor(0.5)
    assert EDMPath() == EDMPath()
    assert on_path(lambda x, t: t, ScaledPath(scale=2), ScaledPath(scale=2))(x, t) == 0.5
    assert on_path(lambda x, t: t, ScaledPath(scale=1), ScaledPath(scale=2))(x, t) == 1


def test_guidance_of_a_sibling_takes_routing_as_its_weak_branch(opened):
    x, labels, t = torch.randn(4, 1, 8, 8), torch.arange(4), torch.tensor(0.5)
    strong, weak = (opened.precond(x, t, labels, routing=r) for r in (None, opened.guidance.routing))
    assert isinstance(opened.precond, VelocityPrecond)
    assert not torch.equal(strong, weak)
    guided = opened.guidance(Branch(opened.precond, labels))(x, t)
    torch.testing.assert_close(guided, weak + 1.5 * (strong - weak))
