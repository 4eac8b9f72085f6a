"""Two starts in one run folder, and a run folder that is moved, removed, or loses a file."""

import json
import shutil
import subprocess

import pytest

from runtime.errors import UserError
from runtime.lock import TRY_AGAIN
from tests.faults.killing import ENVIRONMENT, ONE, TWO, program
from tests.runs import ROOT, TINY, before_each_step, metrics, tiny_run, tiny_trainer
from tests.runtime.test_lock import holder
from training.fit import run_training
from training.run_folder import RunFolder


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [ONE, TWO])
def test_a_second_start_names_the_process_in_the_folder_and_exits_or_waits(tmp_path, launcher):
    with holder(tmp_path / "runs/r") as process:
        refused = program(launcher, folder=tmp_path)
        # Launchers have their own exit status.
        assert refused.returncode == (TRY_AGAIN if launcher == ONE else 1)
        (line,) = {line for line in refused.stderr.splitlines() if line.startswith("error: ")}
        assert line.startswith(f"error: output_dir=runs/r is in use by process {process.pid} on ")
        assert line.endswith(": end it, or try again when it has ended, or wait for it with wait=true")
        assert "in use" not in refused.stdout
        assert [file.name for file in (tmp_path / "runs/r").iterdir()] == [".lock"]
        command = [*launcher, str(ROOT / "train.py"), *TINY, "run_name=r", "wait=true"]
        options = {"cwd": tmp_path, "env": ENVIRONMENT, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, **options) as waiting:
            messages = []
            for line in waiting.stdout:
                messages += [line] * ("wait=true: output_dir=runs/r is in use by process " in line)
                if messages:
                    process.kill()
    assert (waiting.returncode, len(messages)) == (0, 1)
    assert json.loads((tmp_path / "runs/r/manifest.json").read_text())["status"] == "finished"


def test_a_missing_or_damaged_file_of_a_run_is_named(tmp_path):
    tiny_run(tmp_path, "train.total_steps=4")
    rule = "restore it, or choose another folder with run_name=NAME"
    for name in ("config.yaml", "manifest.json"):
        content = (tmp_path / name).read_text()
        (tmp_path / name).unlink()
        for total_steps in (4, 6):
            with pytest.raises(FileNotFoundError) as error:
                tiny_trainer(tmp_path, f"train.total_steps={total_steps}")
            assert str(error.value) == f"output_dir={tmp_path} has a run without {name}: {rule}"
        for damaged in ("[1", "5"):
            (tmp_path / name).write_text(damaged)
            with pytest.raises(ValueError, match=rf"{name} is damaged"):
                tiny_trainer(tmp_path)
        (tmp_path / name).write_text(content)
    tiny_run(tmp_path)


DRAWING = ("train.sample_every=1", "sampler.num_steps=2", "train.log_every=6")


@pytest.fixture(scope="module")
def drawing(tmp_path_factory):
    """An undisturbed run that draws samples after each step."""
    folder = tmp_path_factory.mktemp("drawing") / "run"
    tiny_run(folder, *DRAWING)
    return folder


@pytest.mark.parametrize(
    ("what", "tracker", "step"),
    [("moved", "tensorboard", 2), ("removed", "tensorboard", 5), ("taken", "none", 2)],
)
def test_a_run_whose_folder_is_moved_stops_and_writes_nothing_there(tmp_path, drawing, what, tracker, step):
    """After step 2 it would draw a picture, after step 5 save; a tracker opens its file at its first line."""
    folder, elsewhere = tmp_path / "runs/run", tmp_path / "moved"
    options = (f"tracker={tracker}", *DRAWING)
    trainer, run = tiny_trainer(folder, *options)
    others = []

    def move():
        folder.rename(elsewhere)
        if what == "removed":  # renamed first: a tracker may be about to write there
            shutil.rmtree(elsewhere)
        if what == "taken":  # the same command is started again
            others.append(tiny_trainer(folder, *options))
            others.append({file: file.read_bytes() for file in folder.rglob("*") if file.is_file()})

    before_each_step(trainer, lambda now: now == step and move())
    with pytest.raises(UserError) as error:
        run_training(trainer, run)
    message = f"output_dir={folder} or its .lock was moved or removed during training: to resume"
    assert str(error.value).startswith(message)
    if what == "taken":
        assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == others[1]
        run_training(*others[0])
    else:
        assert not (tmp_path / "runs/run").exists()
    if what != "removed":
        assert RunFolder(elsewhere).manifest()["status"] == "running", "like a killed run"
        tiny_run(elsewhere, *options)
        assert metrics(elsewhere) == metrics(drawing)


@pytest.mark.parametrize("end", [KeyboardInterrupt, RuntimeError])
def test_a_failing_run_does_not_write_to_a_new_folder_at_its_path(tmp_path, end):
    folder = tmp_path / "run"
    trainer, run = tiny_trainer(folder)

    def move():
        folder.rename(tmp_path / "moved")
        folder.mkdir()
        raise end("the cosmic ray")

    before_each_step(trainer, lambda step: step == 1 and move())
    with pytest.raises(RuntimeError if end is RuntimeError else UserError):
        run_training(trainer, run)
    assert list(folder.iterdir()) == []
