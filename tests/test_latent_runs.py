"""From photographs to samples with a small autoencoder: encode, train on the moments, sample."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import sample
import train
from builders.experiment import Experiment
from builders.references import reference_of
from builders.scoring import comparisons
from data import IdentityEncoder, KLEncoder, encode, open_latents, read_manifest
from diffusion import edm_sampler, random_labels
from runtime.errors import UserError
from tests.outside import with_json
from tests.photos import write_autoencoder, write_photographs
from tests.runs import TINY, composed, metrics, tiny_run
from training.checkpoint import latest_checkpoint
from training.run_folder import RunFolder

RUN = ("data=latents", "model/size=tiny", *TINY[1:])
DENSE = (*RUN, "sampler.num_steps=2", "model.depth=4", "model.routes=[]", "model=dit")
FP32 = "mixed_precision=no"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An autoencoder, photographs with masks, their latents, and a run on them."""
    folder = tmp_path_factory.mktemp("latents")
    vae = write_autoencoder(folder / "vae", scaling_factor=0.9)
    write_photographs(folder / "photos")
    options = (f"source={folder / 'photos'}", f"out={folder / 'latents'}", f"encoder={vae}")
    encode.main(composed(*options, "resolution=32", "num_held_out=2", config_name="encode"))
    # A large step: the average differs from the initial and the last weights.
    far = ("optimizer.lr=0.01", "ema.decay=0.5")
    tiny_run(folder / "run", *DENSE, f"data.path={folder / 'latents'}", "train.eval_every=6", *far)
    return folder


def draw(folder, *overrides):
    output = folder / "out" / "samples.npz"
    shutil.rmtree(output.parent, ignore_errors=True)
    options = (f"run={folder / 'run'}", "num_samples=5", "num_steps=2", f"out={output}", FP32, *overrides)
    sample.main(composed(*options, config_name="sample"))
    with np.load(output) as arrays:
        return arrays["arr_0"], json.loads(output.with_suffix(".json").read_text())


@pytest.mark.parametrize("decoding, by_key", [("rounded", False), ("official", False), ("official", True)])
def test_samples_are_the_decoded_output_of_the_network(folder, tmp_path, decoding, by_key):
    """Repeat all steps by hand: averaged weights, unscaled latents, decoder and rounding."""
    if by_key:
        images, record = draw(folder, f"decoding={decoding}", "first_seed=3")
    else:
        shutil.copytree(folder / "run", tmp_path / "run")
        config = tmp_path / "run" / "config.yaml"
        config.write_text(config.read_text().replace("decoding: rounded\n", f"decoding: {decoding}\n"))
        images, record = draw(tmp_path, "first_seed=3")
    assert record["decoding"] == decoding
    experiment = Experiment.of_run(RunFolder(folder / "run"))
    trained = experiment.net()
    trained.load_state_dict(load_file(latest_checkpoint(folder / "run") / "ema.safetensors"))
    precond, labels = experiment.precond(trained).eval(), random_labels(range(3, 8), 2)
    noise = torch.stack(
        [torch.randn(4, 16, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3, 8)]
    )
    with torch.no_grad():
        latents = edm_sampler(lambda x, sigma: precond(x, sigma, labels), noise, num_steps=2).float()
    net, official = KLEncoder(str(folder / "vae"), torch.device("cpu")).net, decoding == "official"
    if official:
        for parameter in net.parameters():
            parameter.data = parameter.data.bfloat16().float()
    with torch.no_grad(), torch.autocast("cpu", torch.float16, enabled=official):
        pixels = net.decode(latents / 0.9).sample.float()
    if official:  # [0, 1], times 255, truncated
        expected = (255 * ((pixels + 1) / 2).clamp(0, 1)).byte().permute(0, 2, 3, 1).numpy()
    else:
        expected = (127.5 * pixels + 128).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()
    difference = expected.astype(int) - images.astype(int)
    assert np.abs(difference).max() <= 1
    assert np.abs(difference).mean() < 0.02


def test_another_autoencoder_is_refused_and_a_moved_one_found(folder, tmp_path):
    moved = shutil.copytree(folder / "vae", tmp_path / "moved")
    other = write_autoencoder(tmp_path / "other", seed=1)
    images, record = draw(folder)
    weights_hash = read_manifest(folder / "latents").encoder_hash
    assert record["encoder"] == {"name": str(folder / "vae"), "weights_hash": weights_hash}
    again, record = draw(folder, f"encoder={moved}")
    assert np.array_equal(again, images)
    assert record["encoder"]["name"] == str(moved)
    with pytest.raises(UserError, match=r"other has weights .*: .*, or set allow_other_encoder=true"):
        draw(folder, f"encoder={other}")
    forced, record = draw(folder, f"encoder={other}", "allow_other_encoder=true")
    assert not np.array_equal(forced, images)
    assert record["encoder"]["weights_hash"] != weights_hash


