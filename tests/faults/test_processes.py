"""Processes of one launch: they must agree to start, and none waits for one that died."""

import json
import time

import pytest

from tests.faults.killing import ALL_ENDED_WITHIN_SEC, TWO, program
from tests.training.test_trainer import write_moments


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["configuration", "folder", "code"])
def test_ranks_that_disagree_refuse_together(tmp_path, fault):
    data = ()
    if fault == "folder":
        write_moments(tmp_path / "latents", seed=0)
        write_moments(tmp_path / "elsewhere/latents", seed=1)
        data = ("data=latents", "data.path=latents", f"output_dir={tmp_path}/runs/r")
    if fault == "code":
        (tmp_path / "elsewhere").mkdir()
    result = program(TWO, *data, folder=tmp_path, fault=(fault, 0, 1))
    assert result.returncode != 0
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(set(errors)) == 1
    # One error per process, unless the launcher ended the second process first.
    assert len(errors) == 2 or "closing signal SIGTERM" in result.stderr
    differ = {"configuration": "optimizer.lr: 0.0001 in process 0, 0.5 in process 1"}
    differ |= {"folder": "fingerprint of the data: ", "code": "code (sha256): "}
    assert errors[0].startswith("error: ranks disagree on ") and differ[fault] in errors[0]
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "process"), [("raise", 1), ("kill", 0), ("kill", 1)])
def test_a_process_that_dies_ends_the_others_and_is_recorded(tmp_path, fault, process):
    start = time.monotonic()
    result = program(TWO, folder=tmp_path, fault=(fault, 3, process))
    assert result.returncode != 0
    assert time.monotonic() - start < ALL_ENDED_WITHIN_SEC
    manifest = json.loads((tmp_path / "runs/r/manifest.json").read_text())
    if fault == "raise":
        assert manifest["status"] == "failed"
        assert manifest["failure"]["reason"] == "RuntimeError: the cosmic ray"
        assert (manifest["failure"]["process"], manifest["failure"]["step"]) == (process, 3)
        return
    # The killed process reports nothing. The other one reports it, and records it if it holds the folder.
    assert "error: another process is gone" in result.stderr
    assert "Signal 9" in result.stderr
    if process == 0:
        assert manifest["status"] == "running", "like a killed run in one process"
    else:
        assert manifest["failure"]["process"] == 0
        assert "another process is gone" in manifest["failure"]["reason"]
