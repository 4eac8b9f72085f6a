"""The estimates of time, memory and disk space agree with the run."""

import math
import shutil
from types import SimpleNamespace

import pytest

from builders import estimate
from builders.estimate import Estimate, free_disk, free_memory
from builders.schemas import TrainConfig
from builders.summary import check_resources, duration
from runtime.launch import ALONE, Launch
from tests.runs import tiny_run, tiny_trainer
from training.checkpoint import latest_checkpoint

GIB = 2**30


def test_the_banner_says_what_will_happen(tmp_path, capsys):
    options = ("data.num_held_out=24", "train.total_steps=2", "train.save_every=1")
    tiny_run(tmp_path / "run", *options, "model.hidden_size=256", "train.keep_last=2")
    banner = capsys.readouterr().out
    assert "data       1000 training entries, 24 held out, 10 classes\n" in banner
    assert "length     2 steps, 0.016 epochs, a checkpoint every 1 steps: about " in banner
    assert "warning" not in banner
    folder = latest_checkpoint(tmp_path / "run").parent
    saved = sum(file.stat().st_size for file in folder.rglob("*.safetensors")) / GIB
    (needs,) = [line for line in banner.splitlines() if line.startswith("needs ")]
    on_disk = float(needs.split(";")[1].split()[0])
    assert on_disk == pytest.approx(1.5 * saved, rel=0.1)  # a third is written before the first goes
    assert free_disk(folder) - shutil.disk_usage(tmp_path).free == pytest.approx(saved * GIB, rel=0.5)


@pytest.mark.parametrize(
    ("takes", "steps", "message"),
    [
        ({"memory": 20 * GIB, "checkpoints": 5 * GIB, "step_sec": 864_000}, 3, None),
        ({"memory": 31 * GIB}, 1, "about 31 GiB of memory are needed, 20 GiB are free: "),
        ({"checkpoints": 6 * GIB}, 1, "about 6 GiB of disk are needed for checkpoints, 5 GiB are free: "),
        ({"step_sec": 864_000}, 4, "this would take about 40 days here: "),
    ],
)
def test_hopeless_runs_are_refused_unless_the_user_insists(takes, steps, message):
    usual = {"step_sec": 1.0, "memory": GIB, "checkpoints": GIB}
    request = (Estimate(**usual | takes), steps, 20 * GIB, 5 * GIB)
    lines = check_resources(TrainConfig(check_resources=False), *request)
    assert len(lines) == (message is not None)
    if message is None:
        check_resources(TrainConfig(), *request)
        return
    with pytest.raises(ValueError) as error:
        check_resources(TrainConfig(), *request)
    assert str(error.value).startswith(message) and "(train.check_resources=false" in str(error.value)


@pytest.mark.parametrize("free", ["memory", "disk"])
def test_a_hopeless_run_ends_before_it_writes_or_takes_memory(tmp_path, monkeypatch, capsys, free):
    monkeypatch.setattr(f"builders.trainer.free_{free}", lambda _: 0)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=f"of {free} are needed"):
        if free == "memory":
            patch.setattr("builders.trainer._load_init", None)  # is not reached
        tiny_trainer(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    tiny_run(tmp_path / "run", "train.total_steps=1", "train.check_resources=false")
    assert "warning: about" in capsys.readouterr().out


@pytest.mark.parametrize("group", [".", "slurm/job_7/step_0", "slurm/job_7", "slurm"])
@pytest.mark.parametrize(("limit", "free"), [("max", math.inf), (3 * GIB, 2.5 * GIB)])
def test_the_limit_of_a_container_or_a_job_counts(tmp_path, monkeypatch, group, limit, free):
    for folder, most in ((tmp_path / group, limit), (tmp_path / "slurm/job_8", 0)):  # the last is another's
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in (("max", most), ("current", GIB), ("stat", f"anon 5\ninactive_file {GIB // 2}")):
            (folder / f"memory.{name}").write_text(f"{value}\n")
    (tmp_path / "own").write_text("0::/slurm/job_7/step_0\n")
    monkeypatch.setattr(estimate, "OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(estimate, "CGROUPS", tmp_path)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=8 * GIB))
    assert free_memory(ALONE) == min(free, 8 * GIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # of four processes on two machines
    assert free_memory(Launch(world_size=4)) == min(free, 8 * GIB) // 2


def test_durations_have_one_unit():
    lengths = {0.4: "0 s", 119: "119 s", 120: "2 min", 7199: "120 min", 7200: "2 h", 172_800: "2 days"}
    assert {sec: duration(sec) for sec in lengths} == lengths