def test_training_draws_grids_and_resumes_bitwise_on_moments_and_flips(folder, tmp_path, capsys):
    options = (*DENSE, f"data.path={folder / 'latents'}", "train.sample_every=3", "train.eval_every=3")
    tiny_run(tmp_path / "whole", *options)
    assert "warning: the network's input" not in capsys.readouterr().out
    tiny_run(tmp_path / "parts", *options, "train.total_steps=3")
    moved = shutil.copytree(folder / "vae", tmp_path / "moved")
    tiny_run(tmp_path / "parts", *options, f"data.encoder={moved}")
    assert metrics(tmp_path / "whole")[-1] == metrics(tmp_path / "parts")[-1]
    for name in ("net.safetensors", "ema.safetensors"):
        files = [latest_checkpoint(tmp_path / run) / name for run in ("whole", "parts")]
        assert files[0].read_bytes() == files[1].read_bytes()
    assert list((tmp_path / "whole" / "samples").glob("*.png"))


def test_a_class_without_images_is_printed_and_never_drawn(tmp_path, capsys):
    """Train on the classes 1, 10, 2 and 3, where all images of 10 are corrupt."""
    for i, name in enumerate(("1", "10", "2", "3") * 3):
        (tmp_path / "images" / name).mkdir(parents=True, exist_ok=True)
        file = tmp_path / "images" / name / f"{i}.png"
        Image.fromarray(np.full((8, 8, 3), 20 * i, np.uint8)).save(file)
        file.write_bytes(b"" if name == "10" else file.read_bytes())
    options = (f"source={tmp_path / 'images'}", f"out={tmp_path / 'latents'}", "encoder=identity")
    options += ("resolution=8", "skip_corrupt=true", "num_held_out=0")
    encode.main(composed(*options, config_name="encode"))
    printed = capsys.readouterr().out
    assert "classes: 4: 0 1, 1 10, 2, 3\n" in printed
    tiny_run(tmp_path / "run", *DENSE, f"data.path={tmp_path / 'latents'}", "train.sample_every=6")
    printed = capsys.readouterr().out
    assert "classes    4: 0 1, 1 10, 2, 3\n" in printed
    assert "warning: 1 of 4 classes have no images to train on" in printed
    for labels in ("random", "balanced"):
        output = tmp_path / f"{labels}.npz"
        options = (f"run={tmp_path / 'run'}", "num_samples=30", "num_steps=2", f"out={output}")
        sample.main(composed(*options, f"labels={labels}", config_name="sample"))
        assert set(np.load(output)["arr_1"].tolist()) == {0, 2, 3}
    with pytest.raises(UserError, match="class_label=1 has no images in the training data"):
        sample.main(composed(*options, "class_label=1", "overwrite=true", config_name="sample"))
    reference = reference_of(open_latents(tmp_path / "latents"), IdentityEncoder(), "x")
    suite = SimpleNamespace(reference=reference, metrics=[], score=lambda images, labels: labels)
    assert comparisons(suite, 7)["class means"].tolist() == [0, 2, 3, 0, 2, 3, 0]


def test_a_wrong_scale_is_a_warning_at_step_0_and_only_there(folder, tmp_path, capsys):
    latents = shutil.copytree(folder / "latents", tmp_path / "latents")
    options = (*DENSE, f"data.path={with_json(latents, 'manifest.json', scale=0.18215)}")
    tiny_run(tmp_path / "run", *options, "train.total_steps=2")
    out = capsys.readouterr().out
    assert out.count("warning: the network's input has a standard deviation of 0.") == 1
    assert "the manifest expects 1. If these are the right latents, set scale to 0." in out
    tiny_run(tmp_path / "run", *options)
    assert "warning: the network's input" not in capsys.readouterr().out


def test_training_needs_no_autoencoder_unless_it_draws(folder, tmp_path):
    latents = shutil.copytree(folder / "latents", tmp_path / "latents")
    with_json(latents, "manifest.json", encoder=str(tmp_path / "gone"))
    options = (*DENSE, f"output_dir={tmp_path / 'run'}", f"data.path={tmp_path / 'latents'}", "run_name=x")
    message = r"gone not found: must be one of .*To train without: train\.sample_every=null"
    with pytest.raises(UserError, match=message):
        train.main(composed(*options, "train.sample_every=2"))
    assert not (tmp_path / "run").exists()
    train.main(composed(*options))
    assert latest_checkpoint(tmp_path / "run")
