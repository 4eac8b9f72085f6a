"""A metric of one's own: one file and one YAML, used in training and by fid.py without an edit elsewhere."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.programs import ROOT
from tests.runs import TINY, metrics

METRIC = """
from evaluation.metrics import Metric
from evaluation.statistics import AllFeatures


class Brightness(Metric):
    keys = ("brightness",)
    needs = ((AllFeatures, "pixels"),)

    def __init__(self, scale: float):
        self.scale = scale

    def __call__(self, reference, samples):
        theirs, ours = (found[AllFeatures, "pixels"].features for found in (reference, samples))
        return {"brightness": self.scale * float(ours.mean() / theirs.mean())}
"""
YAML = """
_target_: evaluation.Suite
num_samples: 6
labels: random
reference: null
detector: {_target_: evaluation.PixelDetector}
metrics:
  brightness: {_target_: brightness.Brightness, scale: 2.0}
"""


def program(name, *arguments, folder):
    """Start a program apart, with the folder of the metric on Python's path."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, ROOT / name, "--config-dir=mine", *arguments]
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=300)


def test_a_metric_is_added_by_one_file_and_one_yaml(tmp_path):
    (tmp_path / "mine/evaluation").mkdir(parents=True)
    (tmp_path / "mine/evaluation/mine.yaml").write_text(YAML)
    (tmp_path / "brightness.py").write_text(METRIC)
    options = ("data=digits", *TINY[1:], "sampler.num_steps=2", "evaluation=mine", "train.eval_every=4")
    program("train.py", *options, "output_dir=run", folder=tmp_path)
    assert len([line for line in metrics(tmp_path / "run") if "brightness" in line]) == 2
    *_, record = json.loads((tmp_path / "run/manifest.json").read_text())["scores"]
    assert record["metrics"] == [{"name": "Brightness", "scale": 2.0}]
    np.savez(tmp_path / "samples.npz", np.full((5, 8, 8, 1), 51, np.uint8))
    asked = ("suite=mine", "samples=samples.npz", "reference=latents/digits")
    program("fid.py", *asked, folder=tmp_path)
    values = json.loads((tmp_path / "samples.scores.json").read_text())["values"]
    assert values["brightness"] == pytest.approx(2 * 0.2 / 0.305, rel=0.1)
