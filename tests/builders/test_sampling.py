import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import sample
from builders.config import resolve
from builders.sampling import SampleConfig, open_model, read_request
from diffusion import random_labels
from runtime.errors import UserError
from runtime.files import sha256
from runtime.launch import ALONE
from runtime.pictures import CAPTION_HEIGHT
from tests.runs import composed, tiny_run
from training.checkpoint import find_checkpoint


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    # Far steps and a short average: its weights are neither the first ones nor the last.
    learnt = ("model.init=xavier", "optimizer.lr=1e-2", "ema.decay=0.5")
    tiny_run(folder, "data.in_channels=3", "sampler.num_steps=2", *learnt)
    return folder


def opened(run, *overrides):
    request = resolve(composed(f"run={run}", "num_samples=4", *overrides, config_name="sample"), SampleConfig)
    return open_model(*read_request(request), ALONE)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def drawn(run, output, *overrides):
    options = ("num_samples=4", "mixed_precision=no", f"out={output}", *overrides)
    sample.main(composed(f"run={run}", *options, config_name="sample"))
    with np.load(output) as arrays:
        return arrays["arr_0"]


def test_samples_are_drawn_by_the_averaged_weights(run, tmp_path):
    for step, chosen in ((6, ()), (4, ("checkpoint=4",))):
        folder = run / f"checkpoints/step_{step:08d}"
        precond = opened(run, *chosen)[0].precond
        assert not any(module.training for module in precond.modules())
        used = precond.net.state_dict()
        averaged, last = (load_file(folder / f"{name}.safetensors") for name in ("ema", "net"))
        assert all(torch.equal(used[name], tensor) for name, tensor in averaged.items())
        assert max((tensor - last[name]).abs().max() for name, tensor in averaged.items()) > 1e-3
    drawn(run, tmp_path / "a.npz", *chosen)
    record = json.loads((tmp_path / "a.json").read_text())
    assert record["weights_sha256"] == sha256(folder / "ema.safetensors")
    assert record["weights_entry"] == "ema.safetensors"


def test_sampling_defaults_to_the_configuration_of_the_run(run, tmp_path):
    (tmp_path / "guided").mkdir()
    for name in ("config.yaml", "manifest.json"):
        shutil.copy(run / name, tmp_path / "guided")
    (tmp_path / "guided/checkpoints").symlink_to(run / "checkpoints")
    config = tmp_path / "guided/config.yaml"
    config.write_text(config.read_text().replace("guidance_scale: 1.0\n", "guidance_scale: 4.0\n"))
    for chosen, scale in (((), 4.0), (("guidance_scale=2",), 2.0)):
        model, _, record = opened(tmp_path / "guided", *chosen)
        assert model.guidance.guidance_scale == record["guidance"]["guidance_scale"] == scale
        assert model.sampler.keywords["num_steps"] == 2
    model, _, record = opened(run, "num_steps=3", "first_seed=5")
    assert (model.sampler.keywords["num_steps"], record["first_seed"]) == (3, 5)


@pytest.mark.parametrize(
    ("option", "kind", "suffix"),
    [("", "random", ""), ("labels=balanced", "balanced", "_balanced"), ("class_label=3", None, "_class3")],
)
def test_labels_are_drawn_from_the_seeds_by_default_and_recorded(run, option, kind, suffix):
    options = (f"run={run}", "num_samples=40", "first_seed=7", *option.split())
    sample.main(composed(*options, config_name="sample"))
    file = run / "samples" / f"step_00000006_n40_seed7{suffix}_2steps.npz"
    balanced, one = np.arange(40) % 10, np.full(40, 3)
    expected = {"random": random_labels(range(7, 47), 10), "balanced": balanced, None: one}[kind]
    with np.load(file) as arrays:
        images, labels = arrays["arr_0"], arrays["arr_1"]
    assert labels.tolist() == expected.tolist()
    assert json.loads(file.with_suffix(".json").read_text())["labels"] == kind
    if kind == "random":  # the picture begins with one image of each class, in turn
        picture = np.asarray(Image.open(file.with_suffix(".png")))
        picture, zoom, tile = picture[CAPTION_HEIGHT:], 8, 8 * 8 + 4
        for label in range(10):
            shown = picture[2 : tile - 2 : zoom, tile * label + 2 : tile * (label + 1) - 2 : zoom]
            assert np.array_equal(shown, images[labels.tolist().index(label)])


def test_options_change_the_samples(run, tmp_path):
    plain = drawn(run, tmp_path / "plain.npz")
    options = ("num_steps=3", "guidance_scale=3", "sampler=edm", "mixed_precision=bf16", "checkpoint=4")
    for i, option in enumerate(options):
        assert (drawn(run, tmp_path / f"{i}.npz", option) != plain).any(), option


