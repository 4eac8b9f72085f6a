"""Samples survive kills, on one and two processes, and full disks."""

import numpy as np
import pytest

from tests.faults.sampling import kill_often
from tests.programs import start
from tests.runs import tiny_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults") / "run"
    tiny_run(folder, "data.in_channels=3", "model.init=xavier")
    return folder


# Many steps, so that a part takes a while.
CHURN = ("sampler=edm", "sampler.S_churn=10", "sampler.num_steps=60")


@pytest.mark.slow
def test_samples_that_are_killed_again_and_again_are_those_of_an_undisturbed_run(run, tmp_path):
    asked = (f"run={run}", "num_samples=300", "batch_size=16", "guidance_scale=1.5", *CHURN)
    outcome = kill_often(tmp_path, asked, num_kills=3, mean_sec=0.5)
    assert outcome.wrong == []
    assert len(outcome.parts_at_kill) == 3
    with np.load(tmp_path / "killed.npz") as arrays:
        assert len(np.unique(arrays["arr_0"], axis=0)) == len(arrays["arr_1"]) == 300


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_same_command_resumes(run, tmp_path):
    """A limit on the size of files stands for the full disk: it is met when the parts are joined."""
    options = ("sample.py", f"run={run}", "num_samples=64", "batch_size=8", "num_steps=2", "grid_columns=1")
    options += ("output=s.npz",)
    result = start(*options, folder=tmp_path, file_bytes=8_000, check=False)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(
        "error: [Errno 27] File too large; fix this and run the same command again"
    )
    assert "Traceback" not in result.stderr
    start(*options, folder=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.json", "s.npz", "s.png"]
