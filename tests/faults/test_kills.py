"""Runs and samples that are killed repeatedly end like undisturbed ones; `make soak` kills more."""

import random
import subprocess
import time

import numpy as np
import psutil
import pytest

from tests.faults.killing import ENVIRONMENT, ONE, STARTED_WITHIN_SEC, TWO, kill, kill_often, process_tree
from tests.programs import start
from tests.runs import ROOT, tiny_run

NUM_KILLS = {"accumulation": 6, "two processes": 2, "sharded": 2, "sharded by four": 1}


@pytest.mark.slow
@pytest.mark.parametrize("name", NUM_KILLS)
def test_a_run_killed_at_random_resumes_bitwise(tmp_path, name):
    outcome = kill_often(tmp_path, name, NUM_KILLS[name], seed=0)
    assert outcome.lost == []
    assert outcome.kills.total() == NUM_KILLS[name]


# Many steps, so that a part takes long.
CHURN = ("sampler=edm", "sampler.S_churn=10", "sampler.num_steps=60")


@pytest.mark.slow
def test_samples_that_are_killed_repeatedly_equal_undisturbed_ones(tmp_path):
    """Kill on one and two processes in turn, a random time after the first part of each start."""
    tiny_run(tmp_path / "run", "data.in_channels=3", "model.init=xavier")
    request = (f"run={tmp_path}/run", "num_samples=300", "batch_size=16", "guidance_scale=1.5", *CHURN)
    whole, killed, rng = tmp_path / "whole.npz", tmp_path / "killed.npz", random.Random(0)
    start("sample.py", *request, f"out={whole}")
    before = set()

    def finished():
        return {file.name for file in killed.with_name("killed.npz.partial").glob("[0-9]*.npz")}

    for launcher in (ONE, TWO, ONE):
        command = [*launcher, str(ROOT / "sample.py"), *request, f"out={killed}"]
        process = subprocess.Popen(command, env=ENVIRONMENT, start_new_session=True)
        deadline = time.monotonic() + STARTED_WITHIN_SEC
        while process.poll() is None and finished() == before and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(rng.expovariate(2))
        whole_launch = process_tree(process)
        kill(whole_launch)
        process.wait()
        psutil.wait_procs(whole_launch, timeout=30)
        assert whole_launch, "it ended before the kill"
        assert before < finished(), "a part was lost"
        before = finished()
    start("sample.py", *request, f"out={killed}")
    assert whole.read_bytes() == killed.read_bytes()
    with np.load(killed) as arrays:
        assert len(np.unique(arrays["arr_0"], axis=0)) == len(arrays["arr_1"]) == 300
