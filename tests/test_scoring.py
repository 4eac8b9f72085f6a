"""fid.py and the evaluation of a training by the ADM suite, started as a user would, with random Inception weights."""

import json

import numpy as np
import pytest
import torch

import fid as fid_program
from diffusion import random_labels
from evaluation import AdmSuite, SampleGrid, ScoreSamples
from runtime.errors import UserError
from runtime.files import sha256
from tests.evaluation.test_adm import REFERENCE, SAMPLES
from tests.inception import write_random_weights
from tests.programs import start
from tests.runs import composed, metrics, tiny_run, tiny_trainer

RGB = ("data.in_channels=3", "sampler.num_steps=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scoring")
    write_random_weights(folder / "weights.pth")
    np.savez(folder / "samples.npz", SAMPLES)
    np.savez(folder / "reference.npz", REFERENCE)
    np.savez(folder / "few.npz", REFERENCE[:5])  # an image takes half a second
    np.savez(folder / "damaged.npz", SAMPLES.repeat(6, axis=1).repeat(6, axis=2))
    whole = (folder / "damaged.npz").read_bytes()
    (folder / "damaged.npz").write_bytes(whole[:20_000] + bytes([whole[20_000] ^ 1]) + whole[20_001:])
    np.savez(folder / "changed.npz", SAMPLES)
    (folder / "changed.json").write_text(json.dumps({"samples_sha256": "of others"}))
    tiny_run(folder / "run", *RGB)
    return folder


def fid(folder, *overrides, **options):
    weights = ("weights=weights.pth", "allow_unpublished_weights=true")
    return start("fid.py", *weights, *overrides, folder=folder, **options)


@pytest.mark.slow
def test_a_run_is_scored_without_files_like_its_samples(folder):
    request = ("run=run", "num_samples=12", "batch_size=5")
    keys = ("reference=reference.npz", "exact_distances=true", "kid=true")
    from_run = fid(folder, *request, *keys, "out=direct.json", num_processes=2)
    assert "fid12" in from_run.stdout
    start("sample.py", *request, "out=drawn.npz", folder=folder)
    fid(folder, "samples=drawn.npz", *keys)
    direct, kept = (json.loads((folder / name).read_text()) for name in ("direct.json", "drawn.scores.json"))
    # a byte may round the other way in another batch
    assert direct["values"] == pytest.approx(kept["values"], rel=2e-3)
    for record in (direct, kept):
        assert {"precision12", "recall12", "kid12"} < record["values"].keys()
        drawn = record["samples"]["drawn"]
        assert (drawn["num_samples"], drawn["first_seed"], drawn["labels"]) == (12, 0, "random")
        assert drawn["guidance"]["guidance_scale"] == 1.0
        assert drawn["sampler"]["num_steps"] == 2
        assert drawn["data"]["manifest"]["encoder"] == "identity"
        assert len(drawn["weights_sha256"]) == 64
        assert drawn["weights_entry"] == "ema.safetensors"
        protocol = record["protocol"]
        assert protocol["reference"]["sha256"] == sha256(folder / "reference.npz")
        (metric,) = (m for m in protocol["metrics"] if m["name"] == "PrecisionRecall")
        assert metric.items() >= {"k": 3, "exact": True, "features": "pool"}.items()
        assert record["environment"]["versions"]["torch-fidelity"]
    assert kept["samples"]["sha256"] == kept["samples"]["drawn"]["samples_sha256"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["samples=changed.npz"], "samples=changed.npz does not match changed.json: draw it again, or remove changed"),
        (["samples=samples.npz", "num_steps=9"], "num_steps=9 does not apply to scoring"),
        (["mode=reference", "images=samples.npz", "out=x.npy"], "out=x.npy must end in .npz"),
        (["mode=reference", "images=samples.npz", "out=x.npz", "resolution=8"], "resolution=8 crops image files"),
        (["suite=digits", "samples=samples.npz"], "weights=weights.pth does not apply to suite=digits"),
        (["run=run", "num_samples=3"], "3 image(s) are too few: at least 4"),
        (["samples=samples.npz", "out=/proc/x/y.json"], "out=/proc/x/y.json cannot be written"),
        (["samples=samples.npz", "num_samples=21"], "samples=samples.npz holds 22 images, num_samples=21 must agree"),
        (["samples=damaged.npz"], "damaged.npz is damaged: Bad CRC-32"),
        (["samples=nowhere.npz"], "nowhere.npz not found"),
        (["samples=samples.npz", "reference=nowhere.npz"], "reference=nowhere.npz not found"),
        (["samples=samples.npz", "weights=nowhere.pth"], "weights=nowhere.pth not found. Expected: "),
        (["samples=samples.npz", "weights=few.npz"], "few.npz is damaged, or holds more than plain tensors"),
    ],
)  # fmt: skip
def test_mistakes_end_in_one_line(folder, monkeypatch, overrides, message):
    """Mistakes that a started process finds; tests/test_wrong_configs.py has the others."""
    monkeypatch.chdir(folder)
    before = files(folder)
    defaults = {"weights": "weights.pth", "allow_unpublished_weights": "true"}
    if "mode=reference" not in overrides:
        defaults["reference"] = "reference.npz"
    request = [f"{key}={value}" for key, value in defaults.items()] + overrides
    with pytest.raises(UserError) as error:
        fid_program.main(composed(*request, config_name="fid"))
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1
    assert files(folder) == before


