"""Programs that write a folder of data: two of them at once, and one after another that was killed."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from data import LatentManifest, LatentWriter, digits, open_latents
from data.writer import lock_of
from runtime.lock import TRY_AGAIN
from tests.data.test_importers import write_tread
from tests.runs import ROOT

pytestmark = pytest.mark.slow
KILLED = """
import os, runpy, signal, sys
from data import writer
writer.LatentWriter.append = writer.hash_blocks = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
KILLED_DIGITS = """
import os, signal, sys
from data import digits, writer
writer.LatentWriter.append = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
digits(sys.argv[1], 8, 1, 10)
"""
DIGITS = "import sys; from data import digits; digits(sys.argv[1], 8, 1, 10)"


def start(*arguments):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process):
    said, errors = process.communicate(timeout=120)
    return process.returncode, said, errors


@pytest.fixture(params=["convert", "make_shards"])
def program(request, tmp_path):
    """The module and the arguments of a program that writes `out`."""
    if request.param == "convert":
        return [
            "data.convert",
            "format=tread_wds",
            f"source={write_tread(tmp_path / 'in')}",
            f"out={tmp_path / 'out'}",
        ]
    manifest = LatentManifest(20, (1, 4, 4), "float32", "samples", 0, "identity")
    with LatentWriter(tmp_path / "in", manifest) as writer:
        writer.append(np.zeros((20, 1, 4, 4)), None)
    return ["data.make_shards", f"path={tmp_path}/in", f"out={tmp_path}/out"]


def test_a_second_writer_names_the_first_and_exits(tmp_path, program):
    with lock_of(tmp_path / "out"):
        code, _, errors = finish(start("-m", *program))
    assert code == TRY_AGAIN
    assert errors.startswith(f"error: out={tmp_path}/out is in use by process {os.getpid()} on ")
    assert errors.count("\n") == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in"]


def test_what_a_killed_program_left_is_removed_by_the_next(tmp_path, program):
    assert finish(start("-c", KILLED, *program))[0] == -signal.SIGKILL
    assert (tmp_path / ".out.partial").is_dir()
    code, _, errors = finish(start("-m", *program))
    assert code == 0, errors
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in", "out"]


def test_of_two_first_starts_one_writes_and_the_other_waits(tmp_path):
    both = [start("-c", DIGITS, tmp_path / "data/digits") for _ in range(2)]
    for code, _, errors in map(finish, both):
        assert code == 0, errors
    assert open_latents(tmp_path / "data/digits").manifest.count == 1797
    assert [file.name for file in (tmp_path / "data").iterdir()] == ["digits"]


def test_digits_whose_writing_was_killed_are_written_again(tmp_path):
    assert finish(start("-c", KILLED_DIGITS, tmp_path / "digits"))[0] == -signal.SIGKILL
    assert (tmp_path / ".digits.partial").is_dir()
    digits(str(tmp_path / "digits"), 8, 1, 10)
    assert [file.name for file in tmp_path.iterdir()] == ["digits"]
