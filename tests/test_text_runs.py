"""Runs on scenes: train, resume, sample prompts, score; one key switches to classes."""

import json
import re
import shutil
from contextlib import redirect_stdout

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import fid
import sample
from builders.sampling import open_run
from data import read_manifest
from runtime.errors import UserError
from runtime.scenes import KINDS, parse
from tests.programs import start
from tests.runs import composed, interrupted, metrics, tiny_run, tiny_trainer
from training.fit import run_training

SMALL = ("model/size=tiny", "model.hidden_size=32", "model.depth=6", "train.batch_size=8")
SMALL += ("train.total_steps=6", "train.log_every=3", "train.save_every=2", "train.eval_every=3")
SMALL += ("train.sample_every=6", "sampler.num_steps=2")


def scene_run(folder, *overrides):
    return ("data=scenes", f"data.path={folder / 'scenes'}", "data.num_images=192", *SMALL, *overrides)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs of each conditioning, and what they print."""
    folder = tmp_path_factory.mktemp("text")
    for name, model in (("prefix", "tread"), ("cross", "tread"), ("class", "dit")):
        with redirect_stdout((folder / f"{name}.txt").open("w")) as printed, printed:
            tiny_run(folder / name, *scene_run(folder, f"model/conditioning={name}", f"model={model}"))
    return folder


def draw(folder, run, *overrides):
    out = folder / "out.npz"
    options = (f"run={folder / run}", f"out={out}", "overwrite=true", "mixed_precision=no", "num_steps=2")
    sample.main(composed(*options, *overrides, config_name="sample"))
    with np.load(out) as arrays:
        return arrays["arr_0"], arrays["arr_1"], json.loads(out.with_suffix(".json").read_text())


def weights(run):
    return load_file(run / "checkpoints/step_00000006/net.safetensors")


@pytest.mark.parametrize("name", ["prefix", "cross"])
def test_a_run_resumes_bitwise(name, folder):
    keys = scene_run(folder, f"model/conditioning={name}", "model=tread")
    stopped = folder / f"stopped_{name}"
    interrupted(*tiny_trainer(stopped, *keys), at=4)
    run_training(*tiny_trainer(stopped, *keys))
    assert metrics(folder / name)[-1] == metrics(stopped)[-1]
    whole, resumed = weights(folder / name), weights(stopped)
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def test_the_summary_names_what_conditions_the_network(folder):
    ends = {"prefix": "captions of 8 tokens as a prefix", "cross": "as keys of cross-attention"}
    for conditioning, end in (ends | {"class": "7 classes"}).items():
        printed = (folder / f"{conditioning}.txt").read_text()
        assert len(re.findall(f"^condition.*{end}$", printed, flags=re.M)) == 1, conditioning


def test_one_key_switches_between_classes_and_captions(folder):
    nets = {name: open_run(folder / name).precond.net for name in ("class", "prefix", "cross")}
    assert nets["class"].num_classes == 7 and nets["class"].text is None
    assert nets["class"].y_embedder is not None and nets["prefix"].y_embedder is None
    assert nets["prefix"].num_prefix_tokens == 9 and nets["cross"].num_prefix_tokens == 0
    losses = [metrics(folder / name)[-1]["val_loss_dense"] for name in nets]
    assert all(np.isfinite(losses)) and len(set(losses)) == 3


def test_a_prompt_is_drawn_with_its_text(folder):
    prompt = "Two red squares left of a blue circle"
    images, texts, record = draw(folder, "prefix", f"prompt='{prompt}'", "num_samples=3")
    assert images.shape == (3, 32, 32, 3) and texts.tolist() == [prompt] * 3
    assert record["prompt"] == prompt and record["labels"] == "balanced"
    picture = np.asarray(Image.open(folder / "out.png"))
    assert len(picture) > 68 + 14, "the prompt takes several lines"
    other, _, _ = draw(folder, "prefix", "prompt='a green diamond'", "num_samples=3")
    assert not np.array_equal(images, other)


def test_a_file_of_prompts_is_drawn_in_turn(folder):
    prompts = ["a circle", "three squares"]
    (folder / "prompts.txt").write_text("\n".join(prompts) + "\n")
    images, texts, record = draw(folder, "cross", f"prompts={folder / 'prompts.txt'}", "num_samples=4")
    assert texts.tolist() == prompts * 2 and record["prompts"]["file"] == str(folder / "prompts.txt")
    alone, _, _ = draw(
        folder, "cross", "prompt='three squares'", "num_samples=1", "first_seed=1", "batch_size=4"
    )
    assert np.abs(images[1].astype(int) - alone[0]).max() <= 1


def test_without_prompts_held_out_captions_are_drawn_from_the_seeds(folder):
    _, texts, _ = draw(folder, "prefix", "num_samples=20")
    held_out = read_manifest(folder / "scenes").text["prompts"]
    assert {*texts.tolist()} <= {*held_out} and len({*texts.tolist()}) > 1
    _, later, _ = draw(folder, "prefix", "num_samples=5", "first_seed=10")
    assert later.tolist() == texts[10:15].tolist()


def test_a_weak_network_with_another_vocabulary_is_refused(folder, tmp_path):
    """Of the same size, so that no shape differs."""
    weak = shutil.copytree(folder / "prefix", tmp_path / "weak")
    guided = ("guidance=auto", f"guidance.weak_run={weak}", "guidance_scale=2", "num_samples=2")
    draw(folder, "prefix", *guided)
    record = json.loads((weak / "manifest.json").read_text())
    record["data"]["manifest"]["text"]["words"].reverse()
    (weak / "manifest.json").write_text(json.dumps(record))
    with pytest.raises(
        (UserError, SystemExit, ValueError), match="must encode captions as the sampled network"
    ):
        draw(folder, "prefix", *guided)


def score(folder, *overrides):
    out = folder / "scores.json"
    keys = ("suite=scenes", f"reference={folder / 'scenes'}", f"out={out}", "overwrite=true")
    fid.main(composed(*keys, *overrides, config_name="fid"))
    return json.loads(out.read_text())


def test_attributes_of_samples_and_of_real_images_are_scored(folder, capsys):
    drawn = ("num_samples=14", "num_steps=2", "mixed_precision=no")
    of_run = score(folder, f"run={folder / 'prefix'}", *drawn)
    assert of_run["comparisons"]["real held-out"]["accuracy"] == 1
    assert of_run["values"]["accuracy"] == 0 and np.isfinite(of_run["values"]["fd_cells"])
    draw(folder, "prefix", "num_samples=14")
    of_file = score(folder, f"samples={folder / 'out.npz'}")
    assert of_file["values"] == pytest.approx(of_run["values"], abs=0.05)
    assert {parse(text).kind for text in np.load(folder / "out.npz")["arr_1"].tolist()} <= {*KINDS}
    draw(folder, "class", "num_samples=14")
    without = score(folder, f"samples={folder / 'out.npz'}")
    assert {*without["values"]} == {"fd_cells", "fd_cells_held_out", "precision", "recall"}
    assert without["left_out"]["accuracy"] == "the samples were not drawn from prompts"


def test_scores_are_logged_during_training(folder):
    keys = ("evaluation=scenes", "evaluation.num_samples=6", "train.eval_every=6", "train.sample_every=null")
    tiny_run(folder / "scored", *scene_run(folder, *keys))
    assert metrics(folder / "scored")[-1]["accuracy"] == 0


@pytest.mark.parametrize(
    ("run", "options", "message"),
    [
        ("class", ["prompt='a circle'"], "prompt=a circle does not apply: the network takes no captions"),
        ("prefix", ["class_label=1"], "class_label=1 must be null: the network takes captions"),
        ("prefix", ["prompt='a dog'"], "dog must be among the words of the data: a, two, three"),
        ("prefix", ["prompts=missing.txt"], "prompts=missing.txt cannot be read"),
        ("prefix", ["prompt='a circle'", "prompts=missing.txt"], "must not be given together"),
    ],
)
def test_wrong_requests_are_one_clear_error(run, options, message, folder):
    with pytest.raises((UserError, SystemExit), match=message):
        draw(folder, run, *options)


@pytest.mark.slow
def test_images_follow_their_prompts_after_1200_steps(tmp_path):
    """The demo of scenes, shortened. Captions that have no effect give about 0.1 and 0.02."""
    keys = ("model=tread", "data=scenes", "data.num_images=5000", "run_name=demo")
    keys += ("train.total_steps=1200", "train.eval_every=null", "train.sample_every=null")
    start("train.py", *keys, folder=tmp_path, max_sec=1200)
    keys = ("suite=scenes", "run=runs/demo", "reference=latents/scenes", "labels=balanced")
    start("fid.py", *keys, "num_samples=140", "num_steps=8", "out=scores.json", folder=tmp_path)
    scores = json.loads((tmp_path / "scores.json").read_text())["values"]
    assert scores["accuracy_one_object"] > 0.3
    assert scores["accuracy_colours"] > 0.15
