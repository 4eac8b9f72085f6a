"""The twin study: its arms, the search of the learning rate, and a whole study."""

import json
import math
import re
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.results import Record, read_results
from models import cost_of
from reports.runs import Run
from study import twins
from tests.programs import start
from tests.runs import tiny_run, validated
from training.run_folder import RunFolder

COMPOSED = [(study, arm) for study in ("digits-200", "mixture-64") for arm in twins.STUDIES[study].arms]
COMPOSED += [(study, "routed") for study in ("digits-1500", "mixture-256", "glyphs-50k", "glyphs-s2")]


def configured(study, arm):
    study = twins.STUDIES[study]
    return validated(f"data={study.data}", *study.task, *study.arms[arm])


@pytest.mark.parametrize(("study", "arm"), COMPOSED)
def test_every_arm_composes_and_differs_in_the_network_or_its_routes_alone(study, arm):
    experiments = configured(study, "dense"), configured(study, arm)
    dense_cost, cost = (cost_of(experiment.meta_net) for experiment in experiments)
    first, config = (experiment.written for experiment in experiments)
    cheaper = arm not in ("dense", "no removal")
    assert (cost.routed_training_flops < dense_cost.dense_training_flops) == cheaper
    changed = {key for key in config if config[key] != first[key]} - {"method", "run_name", "output_dir"}
    assert changed <= ({"model", "routing", "train"} if arm == "token drop" else {"model", "routing"})
    routes = [(route.start_layer_idx, route.end_layer_idx) for route in experiments[1].meta_net.routes]
    windows = {"dense": [], "token drop": [(0, 11)]}
    assert routes == windows.get(arm, [(2, 8)]), "the published window of 12 blocks"


def searched(arm, lr, seed, loss):
    return {"arm": arm, "part": "search", "lr": f"{lr:g}", "seed": str(seed), twins.LOSS: str(loss)}


def work_of(folder, study, *arguments):
    """The work of a study with an empty record."""
    header = {"device": "cpu", "processor": "x", "versions": {"torch": "0"}, "commit": "x"}
    header |= {"uncommitted_changes": False, "tiny": False}
    request = twins.parse([str(folder), study, *arguments])
    return twins.Work(study, twins.STUDIES[study], request, Record(f"twins_{study}", folder, header))


@pytest.fixture
def work(tmp_path):
    """The work of a study whose search starts at 0.008 and takes the seeds 100 to 102."""
    return work_of(tmp_path, "digits-200", "--arms", "dense", "routed")


@pytest.mark.parametrize("best", [0.001, 0.008, 0.032])
def test_a_search_doubles_or_halves_the_rate_until_the_best_is_not_at_an_end(work, best):
    tried = []
    while units := work._next_searches("dense"):
        tried += units
        rows = [searched("dense", lr, seed, 1 + abs(math.log2(lr / best)) + 0.1 * seed) for seed, lr in units]
        work.record.add(f"{len(tried)}", rows)
    rates = sorted({lr for _, lr in tried})
    assert rates[0] <= best / 2 and rates[-1] >= 2 * best
    assert rates == [rates[0] * 2**i for i in range(len(rates))], "no rate is left out"
    assert sorted(tried) == [(seed, lr) for seed in (100, 101, 102) for lr in rates]
    assert twins.best_lr(work.record.rows, "dense") == best
    assert len(work._next_searches("routed")) == 9


def test_a_rate_is_chosen_by_its_mean_over_seeds():
    """With one seed a wrong rate was chosen once, and an effect followed from it."""
    rows = [searched("dense", lr, 100, loss) for lr, loss in ((0.002, 0.2), (0.004, 0.3))]
    assert twins.best_lr(rows, "dense") == 0.002
    rows += [searched("dense", 0.002, 101, 0.5)]
    assert twins.best_lr(rows, "dense") == 0.002, "seeds of one rate are not compared with others"
    rows += [searched("dense", 0.004, 101, 0.3)]
    assert twins.best_lr(rows, "dense") == 0.004
    rows += [searched("dense", 0.004, 102, math.nan)]
    assert twins.best_lr(rows, "dense") == 0.002, "a diverged training is not chosen"
    assert twins.best_lr([*rows, searched("routed", 0.1, 100, 0)], "dense") == 0.002


