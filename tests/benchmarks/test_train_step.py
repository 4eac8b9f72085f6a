"""The plain step computes the same step, the comparison detects differences, records name their origin."""

import re

import pytest
import torch

from benchmarks import runs, sampling, train_step
from benchmarks.results import Record, read_results
from models import cost_of
from runtime.errors import UserError
from runtime.provenance import environment
from tests.networks import PAPER, small_dit
from tests.programs import start
from tests.runs import ROOT, validated

CPU = torch.device("cpu")
SMALL = ("model.hidden_size=32", "model.num_heads=4", "model.depth=7", "train.batch_size=4")
FP32 = ("train.mixed_precision=no", "train.compile=false", "train.num_workers=0")


@pytest.fixture
def trainer_of(tmp_path):
    """Build the trainer of a small dense or routed run as the benchmark does."""

    def build(kind, *overrides, input_size=8, mask_coverage=None):
        setting = runs.Setting("test", (*SMALL, *FP32, *overrides), input_size, mask_coverage)
        if not (tmp_path / "latents").exists():
            runs.write_latents(tmp_path / "latents", setting)
        return runs.build(tmp_path, runs.overrides_of(setting, kind, tmp_path))

    return build


def errors(trainer, spoil=lambda step: None):
    runs.perturb(trainer.net)
    batch = train_step._latents(trainer, 4)
    step = train_step.plain_step(trainer, batch)
    spoil(step)
    return train_step.errors(trainer, batch, step)


@pytest.mark.parametrize("kind", ["dense", "routed"])
def test_the_plain_step_has_the_same_loss_and_gradients(trainer_of, kind):
    trainer, row = trainer_of(kind)
    assert bool(row["routes"]) == (kind == "routed")
    loss_error, gradient_error = errors(trainer)
    assert loss_error < 1e-6
    assert gradient_error < 1e-5


def longer_window(step):
    step.net.end += 1


def fewer_tokens(step):
    step.num_kept -= 1


@torch.no_grad()
def another_weight(step):
    step.net.blocks[3].attn.proj.bias += 1


def test_the_comparison_detects_a_different_step(trainer_of):
    trainer, _ = trainer_of("routed")
    for spoil in (longer_window, fewer_tokens, another_weight):
        trainer.net.zero_grad()
        differences = errors(trainer, spoil)
        assert all(a > b for a, b in zip(differences, train_step.TOLERANCES["no"], strict=True)), spoil


def test_the_plain_step_learns(trainer_of):
    trainer, _ = trainer_of("routed")
    step = train_step.plain_step(trainer, train_step._latents(trainer, 4))
    weights, averages = ([p.clone() for p in net.parameters()] for net in (step.net, step.average))
    step()
    assert any(not torch.equal(*pair) for pair in zip(weights, step.net.parameters(), strict=True))
    moved = [(a - b).abs().max() for a, b in zip(averages, step.average.parameters(), strict=True)]
    assert 0 < max(moved) < 1e-4


def test_utilisation_is_of_the_model_flops_at_the_median_time(trainer_of):
    """FLOPs exclude what checkpointing recomputes."""
    trainer, row = trainer_of("routed")
    assert row["model_tflop"] == pytest.approx(4 * cost_of(trainer.net).routed_training_flops / 1e12)
    _, twice = trainer_of("routed", "model.gradient_checkpointing=true")
    assert twice["gradient_checkpointing"] and twice["model_tflop"] == row["model_tflop"]
    columns = train_step.timing([0.2, 0.1, 0.5], row | {"model_tflop": 3.0}, {"no": (60e12, "specified")})
    expected = {"ms": 200, "ms_least": 100, "ms_most": 500, "n": 3, "images_per_sec": 20, "utilisation": 0.25}
    assert {key: columns[key] for key in expected} == pytest.approx(expected)


def test_the_dense_twin_differs_in_its_routes_alone(trainer_of):
    routes = ("model/routes=max_speed", "model.routes.0.selection_ratio=0.6", "routing.off_last_steps=null")
    assert trainer_of("routed", *routes)[1]["routes"] == "1-6:0.6"
    dense = trainer_of("dense", *routes)[1]
    assert dense["routes"] == "" and dense == trainer_of("dense")[1]


def test_windows_that_grow_for_masks_are_counted(trainer_of):
    row, dense = (trainer_of(kind, mask_coverage=0.75)[1] for kind in ("routed", "dense"))
    assert row["predicted_speedup"] == pytest.approx(dense["model_tflop"] / row["model_tflop"])
    assert 1 < row["predicted_speedup"] < cost_of(small_dit([PAPER])).predicted_speedup - 0.05


def test_a_step_is_timed_at_one_ratio_only():
    setting = runs.Setting("test", (*SMALL, *FP32, "routing.schedule=linear", "routing.end_factor=0.5"), 8)
    with pytest.raises(UserError, match="a step is timed at one ratio only"):
        train_step.measure(setting, 1, {})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.slow
def test_standard_settings_are_valid(tmp_path, device):
    settings = train_step.standard_settings(torch.device(device))
    names = {setting.name for setting in settings}
    assert {*(f"{n} tokens" for n in (64, 256, 1024, 4096)), *(f"masks, {n}%" for n in (0, 25, 50))} < names
    assert ("XL/2" in names) == (device == "cuda")
    for setting in settings:
        folder = tmp_path / re.sub(r"\W", "", setting.name)
        runs.write_latents(folder / "latents", setting)
        for kind in ("dense", "routed"):
            experiment = validated(*runs.overrides_of(setting, kind, folder))
            assert bool(experiment.routes) == (kind == "routed")


def test_a_record_names_its_origin(tmp_path):
    rows = [{"what": "a", "median": 2.0, "n": 3}, {"what": "b, c", "median": 1 / 3, "more": True}]
    (record := Record("test", tmp_path, environment(CPU))).add("all", rows)
    file = record.file
    assert re.fullmatch(rf"test_[\w-]+_torch-{re.escape(torch.__version__.split('+')[0])}\.csv", file.name)
    head = {line.split(": ")[0] for line in file.read_text().splitlines() if line.startswith("# ")}
    assert {f"# {key}" for key in ("date", "command", "versions", "processor")} <= head
    first, second = read_results(file)
    assert first["commit"] == second["commit"] == record.commit
    assert (first["what"], first["median"], first["more"], first["n"]) == ("a", "2", "", "3")
    assert (second["what"], second["median"], second["more"], second["n"]) == ("b, c", "0.333333", "True", "")


@pytest.mark.slow
def test_images_are_timed_as_sample_py_samples_them():
    rows = sampling.measure(sampling.TINY, CPU, repeats=1, turn_sec=0)
    assert [row["evaluation"] for row in rows] == list(sampling.REQUESTS)
    for row in rows:
        assert row["images_per_sec"] == pytest.approx(row["batch_size"] / (79 * row["ms"] / 1000))


@pytest.mark.slow
def test_one_setting_is_measured_and_nothing_is_recorded():
    before = set((ROOT / "benchmarks" / "results").iterdir())
    result = start("-m benchmarks.train_step", *SMALL, "--repeats", "1", *FP32)
    assert len(re.findall(r"loss within \S+, gradients within \S+ of the plain step", result.stdout)) == 4
    assert {"dense", "routed", "plain dense", "plain routed"} == set(
        re.findall(r"^\| given +\| +((?:plain )?[a-z]+) \| +[0-9.]+ \|", result.stdout, re.M)
    )
    assert set((ROOT / "benchmarks" / "results").iterdir()) == before
