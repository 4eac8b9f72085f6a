"""Test training time and the reserve of a time limit with a clock that the tests move."""

import mmap
import signal
from itertools import pairwise
from types import SimpleNamespace

import psutil
import pytest
import torch.distributed as dist

from models import cost_of
from runtime.launch import ALONE
from tests.runs import before_each_step, interrupted, metrics, tiny_trainer
from training.clock import END_SEC
from training.fit import run_training
from training.recorder import STOPPING_SEC, Recorder
from training.run_folder import RunFolder
from training.stopping import MAX_TICK_STEPS, TIME_LIMIT, StopRequest
from training.trackers import CLOSE_WITHIN_SEC
from training.window import Work

STEP_SEC, SAVE_SEC, EVALUATION_SEC = 2.0, 7.0, 100.0
OPTIONS = ("train.log_every=3", "train.save_every=2", "train.micro_batch_size=4")


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("training.clock.time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def timed(folder, clock, *overrides):
    """A trainer whose work moves the clock, its run, and (step, reserve_sec) of each `stop.global_reason`."""
    trainer, run = tiny_trainer(folder, *OPTIONS, *overrides)
    # Half a TFLOP per image.
    trainer.window.work, calls = Work(lambda ratios: 1e12 * (1 - sum(ratios)), peak_flops_per_sec=8e12), []

    def taking(seconds, work):
        def call(*args):
            clock[0] += seconds
            return work(*args)

        return call

    before_each_step(trainer, taking(STEP_SEC, lambda step: None))
    trainer.checkpoints.save = taking(SAVE_SEC, trainer.checkpoints.save)
    trainer.evaluators = [(2, taking(EVALUATION_SEC, lambda step: {"score": 1.0}))]
    trainer.stop.global_reason = lambda reserve_sec, now: calls.append((trainer.step, reserve_sec)) or ""
    return trainer, run, calls


@pytest.mark.parametrize("interrupted_at", [None, 5])
def test_training_time_counts_steps_only(tmp_path, clock, capsys, interrupted_at):
    """Also after a kill between log points: evaluations after the last save are repeated."""
    if interrupted_at:
        trainer, run, _ = timed(tmp_path, clock)
        interrupted(trainer, run, interrupted_at)
    trainer, run, _ = timed(tmp_path, clock)
    assert trainer.first_step == (4 if interrupted_at else 0)
    run_training(trainer, run)
    lines = metrics(tmp_path, clocks=True)
    keys = ("step", "num_images", "train_time_sec", "images_per_sec")
    trained = [tuple(line[key] for key in keys) for line in lines if "loss" in line]
    assert trained == [(3, 24, 6.0, 4.0), (6, 48, 12.0, 4.0)]
    assert (lines[-2]["tflops_per_sec"], lines[-2]["utilisation"]) == (2.0, 0.25)
    evaluated = [(line["step"], line["evaluation_time_sec"]) for line in lines if "score" in line]
    assert evaluated == [(step, step / 2 * EVALUATION_SEC) for step in (2, 4, 6)]
    share = 3 * EVALUATION_SEC / (3 * EVALUATION_SEC + 6 * STEP_SEC)
    assert f"(evaluations took {share:.0%} of the run)" in capsys.readouterr().out


def test_flops_account_for_the_routes(tmp_path):
    trainer, run = tiny_trainer(tmp_path)
    dense, routed = trainer.window.work.flops((0.0,)), trainer.window.work.flops((0.5,))
    assert dense == cost_of(trainer.net, (0.0,)).dense_training_flops
    assert routed == cost_of(trainer.net, (0.5,)).routed_training_flops
    assert routed < dense
    assert trainer.window.work.peak_flops_per_sec is None, "unknown for a CPU"
    run.unlock()


def test_peak_memory_counts_from_the_last_log_point(tmp_path):
    trainer, run = tiny_trainer(tmp_path, "train.total_steps=3", "train.log_every=1")

    def take_half_a_gib(step):
        if step == 1:
            with mmap.mmap(-1, 2**29) as taken:  # an allocator may keep other memory
                for page in range(0, len(taken), mmap.PAGESIZE):
                    taken[page] = 1

    before_each_step(trainer, take_half_a_gib)
    run_training(trainer, run)
    first, second, third = (line["peak_memory_gib"] for line in metrics(tmp_path, clocks=True))
    assert second - max(first, third) > 0.25


def test_the_reserve_covers_steps_saves_and_evaluations(tmp_path, clock):
    trainer, run, calls = timed(tmp_path, clock)
    guessed_sec = trainer.clock.longest_sec["save"]
    assert guessed_sec == 16 * sum(parameter.numel() for parameter in trainer.net.parameters()) / 100e6
    interrupted(trainer, run, 4)
    # Twice at a step that evaluates: before the turn, and before the evaluation, which is then reserved, too.
    expected = [
        (0, guessed_sec),
        (1, guessed_sec + 5 * STEP_SEC),
        (2, guessed_sec + 5 * STEP_SEC),
        (2, SAVE_SEC + 5 * (2 * STEP_SEC + SAVE_SEC) / 2),
        (3, SAVE_SEC + 5 * (3 * STEP_SEC + SAVE_SEC + EVALUATION_SEC) / 3),
        (4, SAVE_SEC + 5 * (4 * STEP_SEC + SAVE_SEC + EVALUATION_SEC) / 4),
        (4, SAVE_SEC + 5 * (4 * STEP_SEC + 2 * SAVE_SEC + EVALUATION_SEC) / 4 + EVALUATION_SEC),
    ]
    assert [step for step, _ in calls] == [step for step, _ in expected]
    assert [seconds for _, seconds in calls] == pytest.approx([END_SEC + seconds for _, seconds in expected])
    # A resumed run counts only the steps of its process; a tracker needs time to close.
    trainer, run, calls = timed(tmp_path, clock)
    trainer.evaluators, nothing = [], lambda *_: None
    trainer.recorder.tracker = SimpleNamespace(log=nothing, close=nothing)
    run_training(trainer, run)
    end_sec = END_SEC + STOPPING_SEC
    assert calls[:2] == [(4, end_sec + SAVE_SEC), (5, end_sec + SAVE_SEC + 5 * STEP_SEC)]


def test_a_stopping_run_waits_for_its_tracker_only_as_reserved(tmp_path):
    waited, recorder = [], Recorder(ALONE, RunFolder(tmp_path))
    recorder.tracker = SimpleNamespace(close=waited.append)
    for stopping in (True, False):
        recorder.close(stopping)
    assert waited == [STOPPING_SEC, CLOSE_WITHIN_SEC]


def test_the_time_limit_counts_from_the_process_start_and_a_signal_precedes_it(monkeypatch):
    request, started, now = StopRequest(100.0), psutil.Process().create_time(), [0.0]
    monkeypatch.setattr("training.stopping.time", SimpleNamespace(time=lambda: started + now[0]))
    for now[0], reserve_sec, reason in ((90.0, 9.5, ""), (90.0, 10.5, TIME_LIMIT), (101.0, 0.0, TIME_LIMIT)):
        assert request.global_reason(reserve_sec) == reason
    request._on_signal(signal.SIGUSR1, None)
    assert request.global_reason(0.0) == "SIGUSR1"
    assert StopRequest(None).global_reason(1e12) == ""


@pytest.mark.usefixtures("gloo")
@pytest.mark.parametrize(("step_sec", "most_steps"), [(0.001, MAX_TICK_STEPS), (0.09, 11), (3.0, 1)])
def test_several_processes_agree_once_a_second(monkeypatch, step_sec, most_steps):
    """However long the first steps take. Before an evaluation, they always agree."""
    now, ticks, request, reduce = [0.0], [], StopRequest(None), dist.all_reduce
    monkeypatch.setattr("training.stopping.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(dist, "all_reduce", lambda *a, **k: ticks.append(step) or reduce(*a, **k))
    for step in range(100):
        assert request.global_reason(0.0) == ""
        now[0] += 30.0 if step == 0 else step_sec  # the first one compiles
    gaps = [b - a for a, b in pairwise(ticks)]
    assert ticks[:2] == [0, 1] and max(gaps) == gaps[-1] == most_steps
    ticks.clear()
    assert request.global_reason(0.0, now=True) == "" and ticks
    request._on_signal(signal.SIGTERM, None)
    reasons = [request.global_reason(0.0) for _ in range(most_steps)]
    assert "SIGTERM" in reasons and set(reasons) <= {"", "SIGTERM"}