def test_an_arm_may_use_the_rate_of_another_arm_and_a_changed_arm_searches_its_own(tmp_path, monkeypatch):
    trained = []

    def train(work, arm, seed, lr):
        trained.append((arm, seed, lr))
        return [searched(arm, lr, seed, abs(math.log2(lr / 0.002)))] if seed == 100 else [{"arm": arm}]

    monkeypatch.setattr(twins.Work, "_train", train)
    for change in ((), ("--change", "model.mlp_ratio=3")):
        folder = tmp_path / str(len(change))
        folder.mkdir()
        assert work_of(folder, "mixture-64", "--arms", "separate", "--jobs=1", *change).run() == []
    changed = "separate, model.mlp_ratio=3"
    expected = [("routed", 100, lr) for lr in (0.002, 0.004, 0.008, 0.001)]
    expected += [("separate", seed, 0.002) for seed in (0, 1, 2)]
    expected += [(changed, 100, lr) for lr in (0.002, 0.004, 0.008, 0.001)]
    assert trained == [*expected, *((changed, seed, 0.002) for seed in (0, 1, 2))]


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
        {"step": 6, twins.LOSS: None},
    ]
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    same, scores = {"guidance": "none"}, {twins.LOSS: 0.5, f"{twins.LOSS}/t=0.3": 0.6, "fd_pixel": 1.5}
    assert twins.evaluations_of(tmp_path / "run") == [
        {"step": 2, "gflop": 1000.0, **same, "train_loss": 3.0, **scores},
        {"step": 4, "gflop": 2500.0, **same, "train_loss": 1.0, twins.LOSS: 0.4},
        {"step": 6, "gflop": 2500.0, **same, "train_loss": math.inf, twins.LOSS: math.inf},
    ]


def test_the_cost_of_a_run_is_that_of_its_steps_as_they_were_routed(tmp_path):
    """The last two of four steps are dense."""
    steps = ("model=tread", "train.total_steps=4", "train.log_every=1", "routing.off_last_steps=2")
    trainer = tiny_run(tmp_path / "run", *steps)
    cost = cost_of(trainer.net)
    spent = Run(RunFolder(tmp_path / "run")).cost_at("TFLOPs", 4)
    assert spent == pytest.approx(8 * (2 * cost.routed_training_flops + 2 * cost.dense_training_flops) / 1e12)


def test_arms_are_scored_at_the_cost_of_the_routed_one(work):
    cost = cost_of(configured("digits-200", "routed").meta_net)
    share = cost.routed_training_flops / cost.dense_training_flops
    assert work.equal_cost_steps["routed"] == work.steps == 6000
    assert work.equal_cost_steps["dense"] == 250 * round(6000 * share / 250)


@pytest.mark.slow
def test_a_study_is_searched_trained_and_scored_and_not_done_again(tmp_path):
    command = ("-m study.twins", str(tmp_path), "digits-200", "--tiny", "--seeds=1", "--jobs=1")
    first = start(*command, "--arms", "routed").stdout
    (file,) = tmp_path.glob("twins_digits-200_*.csv")
    rows = read_results(file)
    searches, trained = ([row for row in rows if row["part"] == part] for part in ("search", "training"))
    assert [(row["seed"], row["lr"]) for row in searches] == [("100", "0.008")]
    losses, samples = ([row for row in trained if bool(row["noise"]) == drawn] for drawn in (False, True))
    assert [row["step"] for row in losses] == ["2", "4"] and all(float(row[twins.LOSS]) > 0 for row in losses)
    assert {row["lr"] for row in trained} == {"0.008"}
    guided = {row["guidance"] for row in samples} - {"none"}
    assert guided == {f"guidance=cfg guidance_scale={scale:g}" for scale in (1.5, 2)}
    assert {row["step"] for row in samples if row["guidance"] == "none"} == {"2", "4"}
    assert all(float(row["fd_pixel_held_out"]) > 0 and 0 <= float(row["recall"]) <= 1 for row in samples)
    drawn = [json.loads(score.read_text())["samples"]["drawn"] for score in tmp_path.glob("*/scores/*.json")]
    assert {record["first_seed"] for record in drawn} == {60}, "three sets of 20 for each seed of a training"
    assert start(*command, "--arms", "routed").stdout.splitlines()[-3:] == first.splitlines()[-3:]
    assert read_results(file) == rows
    # A failing changed arm is added, names its log, and does not touch the others.
    failed = start(*command, "--arms", "routed", "--change", "train.init_from=missing.pt", check=False)
    assert failed.returncode == 1 and "routed, train.init_from=missing.pt" in failed.stdout
    wrong, right = ([r for r in read_results(file) if bool(r["failed"]) == bad] for bad in (True, False))
    assert right == [row | {"failed": ""} for row in rows]
    log = Path(wrong[0]["failed"].rpartition("(log: ")[2].rstrip(")")).read_text()
    assert "missing.pt" in log
    # Arms that another machine has recorded are not trained again.
    file.rename(tmp_path / "twins_digits-200_Another_torch-2.15.0.csv")
    start(*command, "--arms", "routed")
    assert not file.exists()


