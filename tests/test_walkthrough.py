"""The six commands of README from a folder of pictures to samples and scores, on pictures that are made here.

They are run as they stand, but for keys that are added to make them short, and for the weights of the
Inception network, which are drawn at random where README downloads them.
"""

import json
import re
import shlex

import numpy as np
import pytest
from PIL import Image

from tests.programs import start
from tests.runs import ROOT

RANDOM = ("weights=evaluation_files/inception-random.pth", "allow_unpublished_weights=true")
SHORTER = {
    "train.py": ("train.total_steps=8", "train.compile=false", "sampler.num_steps=2"),
    "sample.py": ("num_steps=2", "compile=false"),
    "fid.py": ("num_steps=2", "compile=false", *RANDOM),
}


def commands():
    """The program and the arguments of each line of the section."""
    section = (ROOT / "README.md").read_text().split("## Your own images")[1]
    lines = re.search(r"```sh\n(.*?)```", section, flags=re.S)[1].splitlines()
    return [shlex.split(re.sub(r"^accelerate launch |^python ", "", line)) for line in lines]


def write_pictures(folder):
    """Write 20 pictures of two classes, of several sizes."""
    rng = np.random.default_rng(0)
    for i in range(20):
        place = folder / ("dark" if i % 2 else "light")
        place.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 100, (60 + i, 90, 3)) + (0 if i % 2 else 150)
        Image.fromarray(pixels.astype(np.uint8)).save(place / f"{i}.png")


@pytest.mark.slow
def test_six_commands_lead_from_pictures_to_scores(tmp_path):
    write_pictures(tmp_path / "IMAGES")
    assert len(commands()) == 6
    for program, *arguments in commands():
        if program == "-m":
            program, arguments = f"-m {arguments[0]}", arguments[1:]
        arguments = [argument.replace("inception", "random") for argument in arguments]
        more = SHORTER.get(program, ())
        if "mode=reference" in arguments:
            more = RANDOM
        start(program, *arguments, *more, folder=tmp_path)
    run = tmp_path / "runs/tread_auto_latents_seed0"
    assert len([*(run / "samples").glob("step_????????.png")]) == 8
    (samples,) = (file for file in (run / "samples").glob("*.npz"))
    with np.load(samples) as arrays:
        assert arrays["arr_0"].shape == (100, 32, 32, 3)
    (scores,) = (run / "scores").glob("*.json")
    found = json.loads(scores.read_text())
    assert found["num_images"] == 200
    assert "fid200_of_random_weights" in found["values"]
    assert any("these scores mean nothing" in warning for warning in found["warnings"])
