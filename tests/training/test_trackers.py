"""Trackers that are slow, fail, have no network or no disk space: the training does not notice."""

import errno
import io
import json
import math
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
from training.trackers import BackgroundTracker, TensorBoardTracker, WandbTracker

GREY = ("data.in_channels=1", "train.log_every=3")


class Remembering:
    """A tracker that does at each line what it is told."""

    def __init__(self, at_line=lambda step: None, at_close=lambda: None, at_open=lambda config: None):
        self.lines, self.at_line, self.at_close, self.open = [], at_line, at_close, at_open

    def log(self, values, step):
        self.at_line(step)
        self.lines.append((values, step))

    def close(self):
        self.at_close()


def fail(*_):
    raise ConnectionError("the service is down")


def test_every_line_reaches_the_tracker_before_it_is_closed(tmp_path):
    remembering, said = Remembering(lambda step: time.sleep(0.05)), []
    tracker = BackgroundTracker(remembering, said.append, {})
    for step in range(5):
        tracker.log({"loss": 1.0}, step)
    assert len(remembering.lines) < 5
    tracker.close()
    assert [step for _, step in remembering.lines] == list(range(5))
    assert said == []


@pytest.mark.parametrize("when", ["open", "line", "close"])
def test_a_tracker_that_fails_warns_once_and_is_switched_off(when):
    remembering, said = Remembering(**{f"at_{when}": fail}), []
    tracker = BackgroundTracker(remembering, said.append, {})
    for step in range(3):
        tracker.log({"loss": 1.0}, step)
        time.sleep(0.02)
    tracker.close()
    reason = "ConnectionError: the service is down"
    assert said == [f"warning: the tracker is switched off ({reason}); metrics.jsonl has every line"]
    if when != "close":
        assert remembering.lines == []


def test_a_tracker_that_does_not_end_is_abandoned():
    for_ever, said = Event(), []
    tracker = BackgroundTracker(Remembering(lambda step: for_ever.wait() and fail()), said.append, {})
    start = time.monotonic()
    for step in range(100):
        tracker.log({"loss": 1.0}, step)
    tracker.close(0.2)
    assert time.monotonic() - start < 5
    for_ever.set()
    tracker._thread.join()
    assert len(said) == 1, "it reports nothing more"
    assert "it did not end within 0.2 s" in said[0]


