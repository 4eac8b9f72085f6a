"""Two programs that write the same latent folder at once."""

import os
import subprocess
import sys

import pytest

from data import convert, open_latents
from data.writer import lock_of
from runtime.errors import UserError
from runtime.lock import Busy
from tests.data.test_importers import write_tread
from tests.runs import ROOT, composed

DIGITS = "import sys; from data import digits; digits(sys.argv[1], 8, 1, 10)"


def test_a_second_writer_names_the_first_and_exits(tmp_path):
    request = ("format=tread_wds", f"source={write_tread(tmp_path / 'in')}", f"out={tmp_path / 'out'}")
    with lock_of(tmp_path / "out"), pytest.raises(UserError) as raised:
        convert.main(composed(*request, config_name="convert"))
    assert isinstance(raised.value.__cause__, Busy), "the program exits with TRY_AGAIN"
    assert str(raised.value).startswith(f"out={tmp_path}/out is in use by process {os.getpid()} on ")
    assert [file.name for file in tmp_path.iterdir()] == ["in"]


@pytest.mark.slow
def test_the_second_of_two_first_starts_waits(tmp_path):
    command = [sys.executable, "-c", DIGITS, str(tmp_path / "data/digits")]
    both = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    assert open_latents(tmp_path / "data/digits").manifest.count == 1797
    assert [file.name for file in (tmp_path / "data").iterdir()] == ["digits"]
