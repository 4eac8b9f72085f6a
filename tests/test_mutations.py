"""The lists of tests/mutation.py, which takes too long to run here, fit the code."""

import pytest

from tests.mutation import Mutation, read_lists
from tests.programs import ROOT, start

MAX_ENTRIES = 300
RIGHT = {
    "file": "training/ema.py",
    "text": "1 - skipped\n",
    "wrong": "1\n",
    "tests": "tests/training/test_ema.py",
}


def test_every_text_and_every_test_of_the_lists_exists():
    listed = read_lists()
    assert [problem for each in listed if (problem := each.problem())] == []
    programs = {(each.file, (ROOT / each.file).read_text().replace(each.text, each.wrong)) for each in listed}
    assert len(programs) == len(listed), "a mutation is listed twice"
    assert len(listed) <= MAX_ENTRIES, "each pins a line of the source"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"file": "training/em.py"}, "the text is in the file 0 times"),
        ({"text": "self"}, "times, must be once"),
        ({"tests": "tests/training/test_ema.py::test_no"}, "no test tests/training/test_ema.py::test_no"),
        ({"tests": ""}, "names no test"),
    ],
)
def test_an_entry_that_does_not_fit_is_named(changes, said):
    assert Mutation(**RIGHT).problem() == ""
    assert said in Mutation(**{**RIGHT, **changes}).problem()


TRIED = """
from pathlib import Path
from tests import mutation

mutation.ROOT, copy = Path("project"), Path("copy").resolve()
wrongs = ["3 * x", "x + x", "while True: x"]
listed = [mutation.Mutation("double.py", "2 * x", wrong, "test_double.py") for wrong in wrongs]
mutation._survivors(listed, [copy])
"""


def test_red_green_and_broken_mutations_are_told_apart(tmp_path):
    """A project of one function and one test of it."""
    for folder in (tmp_path / "project", tmp_path / "copy"):
        folder.mkdir()
        (folder / "double.py").write_text("def double(x):\n    return 2 * x\n")
        test = "from double import double\n\ndef test_it():\n    assert double(1) == 2\n"
        (folder / "test_double.py").write_text(test)
    said = start(f"-c {TRIED}", folder=tmp_path).stdout.splitlines()
    assert said[0].endswith("  [test_it - assert 3 == 2]"), "what failed, and how"
    assert [line.partition("  [")[0] for line in said] == [
        "red   double.py: 2 * x  ->  3 * x",
        "GREEN double.py: 2 * x  ->  x + x",
        "pytest ended with 2 double.py: 2 * x  ->  while True: x",
    ]
    assert (tmp_path / "copy/double.py").read_bytes() == (tmp_path / "project/double.py").read_bytes()
