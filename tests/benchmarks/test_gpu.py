"""The stages of `benchmarks.gpu`, rehearsed on a CPU, with their records and tables."""

import re
import shutil
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import check, gpu
from benchmarks.collect import PAGE, TABLE, collect, fill_tables
from benchmarks.results import RESULTS, Record, code_of, read_environment, read_results, write_record
from runtime.provenance import environment
from study import twins
from tests.programs import start
from tests.runs import ROOT

COLUMNS = {name: stage.columns for name, stage in gpu.STAGES.items()}
HERE = environment(torch.device("cpu")) | {"tiny": True}
COMMIT = {"commit": "0123456789", "uncommitted_changes": False}


def failing():
    raise RuntimeError("out of\nmemory")


@pytest.fixture
def stage(monkeypatch):
    """Replace the stage `sample` by one with the given settings."""

    def make(**settings):
        monkeypatch.setattr(gpu, "environment", lambda device: HERE)  # takes half a second
        columns = {"setting": "{}", "ms": "{:.1f}"}
        monkeypatch.setitem(gpu.STAGES, "sample", gpu.Stage(lambda device, tiny: settings, columns))

    return make


@pytest.fixture
def project(tmp_path):
    """A copy of the page that has tables."""
    folder = tmp_path / "project"
    (folder / "benchmarks").mkdir(parents=True)
    shutil.copyfile(ROOT / PAGE, folder / PAGE)
    return folder


def rows_in(out):
    (file,) = out.glob("gpu_sample_*.csv")
    return [(row["setting"], row.get("ms", ""), row.get("failed", "")) for row in read_results(file)]


def test_a_stage_records_each_setting_and_repeats_failed_and_interrupted_ones(tmp_path, stage):
    def cut_off():
        raise KeyboardInterrupt

    stage(first=lambda: [{"ms": 1.0}, {"ms": 2.0}], second=failing, third=cut_off, fourth=lambda: [])
    with pytest.raises(KeyboardInterrupt):
        gpu.run_stage("sample", tmp_path, True, 60)
    done, failed = [("first", "1", ""), ("first", "2", "")], ("second", "", "RuntimeError: out of memory")
    assert rows_in(tmp_path) == [*done, failed, ("third", "", "started and not ended")]
    stage(first=failing, second=lambda: [{"ms": 4.0}], third=failing, fourth=lambda: [{"ms": 5.0}])
    assert gpu.run_stage("sample", tmp_path, True, 60) == 1
    assert [name for name, *_ in rows_in(tmp_path)] == ["first", "first", "fourth", "second", "third"]
    stage(first=failing, second=failing, third=lambda: [{"ms": 6.0}], fourth=failing)
    assert gpu.run_stage("sample", tmp_path, True, 60) == 0


def test_no_setting_starts_that_would_exceed_the_limit(tmp_path, stage, monkeypatch):
    monkeypatch.setattr("time.perf_counter", iter(range(0, 1000, 10)).__next__)
    stage(**{name: lambda: [{"ms": 1.0}] for name in ("first", "second", "third")})
    # The stage begins at 0, the settings at 10, 30 and 50, and each takes 10: the last would end at 60.
    assert gpu.run_stage("sample", tmp_path, True, 55) == gpu.TIME_IS_UP
    assert [name for name, *_ in rows_in(tmp_path)] == ["first", "second"]
    assert gpu.run_stage("sample", tmp_path, True, 55) == 0


def test_a_record_continues_across_commits_and_not_from_a_rehearsal(tmp_path):
    Record("gpu_sample", tmp_path, HERE | COMMIT).add("first", [{"ms": 1.0}])
    record = Record("gpu_sample", tmp_path, HERE | {"commit": None, "uncommitted_changes": True})
    record.add("second", [{"ms": 1.0}])
    assert record.done() == {"first", "second"}
    changed_code = f"{code_of(HERE)} with uncommitted changes"
    assert [row["commit"] for row in read_results(record.file)] == ["0123456789", changed_code]
    with pytest.raises(ValueError, match=r"has tiny=True, not False: use another folder"):
        Record("gpu_sample", tmp_path, HERE | {"tiny": False})