@pytest.mark.slow
def test_samples_of_the_mixture_are_judged_by_its_density(tmp_path):
    start("-m study.twins", tmp_path, "mixture-64", "--tiny", "--seeds=1", "--jobs=1", "--arms", "routed")
    (file,) = tmp_path.glob("twins_mixture-64_*.csv")
    judged = [row for row in read_results(file) if row["perplexity"]]
    assert {row["step"] for row in judged} == {"4"}
    assert {row["guidance"] for row in judged} == {"none", "guidance=cfg guidance_scale=1.25"}
    assert all(float(row["perplexity"]) > 1 and float(row["gflop"]) > 0 for row in judged)


@pytest.mark.slow
def test_a_limit_stops_a_stage_of_a_gpu_which_the_next_call_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "GRACE_SEC", 15)
    assert gpu.launch_stage("twins", tmp_path, True, 0) == gpu.ENDS[gpu.TIME_IS_UP]
    end = gpu.launch_stage("twins", tmp_path, True, 1800)
    assert end == "done", (tmp_path / "twins.log").read_text()
    (file,) = tmp_path.glob("twins_glyphs-s2_*.csv")
    scored = [row for row in read_results(file) if row["noise"]]
    assert {row["arm"] for row in scored} == {"dense", "routed"}
    assert {row["guidance"].rpartition("=")[2] for row in scored} == {"none", "1.5", "2", "3"}
    assert all(float(row["fd_classifier_held_out"]) > 0 for row in scored)


def test_the_rehearsal_of_another_machine_counts_only_for_a_rehearsal(work, tmp_path):
    header = {"device": "cpu", "versions": {"torch": "0"}, "commit": "x", "uncommitted_changes": False}
    for processor, tiny in (("rehearsed", True), ("another", False)):
        record = Record("twins_digits-200", tmp_path, header | {"processor": processor, "tiny": tiny})
        record.add(processor, [{"arm": "dense"}])
        record.add(f"{processor}, failed", [{"failed": "it"}])
    assert {row["setting"] for row in work._rows()} == {"another"}


def test_a_diverged_rate_is_not_searched_again_and_old_failures_stop_nothing(work, monkeypatch):
    def fails(program, log, *keys):
        Path(log).write_text(f"error: {twins.NOT_FINITE} in 10 or more consecutive steps")
        raise OSError(f"{program} failed with exit status 1 (log: {log})")

    monkeypatch.setattr(twins, "start_program", fails)
    work.record.add("another change", [{"failed": "it"}])
    assert work._run("searches", [("dense", 100, 0.008)]) == []
    assert twins.search_losses(work.record.rows, "dense") == {0.008: math.inf}
    assert (100, 0.008) not in work._next_searches("dense")
    assert work._run("trainings", [("dense", 0, 0.008)]), "a training that fails is a failure"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digits-200"], "digits-200 is a study: the first argument is the folder"),
        (["out", "digits-20"], "unknown study 'digits-20'"),
        (["out", "glyphs-s2"], "glyphs-s2: needs a GPU, or --tiny"),
        (["out", "digits-200", "--arms", "rooted"], r"unknown arm 'rooted': choose from \['dense', 'routed'"),
        (["out", "digits-200", "--seeds", "100"], "--seeds 100: the search"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit):
        twins.parse(arguments)
    assert re.search(message, capsys.readouterr().err)
