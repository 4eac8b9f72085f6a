"""Sweeps: a job that fails stops no other, finished ones are passed over, launchers and the sweeper of
requirements-sweeps.txt.
"""

import gc
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from safetensors.torch import load_file

from runtime import config as mechanics
from runtime.command_line import options_first
from runtime.errors import UserError
from runtime.lock import TRY_AGAIN, Busy
from runtime.sweep import record_end, start_sweep, summary
from tests.programs import start
from tests.runs import ROOT, TINY, metrics, tiny_run, tiny_trainer
from training.checkpoint import latest_checkpoint
from training.run_folder import RunFolder
from training.stopping import TIME_LIMIT, notify_submitit

SHORT = ("train.total_steps=4", "train.batch_size=4", "train.log_every=2")
JOBS = ("optimizer.lr=-1,3e-4", *TINY, *SHORT)
WITHOUT_EXTRAS = "import runpy, sys; sys.modules['hydra_plugins'] = None; sys.argv[0] = 'train.py'; "
WITHOUT_EXTRAS += f"runpy.run_path({str(ROOT / 'train.py')!r}, run_name='__main__')"
extras = pytest.mark.skipif(
    find_spec("submitit") is None or find_spec("optuna") is None, reason="`make sweeps` installs them"
)


def assert_same_as_alone(folder, alone, *overrides):
    """A run has the same weights and metrics as the same run outside a sweep."""
    tiny_run(alone, *overrides)
    assert metrics(folder) == metrics(alone)
    ours, theirs = (load_file(latest_checkpoint(run) / "net.safetensors") for run in (folder, alone))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_a_job_that_fails_stops_no_other_and_changes_none(tmp_path):
    swept = start("train.py", "-m", *JOBS, folder=tmp_path, check=False)
    assert swept.returncode == 1
    *_, heading, job, again = swept.stderr.splitlines()
    assert heading == "error: 1 of the jobs failed:"
    assert job.startswith("  optimizer.lr=-1")
    assert job.endswith(": optimizer.lr=-1.0 must not be negative")
    assert again.startswith("The same command runs these jobs again and skips the finished ones: python ")
    assert again.endswith(" ".join(JOBS))
    (folder,) = (tmp_path / "runs").glob("*/")
    assert "lr-0.0003" in folder.name
    assert_same_as_alone(folder, tmp_path / "alone", *SHORT, "optimizer.lr=3e-4")
    one_by_one = "hydra.sweeper.max_batch_size=1"
    swept = start("train.py", "-m", *JOBS, one_by_one, folder=tmp_path, check=False)
    assert swept.returncode == 1, "the record of an earlier sweep does not count"
    assert (swept.stdout.count("is finished: raise"), swept.stdout.count("Sample from it")) == (1, 0)
    assert swept.stderr.splitlines()[-3] == "error: 1 of the jobs failed:"
    assert not list((tmp_path / "runs").glob(".sweep*"))
    jobs = [line for line in swept.stdout.splitlines() if line.startswith("job ")]
    assert jobs == ["job 1: optimizer.lr=-1", "job 2: optimizer.lr=0.0003"]
    finished = f"  optimizer.lr=0.0003: runs/{folder.name}"
    assert swept.stdout.splitlines()[-2:] == ["sweep: 1 of 2 jobs finished", finished]


def test_a_sweep_of_several_runs_says_how_to_compare_them():
    jobs = [{"job": f"seed={seed}", "folder": f"runs/{seed}"} for seed in (0, 1)]
    heading, *_, compare = summary(jobs, 3).splitlines()
    assert heading == "sweep: 2 of 3 jobs finished"
    assert shlex.split(compare)[2:] == ["python", "-m", "reports", 'runs=["runs/0", "runs/1"]']


