"""Signals, time limits and dead launchers: the run finishes and saves the step, and resumes bitwise."""

import os
import signal
import time
from unittest import mock

import psutil
import pytest

from runtime.config import INTERRUPTED
from runtime.errors import UserError
from runtime.lock import TRY_AGAIN
from tests.faults.killing import BIN, ONE, TWO, KilledRun
from tests.programs import start
from tests.runs import before_each_step, metrics, tiny_run, tiny_trainer
from tests.training.test_trainer import assert_same_run
from training.fit import run_training
from training.stopping import INTERRUPT, LAUNCHED, TIME_LIMIT, StopRequest

ACCELERATE = (str(BIN / "accelerate"), "launch")
GONE = "the launcher is gone"
ALL_SIGNALS = ("--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undisturbed run with evaluations at steps 4 and 6."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    tiny_run(folder, "train.eval_every=4")
    return folder


@pytest.mark.parametrize(("name", "at"), [("SIGTERM", 3), ("SIGUSR1", 4), ("SIGINT", 1), ("SIGTERM", 5)])
def test_a_signal_saves_after_the_step_and_the_run_resumes_bitwise(tmp_path, whole, capsys, name, at):
    """Also at a step without a save, between log points, and before the last evaluation."""
    number, reason = signal.Signals[name], INTERRUPT if name == "SIGINT" else name
    options = ("train.eval_every=4",)
    trainer, run = tiny_trainer(tmp_path / "run", *options)
    before_each_step(trainer, lambda step: step == at and os.kill(os.getpid(), number))
    before = signal.getsignal(number)
    assert run_training(trainer, run) == reason
    assert signal.getsignal(number) == before
    assert trainer.step == trainer.saved_step == at + 1
    manifest = run.manifest()
    assert (manifest["status"], manifest["reason"], manifest["step"]) == ("stopped", reason, at + 1)
    reported = f"stopped at step {at + 1}, which is saved ({reason}): run the same command again"
    assert reported in capsys.readouterr().out
    tiny_run(tmp_path / "run", *options)
    manifest = run.manifest()
    assert (manifest["status"], manifest["reason"]) == ("finished", "")
    assert [start["step"] for start in manifest["starts"]] == [0, at + 1]
    assert_same_run(whole, tmp_path / "run")


@pytest.mark.parametrize("steps", [(0,), (3, 3)], ids=["before the first step", "twice"])
def test_ctrl_c_ends_at_once_before_the_first_step_and_the_second_time(tmp_path, steps):
    trainer, run = tiny_trainer(tmp_path / "run", "train.save_every=2")

    def press(step):
        for _ in range(steps.count(step)):
            signal.raise_signal(signal.SIGINT)

    before_each_step(trainer, press)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_training(trainer, run)
    assert signal.getsignal(signal.SIGINT) == before
    assert (run.manifest()["status"], trainer.saved_step) == ("interrupted", steps[0] // 2 * 2)


def test_an_ignored_ctrl_c_stays_ignored(tmp_path):
    """A script's `&` ignores Ctrl-C, which is meant for the foreground process."""
    trainer, run = tiny_trainer(tmp_path / "run")
    before_each_step(trainer, lambda step: step == 3 and signal.raise_signal(signal.SIGINT))
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert run_training(trainer, run) == ""
    finally:
        signal.signal(signal.SIGINT, handler)


def test_a_resume_writes_a_missing_last_line(tmp_path):
    """Kill between the last checkpoint and the last line, which is not at a log point."""
    tiny_run(tmp_path / "whole", "train.log_every=4")
    trainer, run = tiny_trainer(tmp_path / "run", "train.log_every=4")
    second_line_fails = {"side_effect": [mock.DEFAULT, KeyboardInterrupt]}
    trainer.recorder.log = mock.Mock(wraps=trainer.recorder.log, **second_line_fails)
    with pytest.raises(KeyboardInterrupt):
        run_training(trainer, run)
    assert trainer.saved_step == 6
    tiny_run(tmp_path / "run", "train.log_every=4")
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_a_stop_before_an_evaluation_saves_the_step(tmp_path):
    tiny_run(tmp_path / "whole", "train.eval_every=3")
    trainer, run = tiny_trainer(tmp_path / "run", "train.eval_every=3")
    global_reason, calls = trainer.stop.global_reason, []

    def before_the_evaluation(reserve_sec, now):
        calls.append(trainer.step)
        if calls.count(3) == 2:  # the first call is before the turn, the second before its evaluation
            os.kill(os.getpid(), signal.SIGTERM)
        return global_reason(reserve_sec, now)

    trainer.stop.global_reason = before_the_evaluation
    assert run_training(trainer, run) == "SIGTERM"
    assert trainer.step == trainer.saved_step == 3
    tiny_run(tmp_path / "run", "train.eval_every=3")
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_a_limit_that_leaves_no_step_is_an_error(tmp_path):
    trainer, run = tiny_trainer(tmp_path, "train.max_time_sec=1")
    with pytest.raises(UserError, match=r"train\.max_time_sec leaves no time for a step"):
        run_training(trainer, run)


def started(folder, launcher, *overrides):
    """Start a run; return it and its process once it has logged a line."""
    killed = KilledRun(folder / "run", launcher, *overrides)
    process = killed.start()
    while not (killed.run / "metrics.jsonl").is_file() or not metrics(killed.run):
        assert process.poll() is None, killed.output()
        time.sleep(0.05)
    return killed, process


def assert_stopped(killed, reason):
    manifest = killed.manifest()
    assert (manifest["status"], manifest["reason"]) == ("stopped", reason)
    assert (killed.run / f"checkpoints/step_{manifest['step']:08d}").is_dir()
    assert killed.violations() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status", "reason"),
    [(signal.SIGTERM, TRY_AGAIN, "SIGTERM"), (signal.SIGINT, INTERRUPTED, INTERRUPT)],
)
def test_python_train_ends_with_the_documented_status(tmp_path, number, status, reason):
    killed, process = started(tmp_path, ONE, "train.num_workers=1")
    os.killpg(process.pid, number)  # also the reading process, as schedulers and terminals do
    assert process.wait() == status
    assert_stopped(killed, reason)
    assert f"({reason}): run the same command again to resume" in killed.output()
    assert "Traceback" not in killed.output()


@pytest.mark.slow
def test_the_second_ctrl_c_ends_an_evaluation_without_a_traceback(tmp_path):
    long = ("train.save_every=1", "train.sample_every=1", "sampler.num_steps=2000")
    killed = KilledRun(tmp_path / "run", ONE, *long)
    process = killed.start()
    for ready in (
        lambda: "evaluate:" in killed.output(),  # a Ctrl-C before that stops without an evaluation
        lambda: "press Ctrl-C again to end it at once" in killed.output(),
    ):
        while not ready():
            assert process.poll() is None, killed.output()
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
    assert process.wait(10) == -signal.SIGINT
    assert "interrupted at step 1" in killed.output() and "Traceback" not in killed.output()
    assert killed.manifest()["status"] == "interrupted"


LAUNCHES = {
    "accelerate, SIGTERM": (ACCELERATE, signal.SIGTERM, GONE),
    "torchrun, SIGTERM": (TWO, signal.SIGTERM, "SIGTERM"),
    "torchrun, SIGUSR1": (TWO, signal.SIGUSR1, GONE),
    "torchrun that handles all, SIGUSR1": ((*TWO, *ALL_SIGNALS), signal.SIGUSR1, "SIGUSR1"),
    "accelerate, SIGINT": (ACCELERATE, signal.SIGINT, GONE),
    "torchrun, SIGINT": (TWO, signal.SIGINT, INTERRUPT),
    "torchrun, SIGKILL": (TWO, signal.SIGKILL, GONE),
}


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "number", "reason"), LAUNCHES.values(), ids=LAUNCHES)
def test_a_launcher_ends_with_a_checkpoint_and_a_status(tmp_path, launcher, number, reason):
    killed, process = started(tmp_path, launcher)
    workers = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    assert process.wait() != 0
    _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive
    assert_stopped(killed, reason)


