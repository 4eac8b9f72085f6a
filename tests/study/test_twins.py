"""The twin study: its arms, the search of the learning rate, and a whole study."""

import json
from pathlib import Path

import pytest

from benchmarks.results import Record, read_results
from models import cost_of
from reports.runs import Run
from study import twins
from study.records import Records
from tests.programs import start
from tests.runs import tiny_run, validated
from training.run_folder import RunFolder

SERIES = ("depth", "width", "tokens")
COMPOSED = [("digits", arm) for arm in twins.ARMS]  # mixture and glyphs have the same arms
COMPOSED += [(study, arm) for study in ("mixture", "glyphs") for arm in twins.TWINS]
COMPOSED += [(study, arm) for study in SERIES for arm in [*twins.STUDIES[study].arms][-2:]]


def configured(study, arm):
    study = twins.STUDIES[study]
    return validated(f"data={study.data}", *study.task, *study.arms[arm])


@pytest.mark.parametrize(("study", "arm"), COMPOSED)
def test_every_arm_composes_and_differs_in_the_network_or_its_routes_alone(study, arm):
    """Compare with the first arm of the study, and a routed arm of a series with its dense twin."""
    experiments = configured(study, next(iter(twins.STUDIES[study].arms))), configured(study, arm)
    dense_cost, cost = (cost_of(experiment.meta_net) for experiment in experiments)
    first, config = (experiment.written for experiment in experiments)
    if arm.startswith(("routed", "ratio", "late", "early", "sprint")) and study not in SERIES:
        assert cost.routed_training_flops < dense_cost.dense_training_flops
    changed = {key for key in config if config[key] != first[key]} - {"method", "run_name", "output_dir"}
    assert changed <= {"model", "routing"}
    if arm.startswith("routed, ") and arm not in twins.LONGER:
        twin = configured(study, arm.replace("routed", "dense")).written
        assert twin["model"] | {"routes": config["model"]["routes"]} == config["model"]


def test_the_learning_rate_of_the_lowest_held_out_loss_is_chosen():
    rows = [
        {"arm": "dense", "part": "search", "lr": lr, twins.LOSS: str(loss)}
        for lr, loss in zip(twins.LRS, (0.4, 0.2, 0.3), strict=True)
    ]
    assert twins.chosen_lr(rows, "dense") == twins.LRS[1]
    another = {"arm": "dense", "part": "search", "lr": "0.5", twins.LOSS: "0.1"}
    assert twins.chosen_lr([*rows, another], "dense") == twins.LRS[1], "only rates of the search"
    assert twins.chosen_lr([*rows, {**rows[0], "arm": "x", twins.LOSS: "0"}], "dense") == twins.LRS[1]
    assert twins.chosen_lr(rows[:2], "dense") is None, "one is missing"


def test_evaluations_are_read_from_a_run_with_the_loss_since_the_last_one(tmp_path):
    tiny_run(tmp_path / "run", "train.total_steps=2")
    rate = {"images_per_sec": 4.0, "tflops_per_sec": 0.5}
    lines = [
        {"step": 1, "num_images": 4, "loss": 4.0, **rate},
        {"step": 2, "num_images": 8, "loss": 2.0, **rate},
        {"step": 2, twins.LOSS: 0.5, f"{twins.LOSS}/t=0.3": 0.6, "fd_pixel": 1.5, "evaluation_time_sec": 3},
        {"step": 3, "num_images": 12, "loss": None, **rate},
        {"step": 4, "num_images": 20, "loss": 1.0, **rate},
        {"step": 4, twins.LOSS: 0.4},
    ]
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    same, scores = {"guidance": "none"}, {twins.LOSS: 0.5, f"{twins.LOSS}/t=0.3": 0.6, "fd_pixel": 1.5}
    assert twins.evaluations_of(tmp_path / "run") == [
        {"step": 2, "gflop": 1000.0, **same, "train_loss": 3.0, **scores},
        {"step": 4, "gflop": 2500.0, **same, "train_loss": 1.0, twins.LOSS: 0.4},
    ]


def test_the_cost_of_a_run_is_that_of_its_steps_as_they_were_routed(tmp_path):
    """The last two of four steps are dense."""
    steps = ("model=tread", "train.total_steps=4", "train.log_every=1", "routing.off_last_steps=2")
    trainer = tiny_run(tmp_path / "run", *steps)
    cost = cost_of(trainer.net)
    spent = Run(RunFolder(tmp_path / "run")).spent("TFLOPs", 4)
    assert spent == pytest.approx(8 * (2 * cost.routed_training_flops + 2 * cost.dense_training_flops) / 1e12)


