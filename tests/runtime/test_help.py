"""--help explains keys, and its lines fit into a terminal."""

import subprocess
import sys

import pytest

from runtime.help import explain
from runtime.provenance import PROJECT
from tests.programs import start

TEXT = """Train.

Groups (choose as GROUP=OPTION):

model: dit, tread
experiment: first_one, second_one, third_one, fourth

Keys (set as KEY=VALUE):

model:
  depth: 8
  block:
    _target_: models.Block
  _target_: models.DiT
train:
  batch_size: 32
  unheard_of: 1
"""


@pytest.mark.parametrize(
    ("program", "keys"),
    [
        ("train.py", ["  batch_size: 32", "  num_steps: 40", "  depth: 8"]),
        ("sample.py", ["run: null", "batch_size: null"]),
        ("fid.py", ["reference: null", "checkpoint: null"]),
        ("-m data.encode", ["num_held_out: null"]),
    ],
)
def test_a_program_explains_its_keys(program, keys):
    lines = start(program, "--help").stdout.splitlines()
    assert max(map(len, lines)) <= 160
    for key in keys:
        (line,) = [line for line in lines if line.startswith(key)]
        assert len(line.partition("  # ")[2]) > 10


@pytest.mark.slow
def test_help_may_be_cut():
    """`true` ends before the help is printed."""
    command = f"{sys.executable} train.py --help | true"
    assert not subprocess.run(command, shell=True, cwd=PROJECT, capture_output=True, check=True).stderr


def test_long_groups_are_in_columns_and_targets_are_left_out():
    lines = explain(TEXT, 40).splitlines()
    assert "model: dit, tread" in lines
    start = lines.index("experiment:")
    assert lines[start + 1 : start + 3] == ["  first_one   third_one", "  second_one  fourth"]
    keys = lines[lines.index("Keys (set as KEY=VALUE):") + 2 :]
    names = ["model", "  depth", "train", "  batch_size", "  unheard_of"]
    assert [line.partition(":")[0] for line in keys] == names
    assert keys[1].startswith("  depth: 8                    # ") and "#" not in keys[-1]


def test_other_text_is_unchanged():
    assert explain("Hydra's help", 80) == "Hydra's help"
