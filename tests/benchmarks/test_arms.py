"""Arms at equal FLOPs: their steps, their table, and one of them from training to score."""

import pytest

from benchmarks import arms
from benchmarks.results import read_results
from builders.network import build_net
from models import cost_of
from tests.programs import start
from tests.runs import validated


@pytest.mark.parametrize("arm", arms.ARMS)
def test_every_arm_gets_the_flops_of_the_dense_one(arm):
    """Give or take half a step, by the cost model, which tests/models/test_cost.py holds against torch."""
    dense = cost_of(build_net(validated("model=dit"))).dense_training_flops
    own = cost_of(build_net(validated(*arms.ARMS[arm]))).routed_training_flops
    equal = arms.equal_steps(arms.ARMS[arm], 1000)
    assert abs(equal["steps"] * own - 1000 * dense) <= own / 2
    assert equal["gflop_a_step"] == 32 * own / 1e9


def test_routed_arms_are_the_dense_ones_with_routes():
    for kind in arms.KINDS:
        dense, routed = (validated(*arms.ARMS[f"{kind}, {name}"]) for name in ("dense", "tread"))
        assert routed["model"].pop("routes") and not dense["model"].pop("routes")
        assert dense["model"] == routed["model"] and dense["train"] == routed["train"]


def test_the_table_has_means_over_seeds_in_the_order_of_the_arms():
    same = {"steps": "5", "parameters": "9", "gflop_a_step": "1.5"}
    rows = [
        {"arm": "tread", "guidance": "cfg", "seed": "0", "fd_pixel": "9", "label_accuracy": "0.1", **same},
        {"arm": "tread", "guidance": "none", "seed": "1", "fd_pixel": "3", "label_accuracy": "0.5", **same},
        {"arm": "tread", "guidance": "none", "seed": "0", "fd_pixel": "1", "label_accuracy": "1", **same},
        {"arm": "dense", "guidance": "none", "seed": "0", "fd_pixel": "2", "label_accuracy": "1", **same},
    ]
    found = [(row["arm"], row["guidance"], row["n"], row["fd_pixel"]) for row in arms.table(rows)]
    assert found == [("dense", "none", 1, 2), ("tread", "none", 2, 2), ("tread", "cfg", 1, 9)]
    assert arms.table(rows)[1]["fd_pixel_of_seeds"] == "1.000 3.000"
    assert arms.table(rows)[1]["label_accuracy"] == 0.75


@pytest.mark.slow
def test_an_arm_is_trained_scored_and_not_done_again(tmp_path):
    asked = (str(tmp_path / "out"), "--tiny", "--steps=2", "--num-samples=20", "--num-steps=2", "--seeds=0")
    first = start("-m benchmarks.arms", *asked, "--arms", "masking").stdout
    (file,) = (tmp_path / "out").glob("arms_*.csv")
    rows = read_results(file)
    assert [(row["arm"], row["guidance"]) for row in rows] == [("masking", "none"), ("masking", "cfg")]
    assert all(float(row["fd_pixel"]) > 0 for row in rows)
    run = tmp_path / "out/masking_seed_0"
    written = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    again = start("-m benchmarks.arms", *asked, "--arms", "masking").stdout
    assert again.splitlines()[-2:] == first.splitlines()[-2:]
    assert written == {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
