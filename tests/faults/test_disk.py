"""Full disks, read-only folders and damaged checkpoints harm neither the training nor its saved steps."""

import os
import re
import resource
import shutil
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from builders.sampling import open_run
from runtime.errors import UserError
from runtime.lock import Busy
from tests.runs import metrics, tiny_run, tiny_trainer
from tests.training.test_trainer import assert_same_run
from training.checkpoint import CheckpointFolder, damage_of, latest_checkpoint, steps_in
from training.fit import run_training
from training.run_folder import RunFolder
from training.weights import load_weights


def cut(file):
    os.truncate(file, file.stat().st_size // 2)


def flip(file):
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


DAMAGES = {"cut": cut, "flipped bit": flip, "empty": lambda file: os.truncate(file, 0), "gone": Path.unlink}
FILES = ("net.safetensors", "ema.safetensors", "optimizer.safetensors", "state.json", "SHA256SUMS")
DAMAGED = [*((FILES[0], damage) for damage in DAMAGES), *((name, "flipped bit") for name in FILES[1:])]
REPLACED = ("no digests", "empty", "file", "dangling link", "link in a circle")


@pytest.mark.parametrize(("name", "damage"), DAMAGED)
def test_damage_is_detected_in_every_file(tmp_path, whole, damage, name):
    checkpoint = shutil.copytree(latest_checkpoint(whole), tmp_path / "checkpoint")
    assert damage_of(checkpoint) is None
    DAMAGES[damage](checkpoint / name)
    assert damage_of(checkpoint)


def test_a_damaged_checkpoint_is_renamed_and_the_previous_one_is_used(tmp_path, whole, capsys):
    shutil.copytree(whole, tmp_path / "run")
    newest = latest_checkpoint(tmp_path / "run")
    flip(newest / "net.safetensors")
    tiny_run(tmp_path / "run", "train.log_every=1")
    assert f"warning: {newest} is damaged" in (output := capsys.readouterr().out)
    assert "resumed at step 4" in output
    assert newest.with_name(f"{newest.name}.damaged").is_dir()
    assert_same_run(whole, tmp_path / "run")
    assert damage_of(latest_checkpoint(tmp_path / "run")) is None


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run whose manifest has the status of a killed one."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    tiny_run(folder, "train.log_every=1")
    RunFolder(folder).update({"status": "running"})
    return folder


def test_a_run_without_an_intact_checkpoint_does_not_start_again(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "run")
    for _, path in steps_in(tmp_path / "run/checkpoints"):
        flip(path / "net.safetensors")
    for _ in range(2):
        with pytest.raises(ValueError, match="no intact checkpoint to resume from: start a new run with"):
            tiny_trainer(tmp_path / "run")
    assert metrics(tmp_path / "run") == metrics(whole)


def replace_checkpoint(checkpoint, kind):
    """Replace a checkpoint by something else."""
    if kind == "no digests":
        (checkpoint / "SHA256SUMS").unlink()
        return
    shutil.rmtree(checkpoint)
    {
        "empty": checkpoint.mkdir,
        "file": checkpoint.touch,
        "dangling link": lambda: checkpoint.symlink_to("nowhere"),
        "link in a circle": lambda: checkpoint.symlink_to(checkpoint),
    }[kind]()


@pytest.mark.parametrize(
    ("kind", "before"), [*product(REPLACED, [None]), *product(["no digests"], REPLACED[1:4])]
)
def test_an_invalid_checkpoint_is_renamed_over_anything(tmp_path, whole, kind, before):
    shutil.copytree(whole, tmp_path / "run")
    newest = latest_checkpoint(tmp_path / "run")
    if before:
        shutil.copytree(newest, aside := newest.with_name(f"{newest.name}.damaged"))
        replace_checkpoint(aside, before)
    replace_checkpoint(newest, kind)
    warnings = []
    used = CheckpointFolder(newest.parent, 2, None).newest_intact(warnings.append)
    assert used.name == "step_00000004" and not os.path.lexists(newest)
    renamed = "renamed; the previous checkpoint is used"
    assert warnings == [f"warning: {newest} is damaged (it has no SHA256SUMS): {renamed}"]
    assert os.path.lexists(newest.with_name(f"{newest.name}.damaged"))


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_an_invalid_checkpoint_is_removed_like_an_old_one(tmp_path, kind):
    folder = CheckpointFolder(tmp_path, keep_last=1, milestone_every=None)
    for step in (1, 2, 3):
        folder.save(step, {"net": torch.nn.Linear(1, 1)})
        if step < 3:
            replace_checkpoint(tmp_path / f"step_{step:08d}", kind)
        (tmp_path / ".step_00000009.removed").touch()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".step_00000009.removed", "step_00000003"]


def test_nothing_is_sampled_from_a_damaged_checkpoint(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "run")
    net = tiny_trainer(tmp_path / "other")[0].net
    load_weights(net, tmp_path / "run")
    file = latest_checkpoint(tmp_path / "run") / "ema.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)
    with pytest.raises(ValueError, match=r"is damaged \(SHA256SUMS does not match ema.safetensors\)"):
        open_run(tmp_path / "run")
    (file.parent / "SHA256SUMS").unlink()
    (step, before), _ = steps_in(tmp_path / "run/checkpoints")
    hint = f"step {step} is intact: {re.escape(str(before))}"
    with pytest.raises(ValueError, match=rf"is damaged \(it has no SHA256SUMS\): {hint}"):
        load_weights(net, file)
    (before / "ema.safetensors").unlink()
    with pytest.raises(ValueError, match="the run has no other intact checkpoint"):
        load_weights(net, file)


