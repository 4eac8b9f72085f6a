"""Programs that write latent folders: two at once, and one after a killed one."""

import os
import subprocess
import sys

import pytest

from data import LatentWriter, convert, open_latents
from data.writer import lock_of
from runtime.errors import UserError
from runtime.lock import Busy
from tests.data.test_importers import write_tread
from tests.runs import ROOT, composed

DIGITS = "import sys; from data import digits; digits(sys.argv[1], 8, 1, 10)"


@pytest.fixture
def write(tmp_path):
    """Return a function that writes `out`."""
    request = ("format=tread_wds", f"source={write_tread(tmp_path / 'in')}", f"out={tmp_path / 'out'}")
    return lambda: convert.main(composed(*request, config_name="convert"))


def test_a_second_writer_names_the_first_and_exits(tmp_path, write):
    with lock_of(tmp_path / "out"), pytest.raises(UserError) as raised:
        write()
    assert isinstance(raised.value.__cause__, Busy), "the program exits with TRY_AGAIN"
    assert str(raised.value).startswith(f"out={tmp_path}/out is in use by process {os.getpid()} on ")
    assert [file.name for file in tmp_path.iterdir()] == ["in"]


def test_the_next_program_removes_files_of_a_killed_one(tmp_path, write, monkeypatch):
    def kill(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("data.writer.shutil.rmtree", lambda *_, **__: None)  # nothing is cleaned up
        patch.setattr(LatentWriter, "append", kill)
        write()
    assert (tmp_path / ".out.partial").is_dir()
    write()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.slow
def test_the_second_of_two_first_starts_waits(tmp_path):
    command = [sys.executable, "-c", DIGITS, str(tmp_path / "data/digits")]
    both = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert open_latents(tmp_path / "data/digits").manifest.count == 1797
    assert [file.name for file in (tmp_path / "data").iterdir()] == ["digits"]
