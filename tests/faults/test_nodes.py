"""Two nodes of two processes each, as two launchers on this machine that meet at one address."""

import socket
import subprocess
from functools import partial

import psutil
import pytest

from tests.faults.killing import ALL_ENDED_WITHIN_SEC, BIN, ENVIRONMENT, differences, kill, process_tree
from tests.programs import ROOT, start
from tests.runs import TINY, metrics
from tests.slurm.cluster import free_ports, wait_until

OPTIONS = (*TINY, "run_name=r", "train.micro_batch_size=2", "train.total_steps=40", "train.log_every=1")


@pytest.fixture
def launchers():
    """The launchers of nodes, which end with the test."""
    started = []
    yield started
    for launcher in started:
        kill(process_tree(launcher))


def is_open(port):
    """Return True if a program listens at a port of this machine."""
    with socket.socket() as opened:
        return opened.connect_ex(("127.0.0.1", port)) == 0


def start_node(launchers, folder, name, port, *overrides):
    """Start the launcher of a node; its output goes to a file of its name."""
    meeting = ("--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=r", "--max_restarts=3")
    # Without it, a launcher that comes back waits for an address that is published once only (torch 2.15).
    variables = ENVIRONMENT | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [str(BIN / "torchrun"), "--nnodes=2", "--nproc_per_node=2", *meeting, str(ROOT / "train.py")]
    with (folder / name).open("a") as output:
        options = {"stdout": output, "stderr": output, "start_new_session": True, "env": variables}
        launchers.append(subprocess.Popen([*command, *overrides], **options))
    return launchers[-1]


@pytest.mark.slow
def test_a_node_that_dies_and_comes_back_loses_nothing(tmp_path, launchers):
    """The other node waits for it, and both resume; only the first process of the first node logs."""
    options, run = (*OPTIONS, "train.parallel=fsdp"), tmp_path / "run"
    start("train.py", *options, f"output_dir={tmp_path}/whole", num_processes=4)
    (port,) = free_ports(1)
    start_one = partial(start_node, launchers, tmp_path)
    first = start_one("first", port, *options, f"output_dir={run}")
    wait_until(lambda: is_open(port), "the meeting", 60)  # the first node hosts it
    second = start_one("second", port, *options, f"output_dir={run}")
    wait_until(lambda: (run / "metrics.jsonl").is_file() and len(metrics(run)) > 5, "training", 200)
    lost = process_tree(second)
    kill(lost)
    second.wait()
    psutil.wait_procs(lost, timeout=ALL_ENDED_WITHIN_SEC)
    assert metrics(run)[-1]["step"] < 40, "the node died too late"
    second = start_one("second", port, *options, f"output_dir={run}")
    for node in (first, second):
        assert node.wait(300) == 0, (tmp_path / "first").read_text(errors="replace")[-3000:]
    assert differences(tmp_path / "whole", run) == []
    said = [(tmp_path / name).read_text(errors="replace") for name in ("first", "second")]
    assert sorted("resumed at step" in text for text in said) == [False, True]
