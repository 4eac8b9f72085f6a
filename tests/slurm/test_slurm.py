"""The job file of examples/slurm on a cluster of two nodes; each test starts its own daemons."""

import json
import os
import subprocess
from importlib.util import find_spec

import pytest

from tests.faults.killing import BIN, ENVIRONMENT, differences
from tests.programs import ROOT, start
from tests.runs import TINY, metrics
from tests.slurm.cluster import Cluster, missing_programs, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(missing_programs()), reason="needs SLURM: `make slurm` installs it where apt can"
    ),
]
JOB = "examples/slurm/train.sbatch"
OPTIONS = (*TINY, "run_name=r", "train.micro_batch_size=4", "train.log_every=1", "train.total_steps=120")


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    monkeypatch.setattr(
        os, "environ", ENVIRONMENT | {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    )
    with Cluster(tmp_path / "cluster") as cluster:
        yield cluster


def steps_of(run):
    return len(metrics(run)) if (run / "metrics.jsonl").is_file() else 0


def starts_of(run):
    return json.loads((run / "manifest.json").read_text())["starts"]


def submit(cluster, folder, *arguments):
    """Submit the job file; its output goes to a folder."""
    return cluster.submit(f"--output={folder}/%j.out", "--cpus-per-task=1", *arguments, folder=ROOT)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_preempted_job_of_two_nodes_is_queued_again_and_ends_bitwise(tmp_path, cluster, parallel):
    options = (*OPTIONS, f"train.parallel={parallel}")
    start("train.py", *options, f"output_dir={tmp_path}/whole", num_processes=2)
    run = tmp_path / "run"
    job = submit(cluster, tmp_path, "--nodes=2", JOB, *options, f"output_dir={run}")
    wait_until(lambda: steps_of(run) > 3, "training", 200)
    urgent = cluster.submit("--partition=high", "--nodes=2", "--exclusive", "--wrap=true", folder=tmp_path)
    cluster.wait(urgent, ("COMPLETED",))
    assert steps_of(run) < 120, "the job was preempted too late"
    assert cluster.wait(job, ("COMPLETED", "FAILED")) == "COMPLETED", (tmp_path / f"{job}.out").read_text()
    assert len(starts_of(run)) == 2 and starts_of(run)[1]["step"] > 3, "the stop was saved"
    assert differences(tmp_path / "whole", run) == []


def test_a_job_saves_before_its_time_limit_and_is_queued_again(tmp_path, cluster):
    """SLURM signals up to a minute early."""
    run, options = tmp_path / "run", (*OPTIONS, "train.total_steps=100000")
    limits = ("--nodes=2", "--time=3", "--signal=USR1@60")
    job = submit(cluster, tmp_path, *limits, JOB, *options, f"output_dir={run}")
    wait_until(lambda: steps_of(run) and len(starts_of(run)) == 2, "a second start", 300)
    assert b"SIGUSR1" in (tmp_path / f"{job}.out").read_bytes()  # a process may be writing
    assert starts_of(run)[1]["step"] > 0


def test_an_array_trains_a_seed_in_each_job(tmp_path, cluster):
    short = (*OPTIONS[:-1], "train.total_steps=2", f"output_dir={tmp_path}/${{run_name}}_${{seed}}")
    job = submit(cluster, tmp_path, "--array=3,5", JOB, *short)
    for seed in (3, 5):
        state = cluster.wait(f"{job}_{seed}", ("COMPLETED", "FAILED"))
        assert state == "COMPLETED", [file.read_text() for file in tmp_path.glob("*.out")]
        assert f"seed: {seed}\n" in (tmp_path / f"r_{seed}/config.yaml").read_text()


@pytest.mark.skipif(find_spec("submitit") is None, reason="`make sweeps` installs the launcher")
def test_a_sweep_of_preempted_jobs_resumes_them(tmp_path, cluster):
    """Hydra's launcher submits one job for each seed, and waits until both are finished."""
    long, seeds = (*OPTIONS, "train.total_steps=400"), (3, 5)
    keys = [f"hydra.launcher.{key}" for key in ("partition=low", "gpus_per_node=0", "cpus_per_task=1")]
    keys += [f"hydra.sweep.dir={tmp_path}", f"output_dir={tmp_path}/run_${{seed}}", "seed=3,5"]
    with (tmp_path / "output").open("w") as output:
        command = [BIN / "python", ROOT / "train.py", "-m", "hydra/launcher=slurm", *keys, *long]
        options = {"stdout": output, "stderr": output, "env": cluster.environment, "cwd": ROOT}
        sweep = subprocess.Popen(command, **options)
    runs = [tmp_path / f"run_{seed}" for seed in seeds]
    wait_until(lambda: all(steps_of(run) > 3 for run in runs), "training", 200)
    urgent = cluster.submit("--partition=high", "--nodes=2", "--exclusive", "--wrap=true", folder=tmp_path)
    cluster.wait(urgent, ("COMPLETED",))
    assert sweep.wait(400) == 0, (tmp_path / "output").read_text()
    for seed, run in zip(seeds, runs, strict=True):
        assert len(starts_of(run)) == 2 and starts_of(run)[1]["step"] > 3, "the stop was saved"
        start("train.py", *long, f"seed={seed}", f"output_dir={tmp_path}/whole_{seed}")
        assert differences(tmp_path / f"whole_{seed}", run) == []