def test_rows_of_an_older_record_keep_the_commit_that_it_names_once(tmp_path):
    file = Record("gpu_sample", tmp_path, HERE | COMMIT).file
    write_record(file, [{"setting": "old", "ms": 1.0}], HERE | {"commit": "abc"})
    Record("gpu_sample", tmp_path, HERE | COMMIT).add("new", [{"ms": 2.0}])
    assert [row["commit"] for row in read_results(file)] == ["abc", "0123456789"]


def test_settings_that_the_project_has_recorded_are_repeated_with_again(tmp_path, stage, monkeypatch):
    monkeypatch.setattr(gpu, "RESULTS", tmp_path / "results")
    stage(first=failing, second=lambda: [{"ms": 4.0}])
    record = Record("gpu_sample", tmp_path / "results", HERE | {"tiny": False})
    record.add("first", [{"ms": 1.0}])
    assert gpu.run_stage("sample", tmp_path, False, 60) == 0
    assert [name for name, *_ in rows_in(tmp_path)] == ["second"]
    assert gpu.run_stage("sample", tmp_path, False, 60, again=True) == 1


def test_a_broken_device_ends_the_stage_after_its_row(tmp_path, stage, monkeypatch):
    monkeypatch.setattr(gpu, "clear", lambda device: False)
    stage(first=failing, second=lambda: [{"ms": 2.0}])
    for recorded in (["first"], ["first", "second"]):  # new settings come first
        assert gpu.run_stage("sample", tmp_path, True, 60) == gpu.DEVICE_FAILED
        assert [name for name, *_ in rows_in(tmp_path)] == recorded


REPORT = """<testsuites><testsuite>
<testcase name="a"><properties><property name="check" value='{"what": "a: loss", "failed": ""}'/></properties>
<failure message="CUDA error:
  unknown"/></testcase>
<testcase name="b"/><testcase name="c"><skipped/></testcase></testsuite></testsuites>"""


def test_checks_of_tests_are_rows():
    def rows_of(text):
        return check.rows_of(ElementTree.ElementTree(ElementTree.fromstring(text)))

    failed = {"what": "a", "failed": "CUDA error: unknown"}
    assert rows_of(REPORT) == [{"what": "a: loss", "failed": ""}, failed]
    others = re.sub(r'<testcase name="a">.*?</testcase>', "", REPORT, flags=re.S)
    assert rows_of(others) == [{"what": "1 passed, 1 skipped", "failed": ""}]
    assert rows_of(others.replace('<testcase name="b"/>', ""))[0]["failed"] == "no test passed"


def test_a_stage_that_does_not_end_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "GRACE_SEC", 0)
    assert "time is up" in gpu.launch_stage("sample", tmp_path, True, 0.5)


def test_twins_come_last_and_have_their_own_limit():
    request = gpu.parse(["out"])
    assert request.stages == ["check", "step", "sample", "families", "twins"]
    assert request.limits == dict.fromkeys(request.stages[:-1], 420) | {"twins": 1800}
    assert set(gpu.parse(["out", "--limit=0"]).limits.values()) == {0}


def test_the_option_here_is_refused_for_a_stage_that_is_a_program_of_its_own(capsys):
    with pytest.raises(SystemExit):
        gpu.parse(["out", "twins", "--here"])
    assert "stage twins: must be one of check, step, sample, families\n" in capsys.readouterr().err


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Put a package `study` before the project's, whose `twins` prints its arguments and exits as given."""

    def make(status):
        (tmp_path / "study").mkdir()
        (tmp_path / "study/__init__.py").touch()
        text = f"import os, sys\nprint(sys.argv[1:], os.environ['TORCHINDUCTOR_CACHE_DIR'])\nexit({status})"
        (tmp_path / "study/twins.py").write_text(text)
        monkeypatch.setattr(gpu, "PROJECT", tmp_path)  # where the stages run
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "shared")

    return make