def test_a_sweep_with_a_job_that_cannot_be_composed_is_refused_before_its_first_job(tmp_path):
    ratio = "model.routes.0.selection_ratio=0.3"  # the dense twin has no route
    for jobs, refused in (
        (("model=tread,dit", ratio), f"{ratio}: the list has no item with this index"),
        (("train.total_stepz=3,4",), "train.total_stepz is not known: did you mean train.total_steps?"),
    ):
        swept = start("train.py", "-m", *jobs, folder=tmp_path, check=False)
        assert (swept.returncode, swept.stdout, swept.stderr) == (1, "", f"error: {refused}\n")


@pytest.mark.parametrize(
    ("given", "ordered"),
    [
        ("a=1 -m b=2,3", "-m a=1 b=2,3"),
        ("a=1 --config-dir MINE b=2 -m", "--config-dir MINE -m a=1 b=2"),
        ("a=1 --config-dir=MINE b=2 ~c", "--config-dir=MINE a=1 b=2 ~c"),
        ("a=1 -c job b=-1", "-c job a=1 b=-1"),
        ("-m a=1", "-m a=1"),
        ("a=1", "a=1"),
        ("prompt=null b=1", "prompt=null b=1"),
        ("prompt='quoted'", "prompt='quoted'"),
    ],
)
def test_options_may_stand_anywhere(given, ordered):
    assert options_first(given.split()) == ordered.split()


@pytest.mark.parametrize(
    "text",
    ["'a dog', running", "a dog, running", "it's a dog (on a = b)", "true", 'say "a dog"', "a\\b: {c}"],
)
def test_a_prompt_may_have_any_letters(text):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    (override,) = OverridesParser.create().parse_overrides(options_first([f"prompt={text}"]))
    assert override.value() == text


