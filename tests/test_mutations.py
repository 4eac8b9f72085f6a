"""The lists of wrong programs fit the code: see tests/mutation.py, which takes too long to be run here."""

import pytest

from tests.mutation import Mutation, read_lists
from tests.programs import ROOT, start

RIGHT = {
    "file": "training/ema.py",
    "text": "1 - skipped\n",
    "wrong": "1\n",
    "tests": "tests/training/test_ema.py",
}


def test_every_text_is_there_once_and_every_test_too():
    listed = read_lists()
    assert [problem for each in listed if (problem := each.problem())] == []
    programs = {(each.file, (ROOT / each.file).read_text().replace(each.text, each.wrong)) for each in listed}
    assert len(programs) == len(listed), "one is there twice"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"file": "training/em.py"}, "the text is there 0 times"),
        ({"text": "self"}, "times, must be there once"),
        (
            {"tests": "tests/training/test_ema.py::test_nothing"},
            "no test tests/training/test_ema.py::test_nothing",
        ),
        ({"tests": ""}, "must give either tests or equivalent"),
        ({"equivalent": "no"}, "must give either tests or equivalent"),
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


def test_what_is_noticed_is_told_from_what_is_not(tmp_path):
    """A project of one function and one test of it."""
    for folder in (tmp_path / "project", tmp_path / "copy"):
        folder.mkdir()
        (folder / "double.py").write_text("def double(x):\n    return 2 * x\n")
        (folder / "test_double.py").write_text(
            "from double import double\n\ndef test_it():\n    assert double(1) == 2\n"
        )
    said = start(f"-c {TRIED}", folder=tmp_path).stdout.splitlines()
    assert said[0].endswith("  [test_it - assert 3 == 2]"), "what failed, and how"
    assert [line.partition("  [")[0] for line in said] == [
        "red   double.py: 2 * x  ->  3 * x",
        "GREEN double.py: 2 * x  ->  x + x",
        "pytest ended with 2 double.py: 2 * x  ->  while True: x",
    ]
    assert (tmp_path / "copy/double.py").read_bytes() == (tmp_path / "project/double.py").read_bytes()