def files(folder):
    """List the files, without features of references, which do not depend on the samples."""
    kept = {folder / "features", *(folder / "features").rglob("*")}
    return sorted({*folder.rglob("*")} - kept)


def adm(folder):
    files = (f"evaluation.reference={folder}/few.npz", f"evaluation.weights={folder}/weights.pth")
    scoring = ("evaluation=adm_5k", "evaluation.num_samples=6", "evaluation.allow_unpublished_weights=true")
    return (*RGB, *scoring, *files, "train.eval_every=4", "optimizer.lr=0.01", "ema.decay=0.5")


@pytest.mark.slow
def test_a_training_is_scored_at_its_intervals(folder, tmp_path):
    tiny_run(tmp_path / "run", *adm(folder))
    lines = [line for line in metrics(tmp_path / "run") if "fid6" in line]
    assert [line["step"] for line in lines] == [4, 6]
    for line in lines:
        assert {"fid6", "sfid6", "is6", "precision6", "recall6"} <= line.keys()
    assert lines[0]["fid6"] != lines[1]["fid6"]
    *_, record = json.loads((tmp_path / "run/manifest.json").read_text())["scores"]
    assert record["num_samples"] == 6
    assert record["reference"]["path"] == f"{folder}/few.npz"
    assert record["detector"]["checked"] == "names and shapes"
    request = (f"run={tmp_path}/run", "num_samples=6", "batch_size=64", f"out={tmp_path}/s.json")
    scored = fid(folder, *request, "reference=few.npz")
    assert "fid6" in scored.stdout
    scores = json.loads((tmp_path / "s.json").read_text())["values"]
    assert scores["fid6"] == pytest.approx(lines[1]["fid6"], rel=2e-3)
    with pytest.raises(ValueError, match=r"evaluation.num_samples: 6 -> 7; sampler.num_steps: 2 -> 3"):
        tiny_trainer(tmp_path / "run", *adm(folder), "evaluation.num_samples=7", "sampler.num_steps=3")
    without = [override for override in adm(folder) if not override.startswith(("evaluation", "sampler"))]
    tiny_trainer(tmp_path / "run", *without, "sampler.num_steps=3")


@pytest.mark.parametrize(("labels", "exact"), [("random", False), ("balanced", True)])
def test_a_training_scores_samples_of_the_labels_that_it_records(folder, tmp_path, labels, exact):
    keys = (f"evaluation.labels={labels}", f"evaluation.exact_distances={exact}", f"evaluation.kid={exact}")
    trainer, run = tiny_trainer(tmp_path / "run", *adm(folder), *keys, "train.sample_every=4")
    evaluators = {type(evaluator): evaluator for _, evaluator in trainer.evaluators}
    expected = {"random": random_labels(range(6), 10), "balanced": torch.arange(6)}
    assert isinstance(evaluators[ScoreSamples].suite, AdmSuite)
    assert evaluators[ScoreSamples].samples.labels().tolist() == expected[labels].tolist()
    assert evaluators[SampleGrid].samples.labels().tolist() == list(range(10)), "pictures stay balanced"
    *_, record = run.manifest()["scores"]
    metrics = {metric["name"]: metric for metric in record["metrics"]}
    assert (record["labels"], "KernelDistance" in metrics) == (labels, exact)
    assert metrics["PrecisionRecall"]["exact"] == exact
    run.unlock()


def test_what_cannot_be_scored_is_refused_before_training(folder, tmp_path):
    for override, message in (
        ("evaluation.num_samples=3", r"3 image\(s\) are too few"),
        ("data.in_channels=4", r"evaluation: images are \(8, 8, 4\), must be \(H, W, 3\)"),
    ):
        with pytest.raises(ValueError, match=message):
            tiny_trainer(tmp_path / "run", *adm(folder), override)
    assert not (tmp_path / "run").exists()