@pytest.mark.slow
def test_a_study_is_searched_trained_and_scored_and_not_done_again(tmp_path):
    command = ("-m study.twins", str(tmp_path), "digits", "--tiny", "--seeds=0", "--jobs=1")
    first = start(*command, "--arms", "routed").stdout
    (file,) = tmp_path.glob("twins_digits_*.csv")
    rows = read_results(file)
    searched, trained = ([row for row in rows if row["part"] == part] for part in ("search", "training"))
    assert [float(row["lr"]) for row in searched] == list(twins.LRS)
    assert {row["lr"] for row in trained} == {f"{twins.chosen_lr(rows, 'routed'):g}"}
    guidance = [row["guidance"] for row in trained]
    assert guidance == ["none", "none", *twins.GUIDED["routed"]]
    assert all(float(row["fd_pixel"]) > 0 and 0 <= float(row["recall"]) <= 1 for row in trained)
    assert start(*command, "--arms", "routed").stdout.splitlines()[-3:] == first.splitlines()[-3:]
    assert read_results(file) == rows
    # A failing changed arm is added, names its log, and does not touch the others.
    failed = start(*command, "--arms", "routed", "--change", "model.num_heads=7", check=False)
    assert failed.returncode == 1 and "routed, model.num_heads=7" in failed.stdout
    wrong, right = (
        [row for row in read_results(file) if bool(row["failed"]) == bad] for bad in (True, False)
    )
    assert right == [row | {"failed": ""} for row in rows]
    log = Path(wrong[0]["failed"].rpartition("(log: ")[2].rstrip(")")).read_text()
    assert "must divide model.hidden_size" in log
    # Arms that another machine has recorded are not trained again.
    file.rename(tmp_path / "twins_digits_another_torch-2.15.0.csv")
    start(*command, "--arms", "routed")
    assert not file.exists()


def test_the_rehearsal_of_another_machine_counts_only_for_a_rehearsal(tmp_path):
    request = twins.parse([str(tmp_path), "mixture", "--arms", "dense"])
    header = {"device": "cpu", "processor": "x", "versions": {"torch": "0"}, "commit": "x"}
    header |= {"uncommitted_changes": False, "tiny": False}
    here = Record("twins_mixture", tmp_path, header)
    for processor, tiny in (("rehearsed", True), ("another", False)):
        record = Record("twins_mixture", tmp_path, header | {"processor": processor, "tiny": tiny})
        record.add(processor, [{"arm": "dense"}])
        record.add(f"{processor}, failed", [{"failed": "it"}])
    here.add("another, failed", [{"arm": "dense"}])
    work = twins.Work("mixture", twins.STUDIES["mixture"], {}, request, here)
    assert work._done() == {"another", "another, failed"}


@pytest.mark.slow
def test_steps_of_arms_are_timed_in_turn_and_read_by_claims(tmp_path):
    start("-m study.twins", str(tmp_path), "mixture", "--time", "--tiny", "--arms", "dense", "routed")
    (file,) = tmp_path.glob("twins_steps_*.csv")
    rows = read_results(file)
    assert [(row["arm"], row["n"]) for row in rows] == [
        ("dense", str(twins.TURNS)),
        ("routed", str(twins.TURNS)),
    ]
    assert all(float(row["ms_least"]) > 0 for row in rows)
    assert Records(tmp_path).step_ms.keys() == {("mixture", "dense"), ("mixture", "routed")}


def test_an_arm_of_equal_flops_gets_as_many_steps_as_the_dense_ones_cost(tmp_path):
    """This includes changed arms. All other arms get the steps of the study."""
    request = twins.parse([str(tmp_path), "mixture", "--arms", "dense", "routed", "routed, equal FLOPs"])
    study = twins.STUDIES["mixture"]
    arms = twins.arms_of(study, request.arms, ["optimizer.weight_decay=0.1"])
    factors = [*twins.Work("mixture", study, arms, request, None).factors.values()]
    cost = cost_of(configured("mixture", "routed").meta_net)
    assert factors == [1.0, 1.0, pytest.approx(cost.dense_training_flops / cost.routed_training_flops)]
