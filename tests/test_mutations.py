"""The lists of tests/mutation.py, which takes too long to run here, fit the code."""

from tests.mutation import GREEN, RED, Mutation, read_lists, run
from tests.programs import ROOT

MAX_ENTRIES = 306


def test_every_text_and_every_test_of_the_lists_exists():
    listed = read_lists()
    assert [problem for entry in listed if (problem := entry.problem())] == []
    programs = {
        (entry.file, (ROOT / entry.file).read_text().replace(entry.text, entry.wrong)) for entry in listed
    }
    assert len(programs) == len(listed), "a mutation is listed twice"
    assert len(listed) <= MAX_ENTRIES, "each pins a line of the source"


def test_an_entry_that_does_not_fit_is_named():
    file, text, tests = "training/ema/average.py", "1 - skipped\n", "tests/training/test_ema.py"
    assert Mutation(file, text, "1\n", tests).problem() == ""
    assert "the text is in the file 0 times" in Mutation("training/em.py", text, "1\n", tests).problem()
    assert "times, must be once" in Mutation(file, "self", "", tests).problem()
    assert f"no test {tests}::test_no" in Mutation(file, text, "1\n", f"{tests}::test_no").problem()
    assert "names no test" in Mutation(file, text, "1\n", "").problem()


def test_red_green_and_broken_mutations_are_told_apart(tmp_path, monkeypatch):
    """A project of one function and one test of it."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take most of the time
    right = "def double(x):\n    return 2 * x\n"
    (tmp_path / "double.py").write_text(right)
    test = "from double import double\n\ndef test_it():\n    assert double(1) == 2\n"
    (tmp_path / "test_double.py").write_text(test)
    wrongs = ("3 * x", "x + x", "while True: x")
    tried = [*run([Mutation("double.py", "2 * x", wrong, "test_double.py") for wrong in wrongs], [tmp_path])]
    assert [outcome for _, outcome, _ in tried] == [RED, GREEN, "pytest ended with 2"]
    assert "FAILED test_double.py::test_it - assert 3 == 2" in tried[0][2]
    assert (tmp_path / "double.py").read_text() == right
