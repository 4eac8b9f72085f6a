"""Processes of one launch: they start alike or not at all, none waits for one that died, and their number may
change.
"""

import json
import shutil
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data import StreamOrder
from tests.faults.killing import ALL_ENDED_WITHIN_SEC, TWO
from tests.faults.programs import inject
from tests.runs import ROOT
from tests.training.test_trainer import write_latents


def lines_of(result):
    return [line for line in result.stderr.splitlines() if line.startswith("error: ")]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["configuration", "folder", "code"])
def test_ranks_that_disagree_refuse_together(tmp_path, fault):
    data = ()
    if fault == "folder":
        write_latents(tmp_path / "latents", seed=0)
        write_latents(tmp_path / "elsewhere/latents", seed=1)
        data = ("data=latents", "data.path=latents", f"output_dir={tmp_path}/runs/r")
    if fault == "code":
        copied = shutil.copytree(
            ROOT / "training", tmp_path / "elsewhere/training", ignore=shutil.ignore_patterns("__pycache__")
        )
        (copied / "ema.py").write_text((copied / "ema.py").read_text() + "\n")
    result = inject(TWO, fault, 0, 1, *data, folder=tmp_path)
    assert result.returncode != 0
    said = lines_of(result)
    assert len(set(said)) == 1
    # One of each process, unless the launcher ended the second before it had spoken.
    assert len(said) == 2 or "closing signal SIGTERM" in result.stderr
    assert said[0].startswith("error: ranks disagree on ")
    expected = {
        "configuration": "optimizer.lr: ",
        "folder": "fingerprint of the data: ",
        "code": "code (sha256): ",
    }
    assert expected[fault] in said[0]
    if fault == "configuration":
        assert "optimizer.lr: 0.0001 in process 0, 0.5 in process 1" in said[0]
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_processes_that_stop_leave_their_group_first(tmp_path):
    inject(TWO, "stop", 3, 1, folder=tmp_path)
    # The launcher may have ended the second of them before its end.
    assert {file.read_text() for file in tmp_path.glob("member_*")} == {"False"}


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "process"), [("raise", 1), ("kill", 0), ("kill", 1)])
def test_a_process_that_dies_ends_the_others_and_is_recorded(tmp_path, fault, process):
    start = time.monotonic()
    result = inject(TWO, fault, 3, process, folder=tmp_path)
    assert result.returncode != 0
    assert time.monotonic() - start < ALL_ENDED_WITHIN_SEC
    manifest = json.loads((tmp_path / "runs/r/manifest.json").read_text())
    if fault == "raise":
        assert manifest["status"] == "failed"
        assert manifest["failure"]["reason"] == "RuntimeError: the cosmic ray"
        assert (manifest["failure"]["process"], manifest["failure"]["step"]) == (process, 3)
        return
    # It could say nothing; the other one tells that it lost it, and records that if it holds the folder.
    assert "error: another process is gone" in result.stderr
    assert "Signal 9" in result.stderr
    if process == 0:
        assert manifest["status"] == "running", "as of a run in one process that is killed"
    else:
        assert manifest["failure"]["process"] == 0
        assert "another process is gone" in manifest["failure"]["reason"]


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    num_entries=st.integers(1, 70),
    world_size=st.integers(1, 4),
    per_process=st.integers(1, 3),
    micro_batch_size=st.integers(1, 5),
)
def test_all_ranks_have_equally_many_batches_for_any_data(
    num_entries, world_size, per_process, micro_batch_size
):
    """No epoch ends for one process and not for the others; each is every entry once, over all of them."""
    batch_size = world_size * per_process * micro_batch_size
    ids = np.arange(num_entries) * 3
    whole = {"seed": 0, "batch_size": batch_size, "micro_batch_size": micro_batch_size, "start_step": 0}
    orders = [iter(StreamOrder(ids, **whole, rank=i, world_size=world_size)) for i in range(world_size)]
    seen = []
    for _ in range(2 * num_entries // batch_size + 2):
        micro_batches = [[next(order).ids for _ in range(per_process)] for order in orders]
        assert {len(ids) for of_one in micro_batches for ids in of_one} == {micro_batch_size}
        seen += [entry for turn in zip(*micro_batches, strict=True) for ids in turn for entry in ids]
    for epoch in range(2):
        assert sorted(seen[epoch * num_entries : (epoch + 1) * num_entries]) == ids.tolist()