@pytest.fixture
def in_a_sweep(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # what is set below ends with the test
    for name in ("COMMAND", "ENDED"):
        monkeypatch.setenv(f"TREAD_SWEEP_{name}", "")
    monkeypatch.setattr("sys.argv", ["train.py", "-m", "a=1,2", "b=3"])
    start_sweep(sys.argv[1:])
    overrides, number = SimpleNamespace(task=["a=2", "b=3"]), SimpleNamespace(num=1)
    hydra = SimpleNamespace(mode=mechanics.RunMode.MULTIRUN, overrides=overrides, job=number)
    monkeypatch.setattr(mechanics.HydraConfig, "get", lambda: hydra)
    monkeypatch.setattr(mechanics.HydraConfig, "initialized", lambda: True)


def fail_with(error, cause=None):
    def main(cfg):
        raise error from cause

    return mechanics.as_job(main)


def test_jobs_that_fail_are_listed_and_the_status_says_if_all_may_succeed_later(
    in_a_sweep, capsys, monkeypatch
):
    busy, wrong = fail_with(UserError("in use"), Busy()), fail_with(ZeroDivisionError("by 0"))
    for jobs, status in (([busy], TRY_AGAIN), ([busy, wrong], 1)):
        ended = []
        with pytest.raises(SystemExit) as end:
            mechanics.run_main(lambda jobs=jobs, ended=ended: ended.extend(job(None) for job in jobs))
        assert ended == [None] * len(jobs)
        assert end.value.code == status
    *_, first, second, _ = capsys.readouterr().err.splitlines()
    assert (first, second) == ("  a=2: in use", "  a=2: ZeroDivisionError: by 0")
    monkeypatch.setenv("WORLD_SIZE", "2")  # all processes of a job fail together
    with pytest.raises(UserError, match="in use"):
        busy(None)


def test_a_failed_job_leaves_no_tensor_to_the_next(in_a_sweep, capsys):
    left = []

    @mechanics.as_job
    def main(cfg):
        tensor = torch.zeros(1)
        tensor.itself = tensor  # which its last reference does not free
        left.append(weakref.ref(tensor))
        raise ValueError("in the middle")

    gc.disable()
    try:
        main(None)
        assert left[0]() is None
    finally:
        gc.enable()


def test_failures_are_printed_if_no_trial_completes(in_a_sweep, capsys):
    def sweep():
        record_end("a=2", reason="because")
        raise ValueError("No trials are completed yet.")

    with pytest.raises(SystemExit):
        mechanics.run_main(sweep)
    assert "  a=2: because\n" in capsys.readouterr().err


@pytest.mark.parametrize("end", [SystemExit(TRY_AGAIN), KeyboardInterrupt()])
def test_a_stop_or_an_interrupt_ends_the_whole_sweep_and_leaves_no_record(in_a_sweep, monkeypatch, end):
    monkeypatch.setattr(mechanics.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(mechanics.signal, "raise_signal", lambda number: None)
    ended = []

    def sweep():
        record_end("a=1", folder="runs/first")
        assert list(Path("runs").glob(".sweep*"))
        fail_with(end)(None)
        ended.append("not with this job")

    with suppress(SystemExit):
        mechanics.run_main(sweep)
    assert not list(Path("runs").glob(".sweep*")) and not ended


def test_a_sweeper_is_told_the_newest_value_of_a_metric(tmp_path):
    run = RunFolder(tmp_path)
    lines = [{"step": 1, "val_loss_dense": 3.0}, {"step": 2, "val_loss_dense": 2.0}, {"step": 2, "loss": 1.0}]
    run.metrics_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run.newest("val_loss_dense") == 2.0
    with pytest.raises(ValueError, match=r"metrics.jsonl has no value of val_los: did you mean val_loss"):
        run.newest("val_los")


@pytest.mark.parametrize(
    ("overrides", "known"),
    [
        (("sweep_metric=val_los", "train.eval_every=2"), "loss, val_loss_dense, val_loss_dense_ema"),
        (("sweep_metric=val_loss_dense",), "loss"),
    ],
)
def test_the_metric_of_a_sweep_must_be_logged(tmp_path, overrides, known):
    with pytest.raises(ValueError, match=rf"^sweep_metric=\w+ must be a metric of the run: {known}$"):
        tiny_trainer(tmp_path / "run", *overrides)
    assert not RunFolder(tmp_path / "run").manifest_file.exists()
    tiny_trainer(tmp_path / "run", "sweep_metric='val_loss_dense_ema/t=0.3'", "train.eval_every=2")


def test_a_choice_that_needs_an_extra_says_what_to_install(tmp_path):
    choice = ("-m", "hydra/launcher=slurm", "seed=0,1")
    result = start(f"-c {WITHOUT_EXTRAS}", *choice, folder=tmp_path, check=False)
    (line,) = [line for line in result.stderr.splitlines() if line]
    assert line.endswith(": run `pip install -r requirements-sweeps.txt`")
    assert line.startswith("error: In 'hydra/launcher/slurm': Could not load 'hydra/")


def test_submitit_is_notified_of_a_stopped_run():
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    notify_submitit("SIGUSR2")  # without a handler
    requests = []
    signal.signal(signal.SIGUSR2, lambda number, frame: requests.append(number))
    try:
        for reason, expected in (("SIGUSR2", 1), (TIME_LIMIT, 2), ("SIGTERM", 2), ("SIGUSR1", 2)):
            notify_submitit(reason)
            assert len(requests) == expected, reason
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def sweep(folder, *arguments):
    """Start a sweep in a new process: launchers import its main module again."""
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with (folder / "output").open("a") as output:
        command = [sys.executable, ROOT / "train.py", "-m", *arguments]
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)


@extras
def test_jobs_at_once_share_the_cores(monkeypatch):
    monkeypatch.setattr("runtime.config.cpu_count", lambda: 9)
    with initialize_config_dir(config_dir=str(ROOT / "configs"), version_base="1.3"):
        options = {"overrides": ["hydra/launcher=parallel"], "return_hydra_config": True}
        shares = dict(compose("config", **options).hydra.job.env_set)
    assert shares == {"LOKY_MAX_CPU_COUNT": "4", "TREAD_PARALLEL_JOBS": "2"}


@extras
@pytest.mark.slow
def test_parallel_jobs_equal_single_runs(tmp_path):
    assert sweep(tmp_path, "hydra/launcher=parallel", *JOBS).wait(200) == 1
    output = (tmp_path / "output").read_text()
    assert "error: 1 of the jobs failed:\n  optimizer.lr=-1" in output
    (folder,) = (tmp_path / "runs").glob("*lr-0.0003*")
    assert_same_as_alone(folder, tmp_path / "alone", *SHORT, "optimizer.lr=3e-4")


def wait_for(ready):
    ends = time.monotonic() + 100
    while not ready() and time.monotonic() < ends:
        time.sleep(0.1)


def has_logged(folder):
    """True if a run has logged three lines."""
    return len([line for file in folder.glob("runs/*/metrics.jsonl") for line in file.open()]) >= 3


@extras
@pytest.mark.slow
def test_jobs_at_once_save_and_end_with_the_command_that_started_them(tmp_path):
    long = (*TINY, "train.total_steps=100000", "train.log_every=10", "train.save_every=100000", "seed=3")
    command = sweep(tmp_path, "hydra/launcher=parallel", *long)
    wait_for(lambda: has_logged(tmp_path))
    command.terminate()
    command.wait(10)
    (file,) = tmp_path.glob("runs/*/manifest.json")
    wait_for(lambda: json.loads(file.read_text())["status"] != "running")
    manifest = json.loads(file.read_text())
    assert (manifest["status"], manifest["reason"]) == ("stopped", "the launcher is gone")


@extras
@pytest.mark.slow
def test_a_job_that_submitit_preempts_is_saved_started_again_and_ends_bitwise_as_alone(tmp_path):
    long = ("train.total_steps=300", "train.log_every=10", "train.save_every=1000", "seed=3")
    rehearsal = sweep(tmp_path, "hydra/launcher=rehearsal", *TINY, *long)
    wait_for(lambda: has_logged(tmp_path))
    children = psutil.Process(rehearsal.pid).children(recursive=True)
    (job,) = [child for child in children if "submitit.core._submit" in child.cmdline()]
    job.send_signal(signal.SIGUSR2)
    assert rehearsal.wait(100) == 0, (tmp_path / "output").read_text()
    (folder,) = (file.parent for file in tmp_path.glob("runs/*/manifest.json"))
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["status"] == "finished"
    first, again = (entry["step"] for entry in manifest["starts"])
    assert first == 0
    assert 30 <= again < 300, "what was trained was saved, though no save was due"
    assert_same_as_alone(folder, tmp_path / "alone", *long)


@extras
@pytest.mark.slow
def test_a_search_continues_where_it_was_and_survives_trials_that_fail(tmp_path):
    search = ("hydra/sweeper=search_lr", "optimizer.lr=interval(-3e-3,2e-3)")
    tried = []
    for n_trials in (2, 4):
        status = sweep(
            tmp_path, *search, *TINY, *SHORT, "train.eval_every=4", f"hydra.sweeper.n_trials={n_trials}"
        ).wait(100)
        output = (tmp_path / "output").read_text()
        tried.append({path.parent.name for path in tmp_path.glob("runs/*/manifest.json")})
    assert tried[0] < tried[1]
    assert "must not be negative" in output
    assert status == 1
    assert output.count("is finished: raise train.total_steps") == len(tried[0])
    best = yaml.safe_load((tmp_path / "runs/optimization_results.yaml").read_text())
    losses = {name: metrics(tmp_path / "runs" / name)[-1]["val_loss_dense_ema"] for name in tried[1]}
    assert best["best_value"] == min(losses.values())
    assert f"lr-{best['best_params']['optimizer.lr']}" in min(losses, key=losses.get)
