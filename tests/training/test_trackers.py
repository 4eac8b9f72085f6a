"""Trackers that are slow, fail, or have no network or disk space do not affect training."""

import errno
import io
import os
import socket
import time
from functools import partial
from threading import Event

import numpy as np
import pytest
import wandb
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.runs import interrupted, metrics, tiny_run, tiny_trainer
from training.recorder import MetricsFile
from training.trackers import BackgroundTracker, WandbTracker


class MockTracker:
    """A tracker that keeps its lines and calls the given functions."""

    def __init__(self, at_line=lambda step: None, at_close=lambda: None, at_open=lambda config: None):
        self.lines, self.at_line, self.at_close, self.open = [], at_line, at_close, at_open

    def log(self, values, step):
        self.at_line(step)
        self.lines.append((values, step))

    def close(self):
        self.at_close()


def fail(*_):
    raise ConnectionError("the service is down")


def test_every_line_reaches_the_tracker_before_it_is_closed():
    may_write, warnings = Event(), []
    mock = MockTracker(lambda step: may_write.wait())
    tracker = BackgroundTracker(mock, warnings.append, {})
    for step in range(5):
        tracker.log({"loss": 1.0}, step)
    assert mock.lines == []
    may_write.set()
    tracker.close()
    assert [step for _, step in mock.lines] == list(range(5))
    assert warnings == []


@pytest.mark.parametrize("when", ["open", "line", "close"])
def test_a_tracker_that_fails_warns_once_and_is_switched_off(when):
    mock, warnings = MockTracker(**{f"at_{when}": fail}), []
    tracker = BackgroundTracker(mock, warnings.append, {})
    for step in range(3):
        tracker.log({"loss": 1.0}, step)
    tracker.close()
    reason = "ConnectionError: the service is down"
    assert warnings == [f"warning: the tracker is switched off ({reason}); metrics.jsonl has every line"]
    assert bool(mock.lines) == (when == "close")


def test_a_tracker_that_does_not_end_is_abandoned():
    may_continue, warnings = Event(), []
    mock = MockTracker(lambda step: may_continue.wait() and fail())
    tracker = BackgroundTracker(mock, warnings.append, {})
    start = time.monotonic()
    for step in range(100):
        tracker.log({"loss": 1.0}, step)
    tracker.close(0.2)
    assert time.monotonic() - start < 5
    may_continue.set()
    tracker._thread.join()
    assert len(warnings) == 1, "it warns once"
    assert "it did not finish within 0.2 s" in warnings[0]


@pytest.mark.parametrize(("cut", "kept"), [(1, 1), (22, 1), (42, 0)])
def test_a_truncated_file_continues_with_complete_lines(tmp_path, cut, kept):
    """The file was cut in its last line, or in the one before."""
    path, warnings = tmp_path / "metrics.jsonl", []
    file = MetricsFile(path)
    for step in (1, 2):
        file.log({"loss": 1.5}, step)
    state = file.state()
    file.close()
    assert path.stat().st_size == 2 * 25 == state["size"]
    os.truncate(path, state["size"] - cut)
    reopened = MetricsFile(path, state["size"], show=warnings.append)
    assert len(path.read_bytes().splitlines(keepends=True)) == kept, "before the next line, too"
    reopened.log({}, 3)
    reopened.close()
    assert [line["step"] for line in metrics(tmp_path)] == [*range(1, kept + 1), 3]
    warning = f"warning: {path} has {50 - cut} bytes, 50 at the checkpoint: lines are missing"
    assert warnings == [warning]


def test_a_checkpoint_counts_complete_lines_on_a_full_disk(tmp_path, monkeypatch):
    file, pwrite = MetricsFile(tmp_path / "metrics.jsonl", show=lambda line: None), os.pwrite

    def with_room_for(size, descriptor, content, at):
        if at >= size:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, content[: size - at], at)

    file.log({"loss": 1.5}, 1)
    monkeypatch.setattr(os, "pwrite", partial(with_room_for, 60))
    file.log({"loss": 2.5}, 2)
    file.log({"loss": 3.5}, 3)
    state = file.state()
    assert (state["size"], len(state["waiting"].splitlines())) == (50, 1)
    monkeypatch.undo()
    file.close()
    MetricsFile(tmp_path / "metrics.jsonl", **state).close()
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]


