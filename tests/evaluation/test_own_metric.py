"""A metric of one's own: one file and one YAML, used in training and by fid.py without an edit elsewhere."""

import json

import numpy as np
import pytest

from tests.programs import start
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


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine/evaluation").mkdir(parents=True)
    (tmp_path / "mine/evaluation/mine.yaml").write_text(YAML)
    (tmp_path / "brightness.py").write_text(METRIC)
    return tmp_path


def test_a_metric_is_added_by_one_file_and_one_yaml(folder):
    options = ("data=digits", *TINY[1:], "sampler.num_steps=2", "evaluation=mine", "train.eval_every=4")
    start("train.py", "--config-dir=mine", *options, "output_dir=run", folder=folder)
    scores = [line["brightness"] for line in metrics(folder / "run") if "brightness" in line]
    assert len(scores) == 2
    *_, record = json.loads((folder / "run/manifest.json").read_text())["scores"]
    assert record["metrics"] == [{"name": "Brightness", "scale": 2.0}]
    images = np.full((5, 8, 8, 1), 51, np.uint8)
    np.savez(folder / "samples.npz", images)
    asked = ("suite=mine", "samples=samples.npz", "reference=latents/digits")
    start("fid.py", "--config-dir=mine", *asked, folder=folder)
    values = json.loads((folder / "samples.scores.json").read_text())["values"]
    assert values["brightness"] == pytest.approx(2 * 0.2 / 0.305, rel=0.1)
    refused = start("fid.py", "--config-dir=mine", *asked, "kid=true", folder=folder, check=False)
    assert "kid=True has no meaning for suite=mine" in refused.stderr