@pytest.mark.slow
def test_every_option_that_changes_the_samples_changes_their_name(run):
    options = ["num_samples=7", "first_seed=1", "class_label=1", "labels=balanced", "guidance_scale=2"]
    options += ["guidance_scale=2.0000001"]
    options += ["num_steps=3", "sampler=edm", "sampler=edm sampler.rho=5", "sampler=edm sampler.rho=4"]
    options += ["sampler=heun", "sampler=euler"]
    options += ["guidance=cfg", "guidance=cfg guidance.guidance_interval=[0.1,2]", "guidance=sparse"]
    options += ["mixed_precision=bf16", "mixed_precision=no", "decoding=official", "checkpoint=4"]
    names = {opened(run, *chosen.split())[1] for chosen in ("", *options)}
    assert len(names) == 1 + len(options)


@pytest.mark.parametrize(
    "chosen, message",
    [
        ("num_samples=null", "num_samples=null must be a number"),
        ("+sampler.num_steps=5", r"sampler={'num_steps': 5} must name a _target_"),
        ("+guidance.guidance_scale=2", r"guidance={'guidance_scale': 2} must name a _target_"),
    ],
)
def test_a_request_without_a_number_or_a_target_is_refused(run, chosen, message):
    with pytest.raises(ValueError, match=message):
        opened(run, chosen)


def test_the_weights_of_a_weak_network_are_recorded(run):
    """The run's own earlier checkpoint, if no other run is named."""
    _, _, record = opened(run, "guidance=auto", "guidance.weak_checkpoint=4")
    file = run / "checkpoints/step_00000004/ema.safetensors"
    assert record["weak_weights"] == {str(file): sha256(file)}
    assert record["guidance"]["weak_run"] == str(run)


def test_samples_are_overwritten_only_on_request_and_with_their_scores(run, tmp_path):
    output = tmp_path / "a.npz"
    drawn(run, output)
    first, record = output.read_bytes(), output.with_suffix(".json").read_text()
    (tmp_path / "a.scores.json").write_text("{}")
    others = ("first_seed=9", "class_label=1")
    message = r"a\.npz: a\.npz already exists: set overwrite=true to replace it, or another out"
    with pytest.raises(UserError, match=message):
        drawn(run, output, *others)
    assert (output.read_bytes(), output.with_suffix(".json").read_text()) == (first, record)
    drawn(run, output, *others, "overwrite=true")
    assert output.read_bytes() != first
    assert json.loads(output.with_suffix(".json").read_text())["samples_sha256"] == sha256(output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.npz", "a.png"]


@pytest.mark.parametrize(("part", "num_kept"), [("runtime.parts.np.savez", 0), ("sample.atomic_write", 2)])
def test_a_full_disk_leaves_old_samples_and_finished_parts(run, tmp_path, monkeypatch, part, num_kept):
    output, request = tmp_path / "a.npz", ("batch_size=2", "overwrite=true", "first_seed=1")
    drawn(run, output, "batch_size=2")
    before = files(tmp_path)

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(part, full)
        with pytest.raises(UserError, match="No space left on device"):
            drawn(run, output, *request)
    assert files(tmp_path) == before
    assert len(list(tmp_path.glob("a.npz.partial/0*.npz"))) == num_kept
    drawn(run, output, *request)
    assert files(tmp_path).keys() == before.keys() == {"a.json", "a.npz", "a.png"}


def test_the_pictures_of_a_training_are_decoded_as_its_samples_are(tmp_path):
    pictures = {}
    for decoding in ("rounded", "official"):
        options = ("data.in_channels=1", "train.sample_every=6", "sampler.num_steps=2")
        tiny_run(tmp_path / decoding, f"decoding={decoding}", *options)
        picture = Image.open(tmp_path / decoding / "samples" / "step_00000006.png")
        pictures[decoding] = np.asarray(picture).astype(int)
    darker = pictures["rounded"] - pictures["official"]
    assert set(np.unique(darker)) == {0, 1}


def test_a_checkpoint_is_given_by_step_name_or_path(tmp_path):
    folders = [tmp_path / "checkpoints" / f"step_{step:08d}" for step in (4, 12)]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "ema.safetensors").touch()
        (folder / "SHA256SUMS").write_text(f"{sha256(folder / 'ema.safetensors')}  ema.safetensors\n")
    assert find_checkpoint(tmp_path, None) == folders[1]
    for chosen in ("4", "00000004", "step_00000004", str(folders[0])):
        assert find_checkpoint(tmp_path, chosen) == folders[0]
    for chosen in ("5", "step_5", "nowhere"):
        with pytest.raises(FileNotFoundError, match=f"checkpoint={chosen} not found: .* has steps 4, 12$"):
            find_checkpoint(tmp_path, chosen)