def test_lines_of_steps_that_will_be_run_again_are_cut_off(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.log({"loss": 1.0}, 1)
    size = file.state()["size"]
    file.log({"loss": 2.0}, 2)
    file.close()
    MetricsFile(tmp_path / "metrics.jsonl", size).close()
    assert metrics(tmp_path) == [{"step": 1, "loss": 1.0}]


@pytest.mark.parametrize(("cut", "kept"), [(1, 1), (22, 1), (42, 0)])
def test_a_truncated_file_continues_with_complete_lines(tmp_path, cut, kept):
    """At any byte."""
    path, said = tmp_path / "metrics.jsonl", []
    file = MetricsFile(path)
    for step in (1, 2):
        file.log({"loss": 1.5}, step)
    state = file.state()
    file.close()
    assert path.stat().st_size == 2 * 25 == state["size"]
    os.truncate(path, state["size"] - cut)
    again = MetricsFile(path, state["size"], show=said.append)
    assert len(path.read_bytes().splitlines(keepends=True)) == kept, "before the next line, too"
    again.log({}, 3)
    again.close()
    assert [line["step"] for line in metrics(tmp_path)] == [*range(1, kept + 1), 3]
    warning = f"warning: {path} has {50 - cut} bytes, 50 at the checkpoint: lines before it are missing"
    assert said == [warning]


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


def test_numbers_that_are_not_finite_are_null_with_a_warning(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl", show=(said := []).append)
    file.log({"val_loss_dense": math.nan, "loss": 1.0, "grad_norm": None}, 4)
    file.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert line == {"step": 4, "val_loss_dense": None, "loss": 1.0, "grad_norm": None}
    assert said == [f"warning: val_loss_dense=nan of step 4 is not finite: null in {tmp_path}/metrics.jsonl"]


def test_a_tracker_without_disk_space_does_not_stop_a_run(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/tensorboard").write_text("a file where the folder should be")
    tiny_run(tmp_path / "run", "tracker=tensorboard")
    tiny_run(tmp_path / "plain")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "plain")
    assert capsys.readouterr().out.count("the tracker is switched off") == 1


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_a_tracker_does_not_make_a_removed_run_folder_again(tmp_path, tracker):
    folder = tmp_path / "run"
    made = TensorBoardTracker(str(folder / "tensorboard"))
    made = made if tracker == "tensorboard" else WandbTracker("r", str(folder), "p", "offline")
    with pytest.raises(FileNotFoundError):
        made.log({"loss": 1.0, "samples": np.zeros((4, 4, 3), np.uint8)}, 1)
    assert list(tmp_path.iterdir()) == []


def picture(file):
    return np.asarray(Image.open(file))


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_trackers_get_the_grids_of_samples(tmp_path, tracker, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()
    options = (f"tracker={tracker}", "train.sample_every=3", "sampler.num_steps=2")
    trainer = tiny_run(tmp_path / "run", *options, *GREY)
    written = [picture(tmp_path / f"run/samples/step_{step:08d}.png") for step in (3, 6)]
    if tracker == "tensorboard":
        folder = EventAccumulator(str(tmp_path / "run/tensorboard"), size_guidance={"images": 0})
        events = folder.Reload().Images("samples")
        assert [event.step for event in events] == [3, 6]
        found = [picture(io.BytesIO(event.encoded_image_string)) for event in events]
    else:
        media = (tmp_path / "run").glob("wandb/offline-run-*/files/media/images/samples_*.png")
        files = sorted(media, key=wandb_step)
        assert [wandb_step(file) for file in files] == [3, 6]
        found = [picture(file) for file in files]
    for ours, theirs in zip(written, found, strict=True):
        assert ours.std() > 10
        assert np.array_equal(np.asarray(Image.fromarray(theirs).convert("L")), ours)
    assert all("samples" not in line for line in metrics(tmp_path / "run"))
    assert [line["step"] for line in metrics(tmp_path / "run")] == [3, 6], "a picture alone is no line"
    assert trainer.step == 6


def wandb_step(file):
    return int(file.name.split("_")[1])


@pytest.fixture
def deaf_server():
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("network", ["none", "deaf"])
def test_wandb_online_without_a_server_never_stops_training(
    tmp_path, network, deaf_server, monkeypatch, capsys
):
    monkeypatch.setattr("training.recorder.CLOSE_WITHIN_SEC", 2.0)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", deaf_server if network == "deaf" else "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "3")
    wandb.teardown()  # it reads these variables once
    start = time.monotonic()
    tiny_run(tmp_path / "run", "tracker=wandb", "tracker.mode=online")
    assert time.monotonic() - start < 40
    assert [line["step"] for line in metrics(tmp_path / "run")] == [3, 6]
    assert capsys.readouterr().out.count("the tracker is switched off") == 1


def test_points_after_the_checkpoint_are_removed_on_resume(tmp_path):
    for steps in ((10, 20, 30), (20, 30, 40)):
        tracker = TensorBoardTracker(str(tmp_path))
        tracker.open({})
        for step in steps:
            tracker.log({"loss": float(steps[0])}, step)
        tracker.close()
        time.sleep(1.1)  # the name of a file has the second in it
    events = EventAccumulator(str(tmp_path)).Reload()
    points = [(event.step, event.value) for event in events.Scalars("loss")]
    assert points == [(10, 10.0), (20, 20.0), (30, 20.0), (40, 20.0)]


def test_tensorboard_gets_the_configuration_and_no_point_twice(tmp_path):
    evaluated = ("tracker=tensorboard", "train.eval_every=2", "train.save_every=4")
    trainer, run = tiny_trainer(tmp_path / "run", *evaluated)
    interrupted(trainer, run, at=5)
    time.sleep(1.1)  # the name of a file has the second in it
    tiny_run(tmp_path / "run", *evaluated)
    events = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    lines = metrics(tmp_path / "run", clocks=True)
    assert [event.step for event in events.Scalars("val_loss_dense")] == [2, 4, 6]
    assert [event.step for event in events.Scalars("peak_memory_gib")] == [3, 6]
    assert events.Scalars("tflops_per_sec")[-1].value == pytest.approx(lines[-2]["tflops_per_sec"])
    for t in (key for key in lines[-1] if "/t=" in key):
        assert events.Scalars(t)[-1].value == pytest.approx(lines[-1][t])
    (table,) = events.Tensors("configuration/text_summary")[-1].tensor_proto.string_val
    assert "| `train.batch_size` | 8 |" in table.decode()


def test_wandb_gets_the_configuration_and_resumes_its_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    evaluated = ("tracker=wandb", "train.eval_every=2")
    for total_steps in (4, 6):
        wandb.teardown()
        tiny_run(tmp_path / "run", *evaluated, f"train.total_steps={total_steps}")
        time.sleep(1.1)  # the name of a folder has the second in it
    runs = sorted((tmp_path / "run/wandb").glob("offline-run-*"))
    assert len(runs) == 2
    assert len({folder.name.rpartition("-")[2] for folder in runs}) == 1, "one run, as its id says"
    (log,) = runs[-1].glob("*.wandb")  # which `wandb sync` reads; offline there is no other place
    assert b"train.batch_size" in log.read_bytes()