@pytest.mark.parametrize("status", [0, 1, 3])
def test_twins_are_a_program_with_its_own_command_line(tmp_path, program, status):
    program(status)
    assert gpu.launch_stage("twins", tmp_path, False, 1800, again=True) == gpu.ENDS[status]
    assert gpu.launch_stage("twins", tmp_path, True, 90.5) == gpu.ENDS[status]
    expected = ([], ["--tiny"])
    lines = [f"{[str(tmp_path), 'glyphs-s2', '--jobs=4', *options]} shared\n" for options in expected]
    assert (tmp_path / "twins.log").read_text() == "".join(lines)


def test_the_study_takes_the_command_line_of_its_stage():
    request = twins.parse(["out", *gpu.PROGRAMS["twins"][1:], "--tiny"])
    assert (request.studies, request.jobs, request.tiny) == (["glyphs-s2"], 4, True)


def test_tables_on_the_page_match_the_records():
    text = (ROOT / PAGE).read_text()
    assert TABLE.search(text)
    assert fill_tables(text, RESULTS, COLUMNS) == text


@pytest.mark.parametrize(("tiny", "message"), [(False, "is a rehearsal"), (True, "is not a rehearsal")])
def test_a_rehearsal_is_not_taken_for_a_measurement(tmp_path, project, tiny, message):
    Record("gpu_sample", tmp_path, HERE | {"tiny": not tiny}).add("a", [{}])
    with pytest.raises(ValueError, match=message):
        collect(tmp_path, COLUMNS, project, tiny)
    assert not (project / "benchmarks" / "results").exists()
    with pytest.raises(ValueError, match="has no record"):
        collect(project, COLUMNS, project, tiny)


@pytest.mark.parametrize(("name", "room"), [("gpu_sample", "benchmarks"), ("twins_glyphs-s2", "study")])
def test_records_are_merged_setting_by_setting(tmp_path, project, monkeypatch, name, room):
    """A row without a commit gets the commit of the same code. A failure does not replace a result."""
    monkeypatch.setattr("benchmarks.collect.environment", lambda device: HERE | COMMIT)
    results = project / room / "results"
    for folder, commit, failing in ((results, "fedcba9876", "b"), (tmp_path, code_of(HERE), "a")):
        record = Record(name, folder, HERE | COMMIT)
        record.commit = commit
        for setting in ("a", "b", "c"):
            record.add(setting, [{"failed": "it" if setting == failing else ""}])
    record.add("c", [{"failed": "started and not ended"}])
    record.add("d", [{"failed": "it"}])
    collect(tmp_path, COLUMNS, project, tiny=True)
    file, old, new = results / record.file.name, "fedcba9876", "0123456789"
    rows = [(row["setting"], row["commit"], row["failed"]) for row in read_results(file)]
    assert rows == [("a", old, ""), ("c", old, ""), ("b", new, ""), ("d", new, "it")]
    assert read_environment(file)["tiny"] == "True"
    if room == "benchmarks":
        assert "at commit fedcba9, 0123456 (a rehearsal)" in (project / "benchmarks/RESULTS.md").read_text()


@pytest.mark.slow
def test_all_stages_are_rehearsed_and_collected(tmp_path, project):
    out = tmp_path / "out"
    for name in gpu.STAGES:
        here = [] if name == "sample" else ["--here"]
        result = start("-m benchmarks.gpu", out, name, "--tiny", *here, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
    assert "default, guided" in (out / "sample.log").read_text()
    start("-m benchmarks.gpu", "--collect", out, "--tiny", "--into", project)
    text = (project / PAGE).read_text()
    assert "Not measured: `make gpu" not in text
    assert text != (ROOT / PAGE).read_text()
    assert len(list((project / "benchmarks" / "results").glob("gpu_*.csv"))) == len(gpu.STAGES)