def picture(file):
    return np.asarray(Image.open(file))


def assert_pictures(folder, logged):
    """Compare logged pictures with the run's sample files, which have one channel. metrics.jsonl has none."""
    written = [picture(folder / f"samples/step_{step:08d}.png") for step in (3, 6)]
    for ours, theirs in zip(written, logged, strict=True):
        assert ours.std() > 10
        assert np.array_equal(np.asarray(Image.fromarray(theirs).convert("L")), ours)
    assert [line["step"] for line in metrics(folder)] == [2, 3, 4, 6, 6]
    assert all("samples" not in line for line in metrics(folder))


def resumed_run(folder, *overrides):
    """Interrupt and resume a run with samples and evaluations, in another second: file names contain it."""
    options = ("train.sample_every=3", "sampler.num_steps=2", "data.in_channels=1", "train.eval_every=2")
    options += ("train.save_every=4", *overrides)
    interrupted(*tiny_trainer(folder, *options), at=5)
    second = int(time.time())
    while int(time.time()) == second:
        time.sleep(0.01)
    tiny_run(folder, *options)
    return metrics(folder, clocks=True)


def test_tensorboard_gets_all_that_a_run_reports_and_no_point_twice(tmp_path):
    lines = resumed_run(tmp_path, "tracker=tensorboard")
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"images": 0}).Reload()
    assert [event.step for event in events.Images("samples")] == [3, 6]
    shown = [event.encoded_image_string for event in events.Images("samples")]
    assert_pictures(tmp_path, [picture(io.BytesIO(encoded)) for encoded in shown])
    assert [event.step for event in events.Scalars("val_loss_dense")] == [2, 4, 6]
    assert [event.step for event in events.Scalars("peak_memory_gib")] == [3, 6]
    assert events.Scalars("tflops_per_sec")[-1].value == pytest.approx(lines[-2]["tflops_per_sec"])
    for t in (key for key in lines[-1] if "/t=" in key):
        assert events.Scalars(t)[-1].value == pytest.approx(lines[-1][t])
    (table,) = events.Tensors("configuration/text_summary")[-1].tensor_proto.string_val
    assert "| `train.batch_size` | 8 |" in table.decode()


def test_wandb_gets_all_that_a_run_reports_and_resumes_its_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()
    resumed_run(tmp_path, "tracker=wandb")
    files = tmp_path.glob("wandb/offline-run-*/files/media/images/samples_*.png")
    by_step = {int(file.name.split("_")[1]): picture(file) for file in files}
    assert sorted(by_step) == [3, 6]
    assert_pictures(tmp_path, [by_step[3], by_step[6]])
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len(runs) == 2
    assert len({folder.name.rpartition("-")[2] for folder in runs}) == 1, "one run, as its id says"
    (log,) = runs[-1].glob("*.wandb")  # `wandb sync` reads this file
    latest = time.monotonic() + 60  # a process of wandb writes it
    while b"train.batch_size" not in log.read_bytes():
        assert time.monotonic() < latest, "the configuration is missing"
        time.sleep(0.1)


def test_wandb_does_not_create_a_removed_run_folder_again(tmp_path):
    values = {"loss": 1.0, "samples": np.zeros((4, 4, 3), np.uint8)}
    with pytest.raises(FileNotFoundError):
        WandbTracker("r", str(tmp_path / "run"), "p", "offline").log(values, 1)
    assert list(tmp_path.iterdir()) == []


def test_wandb_online_without_a_server_never_stops_training(tmp_path, monkeypatch, capsys):
    """The server accepts connections and never answers."""
    monkeypatch.setattr("training.recorder.CLOSE_WITHIN_SEC", 0.5)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        wandb.teardown()  # it reads these variables once
        tiny_run(tmp_path, "tracker=wandb", "tracker.mode=online")
    assert [line["step"] for line in metrics(tmp_path)] == [3, 6]
    assert capsys.readouterr().out.count("the tracker is switched off") == 1
