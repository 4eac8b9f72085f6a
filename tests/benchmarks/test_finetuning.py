"""The benchmark of fine-tunes: the steps of an arm, and a rehearsal from training to record."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from benchmarks import finetuning
from benchmarks.results import Record

TIMES = [
    {"kind": kind, "ratio": ratio, "ms": ms}
    for kind in finetuning.LRS
    for ratio, ms in ((0.0, 100.0), (0.25, 80.0), (0.5, 50.0))
]
ENVIRONMENT = {
    "device": "cpu",
    "processor": "x",
    "versions": {"torch": "0"},
    "tiny": True,
    "commit": "abc",
    "uncommitted_changes": False,
}


@pytest.fixture
def work(tmp_path):
    record = Record("finetuning_twins", tmp_path, ENVIRONMENT)
    record.add("times", TIMES)
    return finetuning.Work(tmp_path, finetuning.Sizes(32, 4, 10, 4), record, 1)


@pytest.mark.parametrize(
    ("arm", "steps"),
    [("dense", (10, 0)), ("ratio 0.5", (20, 0)), ("ratio 0.25", (12, 0)), ("ratio 0.5, dense end", (16, 2))],
)
def test_every_arm_has_the_seconds_of_the_dense_one(work, arm, steps):
    assert work.steps_of("full", arm, search=False) == steps
    assert work.steps_of("full", "dense", search=True) == (5, 0)


def test_the_learning_rate_of_the_lowest_loss_is_chosen(work):
    for kind, lr, loss in (("full", 0.1, 2.0), ("full", 0.2, 1.0), ("lora", 0.3, 0.5)):
        row = {"part": "search", "kind": kind, "lr": lr, finetuning.LOSS: loss}
        work.record.add(f"{kind} {lr}", [row])
    work.record.add("other", [{"part": "training", "kind": "full", "lr": 9, finetuning.LOSS: 0.0}])
    with pytest.raises(SystemExit, match=r"the search of a learning rate failed"):
        work.chosen_lr("full")
    for diverged, chosen in ((0.4, 0.2), (0.2, 0.1), (0.1, None)):
        row = {"part": "search", "kind": "full", "lr": diverged, finetuning.LOSS: float("inf")}
        work.record.add(f"full {diverged}", [row])
        if chosen:
            assert work.chosen_lr("full") == chosen
    with pytest.raises(SystemExit, match=r"the search of a learning rate failed"):
        work.chosen_lr("full")


def test_rotated_digits_are_rotated_back(tmp_path):
    finetuning.write_inputs(tmp_path)
    rotated, upright = (np.load(tmp_path / name / "latents.npy") for name in ("rotated", "upright"))
    assert not np.array_equal(rotated, upright)
    assert np.array_equal(finetuning.upright(torch.from_numpy(rotated)), upright.transpose(0, 2, 3, 1))


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("peft"), reason="`make finetune` installs it, and runs this")
def test_an_arm_of_each_kind_is_trained_and_scored(tmp_path):
    record = Record("finetuning_twins", tmp_path, ENVIRONMENT)
    work = finetuning.Work(tmp_path, finetuning.Sizes(32, 2, 4, 4), record, 1)
    work.prepare()
    assert len([row for row in record.rows if float(row["ms"]) > 0]) == 6
    work.do([("full", "ratio 0.5", 0, 1e-3), ("lora", "dense", 0, 1e-3)])
    assert not [row for row in record.rows if row.get("failed")]
    ends = [row for row in record.rows if row.get("fd_pixel")]
    assert [row["kind"] for row in ends] == ["full", "lora"]
    base, run = tmp_path / "pretrained/model", tmp_path / "lora_dense_lr_0.001_seed_0"
    for steps in (4, 2):  # the second step, and the evaluation after the first
        diverging = finetuning.Work(tmp_path, finetuning.Sizes(32, 2, steps, 4), record, 1)
        diverging.do([("full", "dense", finetuning.SEARCH_SEED, 1e30 * steps)])
        assert (record.rows[-1]["part"], record.rows[-1][finetuning.LOSS]) == ("search", float("inf"))
    assert (finetuning.drawn(base, None)[0] != finetuning.drawn(run / "model", base)[0]).any()