@pytest.mark.slow
def test_a_time_limit_is_kept(tmp_path):
    began = time.monotonic()
    KilledRun(tmp_path / "one step", ONE, "train.total_steps=1").finish()
    limit = 10 + 3 * (time.monotonic() - began)  # a slow machine takes long to start
    endless = ("train.total_steps=1000000", "train.save_every=1000000", f"train.max_time_sec={limit}")
    killed = KilledRun(tmp_path / "run", ONE, *endless)
    began = time.monotonic()
    assert killed.start().wait(2 * limit) == TRY_AGAIN, killed.output()
    assert time.monotonic() - began < limit
    assert_stopped(killed, TIME_LIMIT)


@pytest.mark.parametrize(("variable", "reason"), [("TORCHELASTIC_RUN_ID", GONE), ("OTHER", "")])
def test_a_run_without_a_launcher_outlives_its_parent(monkeypatch, variable, reason):
    """The run stops only if a launcher exits: nohup and & leave runs without a parent."""
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "1")
    stop = StopRequest(None)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert stop.global_reason(0.0) == reason


@pytest.mark.parametrize("has_peers", [True, False])
def test_a_failing_rank_prints_its_error_before_its_launcher_ends_it(has_peers):
    """The launcher's SIGTERM arrives before the error is printed."""
    begin = 'dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)'
    code = f"""
import os, signal, torch.distributed as dist
from training.stopping import StopRequest
{begin if has_peers else ""}
try:
    with StopRequest(None).listening():
        raise SystemExit("why")
finally:
    os.kill(os.getpid(), signal.SIGTERM)
"""
    result = start(f"-c {code}", check=False)
    expected = (1, ["why"]) if has_peers else (-signal.SIGTERM, [])
    assert (result.returncode, result.stderr.splitlines()[-1:]) == expected
