import json

import numpy as np
import pytest
from PIL import Image

import sample
from diffusion import random_labels
from tests.runs import composed, tiny_run
from training.sampling import find_checkpoint


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    tiny_run(folder, "data.in_channels=3", "sampler.num_steps=2")
    return folder


@pytest.mark.parametrize(
    ("options", "kind", "suffix"),
    [((), "random", ""), (("labels=balanced",), "balanced", "_balanced"), (("class_label=3",), None, "_class3")],
)
def test_labels_are_drawn_from_the_seeds_unless_told_otherwise_and_recorded(run, options, kind, suffix):
    sample.main(composed(f"run={run}", "num_samples=40", "first_seed=7", *options, config_name="sample"))
    file = run / "samples" / f"step_00000006_n40_seed7{suffix}_2steps.npz"
    expected = {
        "random": random_labels(range(7, 47), 10),
        "balanced": np.arange(40) % 10,
        None: np.full(40, 3),
    }[kind]
    with np.load(file) as arrays:
        images, labels = arrays["arr_0"], arrays["arr_1"]
    assert labels.tolist() == expected.tolist()
    assert json.loads(file.with_suffix(".json").read_text())["labels"] == kind
    if kind == "random":  # the picture begins with one image of each class, in turn
        picture = np.asarray(Image.open(file.with_suffix(".png")))
        zoom, tile = 4, 8 * 4 + 4
        for label in range(10):
            shown = picture[2 : tile - 2 : zoom, tile * label + 2 : tile * (label + 1) - 2 : zoom]
            assert np.array_equal(shown, images[labels.tolist().index(label)])


def test_the_pictures_of_a_training_are_decoded_as_its_samples_are(tmp_path):
    pictures = {}
    for decoding in ("rounded", "official"):
        options = (f"decoding={decoding}", "data.in_channels=1", "train.sample_every=6", "sampler.num_steps=2")
        tiny_run(tmp_path / decoding, *options)
        pictures[decoding] = np.asarray(Image.open(tmp_path / decoding / "samples" / "step_00000006.png")).astype(int)
    darker = pictures["rounded"] - pictures["official"]
    assert set(np.unique(darker)) == {0, 1}


def test_a_checkpoint_is_given_by_step_name_or_path(tmp_path):
    folders = [tmp_path / "checkpoints" / f"step_{step:08d}" for step in (4, 12)]
    with pytest.raises(FileNotFoundError, match="has no checkpoint yet"):
        find_checkpoint(tmp_path, None)
    for folder in folders:
        folder.mkdir(parents=True)
    assert find_checkpoint(tmp_path, None) == folders[1]
    for asked in ("4", "00000004", "step_00000004", str(folders[0])):
        assert find_checkpoint(tmp_path, asked) == folders[0]
    for asked in ("5", "step_5", "nowhere"):
        with pytest.raises(FileNotFoundError, match=rf"checkpoint={asked} not found: run=.* has steps 4, 12"):
            find_checkpoint(tmp_path, asked)
