"""The recipe of data=latents for different data and machines."""

import numpy as np
import pytest
from omegaconf.errors import InterpolationResolutionError

from builders import recipe
from data import LatentManifest
from runtime.provenance import flatten
from tests.latents import write_latents
from tests.runs import TINY, tiny_run, validated, written


def latents_of(folder, count=40, size=64, channels=3):
    stored, labels = np.zeros((count, channels, size, size)), np.arange(count) % 2
    write_latents(folder, stored, labels, dtype="float32", num_held_out=4)
    return f"data.path={folder}"


@pytest.fixture
def latents(tmp_path):
    return latents_of(tmp_path / "latents")


def chosen(*overrides):
    return flatten(written("data=latents", *overrides))


def test_a_small_set_gets_a_small_network_and_minutes_of_steps(latents):
    values = chosen(latents)
    expected = {"model.patch_size": 4, "model.hidden_size": 128, "model.depth": 8, "model.num_heads": 4}
    expected |= {"train.batch_size": 4, "train.total_steps": 1200, "train.log_every": 30}
    expected |= {"train.save_every": 150, "train.eval_every": 300, "train.sample_every": 150}
    expected |= {"optimizer.lr": 1e-3, "optimizer.betas": [0.9, 0.99], "ema.decay": 0.999}
    assert values.items() >= expected.items()


def test_the_recipe_follows_overridden_keys(latents):
    values = chosen(latents, "train.total_steps=80", "train.batch_size=7", "model/size=s_2")
    expected = {"train.save_every": 10, "train.eval_every": 20, "train.sample_every": 10}
    expected |= {"train.log_every": 2, "optimizer.lr": 1e-4, "optimizer.betas": [0.9, 0.999]}
    assert values.items() >= expected.items()
    assert chosen(latents, "train.total_steps=3")["train.sample_every"] == 1


SETS = [(1000, 384, 64, 5000), (50_000, 384, 256, 59_000)]
SETS += [(100_004, 768, 256, 117_000), (1_281_167, 1152, 256, 400_000)]


@pytest.mark.parametrize(("count", "width", "batch_size", "total_steps"), SETS)
def test_a_gpu_recipe_grows_with_the_data(latents, monkeypatch, count, width, batch_size, total_steps):
    manifest = LatentManifest(count, (4, 32, 32), "float16", "samples", 2, "identity", num_held_out=4)
    monkeypatch.setattr(recipe, "device_type", lambda: "cuda")
    monkeypatch.setattr(recipe, "read_manifest", lambda path: manifest)
    values = chosen(latents)
    expected = {"model.hidden_size": width, "train.batch_size": batch_size, "model.patch_size": 2}
    assert values.items() >= (expected | {"train.total_steps": total_steps, "train.num_workers": 4}).items()
    assert values["train.save_every"] <= 5000
    assert (values["ema.decay"] == 0.9999) == (total_steps > 10_000)


def test_patches_leave_about_256_tokens():
    patch_sizes = {8: 1, 28: 2, 32: 2, 34: 2, 37: 1, 62: 2, 96: 6}
    assert {size: recipe.patch_size(size) for size in patch_sizes} == patch_sizes


def test_a_batch_is_shared_by_all_processes(latents, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert chosen(latents)["train.batch_size"] == 6
    assert chosen(latents, "train.batch_size=9")["train.batch_size"] == 9


@pytest.mark.parametrize("encoder", ["elsewhere/unknown", "no--name/at-all", "/no/such/folder"])
def test_no_pictures_where_the_encoder_would_have_to_be_downloaded(tmp_path, encoder):
    latents = latents_of(tmp_path / "latents")
    assert chosen(latents)["train.sample_every"] == 150
    assert chosen(latents, f"data.encoder={encoder}")["train.sample_every"] is None


def test_a_run_keeps_its_recipe_on_another_machine(tmp_path, monkeypatch):
    latents = latents_of(tmp_path / "small", size=16)
    options = ("data=latents", latents, *TINY[1:3], "train.total_steps=4", "train.sample_every=null")
    tiny_run(tmp_path / "run", *options, "train.compile=false")
    resumed = ("data=latents", latents, f"output_dir={tmp_path / 'run'}", "train.compile=false")
    before = flatten(written(*resumed))
    assert before["model.hidden_size"] == 32, "as in the run, not as on the command line"
    monkeypatch.setattr(recipe, "device_type", lambda: "cuda")
    assert flatten(written(*resumed)) == before
    assert flatten(written(*resumed[:2]))["model.hidden_size"] == 384, "another run"


def test_other_data_do_not_choose_a_size():
    with pytest.raises(InterpolationResolutionError, match="ema=latents need data=latents"):
        validated("model/size=auto", "data=digits")