def test_retention_counts_only_intact_checkpoints(tmp_path, whole):
    """Newer damaged checkpoints must not push out the last intact one."""
    shutil.copytree(whole, tmp_path / "run")
    flip(latest_checkpoint(tmp_path / "run") / "net.safetensors")
    tiny_run(tmp_path / "run", "train.save_every=5", "train.keep_last=1", "train.total_steps=5")
    ((step, path),) = steps_in(tmp_path / "run/checkpoints")
    assert (step, damage_of(path)) == (5, None)


def test_a_partial_checkpoint_is_never_used(tmp_path):
    folder = CheckpointFolder(tmp_path, keep_last=2, milestone_every=None)
    for name in (".step_00000003.partial", ".step_00000001.removed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "net.safetensors").write_bytes(b"a part")
    assert folder.newest_intact(print) is None
    folder.save(5, {"net": torch.nn.Linear(1, 1)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000005"]


@contextmanager
def file_size_limit(num_bytes):
    """Imitate a full disk: no file may grow beyond num_bytes."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def fail_saves_before(trainer, step):
    """Make saves before `step` fail with the system's error."""
    save = trainer.checkpoints.save

    def with_limit(now, parts):
        with file_size_limit(100_000) if now < step else nullcontext():
            save(now, parts)

    trainer.checkpoints.save = with_limit


def test_a_temporarily_full_disk_costs_only_checkpoints(tmp_path, whole, capsys):
    """Saving fails at steps 2 and 4; then the disk has room again."""
    trainer, run = tiny_trainer(tmp_path / "run", "train.log_every=1")
    fail_saves_before(trainer, 6)
    run_training(trainer, run)
    output = capsys.readouterr().out
    assert "warning: cannot save step 2" in output
    assert "File too large" in output
    assert "the run has no checkpoint yet. Training continues and tries again at the next save" in output
    assert [step for step, _ in steps_in(tmp_path / "run/checkpoints")] == [6]
    assert_same_run(whole, tmp_path / "run")


def test_a_full_disk_ends_a_run_only_at_its_last_checkpoint(tmp_path, whole):
    trainer, run = tiny_trainer(tmp_path / "run", "train.log_every=1")
    fail_saves_before(trainer, 7)
    with pytest.raises(UserError, match=r"^cannot save step 6: .*; the run has no checkpoint yet$"):
        run_training(trainer, run)
    assert run.manifest()["status"] == "failed"
    assert "cannot save step 6" in run.manifest()["failure"]["reason"]
    tiny_run(tmp_path / "run", "train.log_every=1")
    assert_same_run(whole, tmp_path / "run")


def test_metrics_wait_for_room_on_a_full_disk(tmp_path, whole, capsys):
    """The lines go to /dev/full; a checkpoint keeps them."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(UserError, match="No space left on device"):
        tiny_run(tmp_path / "run", "train.log_every=1")
    output = capsys.readouterr().out
    assert output.count("No space left on device; unwritten lines are kept in memory and in checkpoints") == 1
    assert RunFolder(tmp_path / "run").manifest()["status"] == "failed"
    (tmp_path / "run/metrics.jsonl").unlink()
    tiny_run(tmp_path / "run", "train.log_every=1")
    assert_same_run(whole, tmp_path / "run")


def test_metrics_are_written_once_when_there_is_room_again(tmp_path, whole):
    trainer, run = tiny_trainer(tmp_path / "run", "train.log_every=1")
    file = trainer.recorder.metrics_file
    flush, sizes = file.flush, []

    def with_limit():
        sizes.append(file.path.stat().st_size)
        # At steps 3 and 4 there is room for a part of the third line.
        with file_size_limit(sizes[2] + 10) if 2 < trainer.step < 5 else nullcontext():
            flush()

    file.flush = with_limit
    run_training(trainer, run)
    assert_same_run(whole, tmp_path / "run")


@pytest.mark.parametrize("folder", ["/sys/run", "/dev/null/run"])
def test_a_read_only_folder_is_refused_in_one_line(tmp_path, folder):
    with pytest.raises(OSError, match=folder):
        tiny_trainer(folder)


def test_a_folder_that_is_in_use_is_left_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("training.run_folder.LOCK_WITHIN_SEC", 0.1)
    trainer, run = tiny_trainer(tmp_path)
    before = (tmp_path / "manifest.json").read_text()
    with pytest.raises(Busy, match=rf"^output_dir={tmp_path} is in use by process {os.getpid()} on "):
        tiny_trainer(tmp_path)
    assert (tmp_path / "manifest.json").read_text() == before
    assert "in use" not in capsys.readouterr().out, "one line, and that is the error"
    run_training(trainer, run)
    assert not (tmp_path / ".lock").exists()
    tiny_run(tmp_path, "train.total_steps=8")


def test_a_picture_without_disk_space_does_not_stop_a_run(tmp_path, capsys):
    (tmp_path / "samples").write_text("a file where the folder should be")
    tiny_run(tmp_path, "train.sample_every=3", "sampler.num_steps=2")
    assert capsys.readouterr().out.count("could not be written") == 2
    assert [line["step"] for line in metrics(tmp_path)] == [3, 6]
