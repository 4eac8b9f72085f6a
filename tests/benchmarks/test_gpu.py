"""The stages of `benchmarks.gpu`, rehearsed on a CPU, with their records and tables."""

import json
import re
import shutil
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import check, glyphs, gpu
from benchmarks.collect import PAGES, TABLE, collect, filled, targets
from benchmarks.results import RESULTS, Record, code_of, markdown, read_results, write_results
from runtime.provenance import environment
from tests.programs import start
from tests.runs import ROOT

COLUMNS = {name: stage.columns for name, stage in gpu.STAGES.items()}
HERE = environment(torch.device("cpu")) | {"tiny": True}
COMMIT = {"commit": "0123456789", "uncommitted_changes": False}


def failing():
    raise RuntimeError("out of\nmemory")


@pytest.fixture
def stage(monkeypatch):
    """Make a stage of one's own settings the one that is called score."""

    def make(**settings):
        columns = {"setting": "{}", "ms": "{:.1f}"}
        monkeypatch.setitem(gpu.STAGES, "score", gpu.Stage(lambda device, tiny, out: settings, columns))

    return make


@pytest.fixture
def project(tmp_path):
    """A copy of the pages that have tables."""
    folder = tmp_path / "project"
    folder.mkdir()
    for page in PAGES:
        shutil.copyfile(ROOT / page, folder / page)
    return folder


def rows_in(out):
    (file,) = out.glob("gpu_score_*.csv")
    return [(row["setting"], row.get("ms", ""), row.get("failed", "")) for row in read_results(file)]


def test_a_stage_records_each_setting_and_continues_after_a_failure(tmp_path, stage):
    stage(first=lambda: [{"ms": 1.0}, {"ms": 2.0}], second=failing, third=lambda: [{"ms": 3.0}])
    assert gpu.run_stage("score", tmp_path, True, 60) == 1
    failed = ("second", "", "RuntimeError: out of memory")
    assert rows_in(tmp_path) == [("first", "1", ""), ("first", "2", ""), failed, ("third", "3", "")]
    stage(first=failing, second=lambda: [{"ms": 4.0}], third=failing)
    assert gpu.run_stage("score", tmp_path, True, 60) == 0
    assert [name for name, *_ in rows_in(tmp_path)] == ["first", "first", "third", "second"]


def test_settings_that_were_cut_off_are_measured_after_the_others(tmp_path, stage):
    def cut_off():
        raise KeyboardInterrupt

    stage(first=cut_off, second=lambda: [{"ms": 2.0}])
    with pytest.raises(KeyboardInterrupt):
        gpu.run_stage("score", tmp_path, True, 60)
    assert rows_in(tmp_path) == [("first", "", "started and not ended")]
    stage(first=lambda: [{"ms": 1.0}], second=lambda: [{"ms": 2.0}])
    assert gpu.run_stage("score", tmp_path, True, 60) == 0
    assert [name for name, *_ in rows_in(tmp_path)] == ["second", "first"]


def test_no_setting_starts_that_would_exceed_the_limit(tmp_path, stage, monkeypatch):
    monkeypatch.setattr("time.perf_counter", iter(range(0, 1000, 10)).__next__)
    stage(first=lambda: [{"ms": 1.0}], second=lambda: [{"ms": 2.0}], third=lambda: [{"ms": 3.0}])
    # The stage begins at 0, the settings at 10, 30 and 50, and each takes 10: the last would end at 60.
    assert gpu.run_stage("score", tmp_path, True, 55) == gpu.TIME_IS_UP
    assert [name for name, *_ in rows_in(tmp_path)] == ["first", "second"]
    assert gpu.run_stage("score", tmp_path, True, 55) == 0
    assert [name for name, *_ in rows_in(tmp_path)] == ["first", "second", "third"]


def test_a_record_continues_across_commits_and_not_from_a_rehearsal(tmp_path):
    Record("gpu_score", tmp_path, HERE | COMMIT).add("first", [{"ms": 1.0}])
    changed = HERE | {"commit": None, "uncommitted_changes": True}
    record = Record("gpu_score", tmp_path, changed)
    record.add("second", [{"ms": 1.0}])
    assert record.done() == {"first", "second"}
    changed_code = f"{code_of(HERE)} with uncommitted changes"
    assert [row["commit"] for row in read_results(record.file)] == ["0123456789", changed_code]
    with pytest.raises(ValueError, match=r"is of tiny .*: give another folder"):
        Record("gpu_score", tmp_path, HERE | {"tiny": False})


def test_what_the_project_has_recorded_is_measured_again_if_asked(tmp_path, stage, monkeypatch):
    monkeypatch.setattr(gpu, "RESULTS", tmp_path / "results")
    stage(first=failing, second=lambda: [{"ms": 4.0}])
    record = Record("gpu_score", tmp_path / "results", HERE | {"tiny": False})
    record.add("first", [{"ms": 1.0}])
    assert gpu.run_stage("score", tmp_path, False, 60) == 0
    assert [name for name, *_ in rows_in(tmp_path)] == ["second"]
    assert gpu.run_stage("score", tmp_path, False, 60, again=True) == 1
    assert [name for name, *_ in rows_in(tmp_path)] == ["second", "first"]


def test_a_broken_device_ends_the_stage_after_its_row(tmp_path, stage, monkeypatch):
    monkeypatch.setattr(gpu, "clear", lambda device: False)
    stage(first=failing, second=lambda: [{"ms": 2.0}])
    assert gpu.run_stage("score", tmp_path, True, 60) == gpu.DEVICE_FAILED
    assert [name for name, *_ in rows_in(tmp_path)] == ["first"]
    assert gpu.run_stage("score", tmp_path, True, 60) == gpu.DEVICE_FAILED
    assert [name for name, *_ in rows_in(tmp_path)] == ["first", "second"], "the others come first"


REPORT = """<testsuites><testsuite>
<testcase name="a"><properties><property name="check" value='{"what": "a: loss", "failed": ""}'/></properties>
<failure message="CUDA error:
  unknown"/></testcase>
<testcase name="b"/><testcase name="c"><skipped/></testcase></testsuite></testsuites>"""


def test_checks_of_tests_are_rows():
    rows = check.rows_of(ElementTree.ElementTree(ElementTree.fromstring(REPORT)))
    assert rows == [{"what": "a: loss", "failed": ""}, {"what": "a", "failed": "CUDA error: unknown"}]
    others = re.sub(r'<testcase name="a">.*?</testcase>', "", REPORT, flags=re.S)
    assert check.rows_of(ElementTree.ElementTree(ElementTree.fromstring(others))) == [
        {"what": "1 passed, 1 skipped", "failed": ""}
    ]
    skipped = ElementTree.fromstring(others.replace('<testcase name="b"/>', ""))
    assert check.rows_of(ElementTree.ElementTree(skipped))[0]["failed"] == "no test has passed"


def test_a_stage_that_does_not_end_is_cut_off(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "GRACE_SEC", 0)
    assert "cut off" in gpu.run_apart("score", tmp_path, 0.5, "--tiny")


def test_a_table_shows_what_there_is():
    rows = [{"setting": "a", "ms": "1.25", "n": ""}, {"setting": "b", "ms": 2}]
    columns = {"setting": "{}", "ms": "{:.1f}x", "n": "{}"}
    assert markdown(rows, columns) == "| setting | ms |\n|---|--:|\n| a | 1.2x |\n| b | 2.0x |"
    assert markdown([{}], columns, everything=True) == "| setting | ms | n |\n|---|--:|--:|\n|  |  |  |"


@pytest.mark.parametrize("page", PAGES)
def test_tables_on_pages_are_what_the_records_give(page):
    text = (ROOT / page).read_text()
    assert TABLE.search(text)
    assert filled(text, RESULTS, COLUMNS) == text


def test_targets_are_beside_what_was_measured(tmp_path):
    h200 = HERE | {"device": "NVIDIA H200", "tiny": False}
    dense = {"utilisation": 0.5, "share_outside": 0.04, "peak_memory_gib": 100.0}
    rows = [
        {"setting": "XL/2", "step": "dense", **dense},
        {"setting": "XL/2", "step": "routed", "utilisation": 0.45, "share_of_predicted": 0.96},
        {"setting": "XL/2, checkpointing", "step": "dense", "peak_memory_gib": 49.7},
    ]
    write_results("gpu_step", rows, h200, tmp_path)
    drawn = [
        {"evaluation": "default", "share_of_peak": 0.5, "speedup_over_eager": 4.5},
        {"evaluation": "default, guided", "share_of_peak": 0.6, "cost_over_unguided": 2.0},
    ]
    write_results("gpu_sample", drawn, h200, tmp_path)
    measured = [line.split(" | ")[-1].removesuffix(" |") for line in targets(tmp_path).splitlines()[2:]]
    assert measured == ["-, 96%", "50%, 45%", "4.0%, -", "100 GiB, 50 GiB", "", "50%", "4.50x", "2.00x"]


@pytest.mark.parametrize(("tiny", "message"), [(False, "is of a rehearsal"), (True, "is not of a rehearsal")])
def test_a_rehearsal_is_not_taken_for_a_measurement(tmp_path, project, tiny, message):
    write_results("gpu_score", [{"setting": "a"}], HERE | {"tiny": not tiny}, tmp_path)
    with pytest.raises(ValueError, match=message):
        collect(tmp_path, COLUMNS, (), project, tiny)
    assert not (project / "benchmarks").exists()
    with pytest.raises(ValueError, match="has no record"):
        collect(project, COLUMNS, (), project, tiny)


def test_records_are_merged_setting_by_setting(tmp_path, project, monkeypatch):
    """A row without a commit gets the one of the same code; a failure replaces no result."""
    monkeypatch.setattr("benchmarks.collect.environment", lambda device: HERE | COMMIT)
    results = project / "benchmarks" / "results"
    for folder, commit, failing in ((results, "fedcba9876", "b"), (tmp_path, code_of(HERE), "a")):
        record = Record("gpu_score", folder, HERE | COMMIT)
        record.commit = commit
        for setting in ("a", "b", "c"):
            record.add(setting, [{"failed": "it" if setting == failing else ""}])
    record.add("c", [{"failed": "started and not ended"}])
    record.add("d", [{"failed": "it"}])
    collect(tmp_path, COLUMNS, (), project, tiny=True)
    rows = [
        (row["setting"], row["commit"], row["failed"]) for row in read_results(results / record.file.name)
    ]
    old, new = "fedcba9876", "0123456789"
    assert rows == [("a", old, ""), ("c", old, ""), ("b", new, ""), ("d", new, "it")]
    assert "at commit fedcba9, 0123456 (a rehearsal)" in (project / "RESULTS.md").read_text()
    collect(tmp_path, COLUMNS, ("score",), project, tiny=True)
    assert {row["commit"] for row in read_results(results / record.file.name)} == {new}, "as a whole"


def test_twins_are_compared_after_the_same_seconds(tmp_path):
    lines = [
        {"step": 0, "images_per_sec": 0.001},  # it compiled
        {"step": 1, "images_per_sec": 0.4},
        {"step": 1, "images_per_sec": 0.5},
        {"step": 1, "num_images": 4, "fd_classifier": 8.0, "label_accuracy": 0.2, "val_loss_dense_ema": 0.5},
        {"step": 2, "images_per_sec": 0.3},
        {"step": 2, "images_per_sec": 0.9},
        {"step": 2, "num_images": 8, "fd_classifier": 4.0, "label_accuracy": 0.4, "val_loss_dense_ema": 0.3},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    scores = glyphs.scores_of(tmp_path)
    found = [(score["step"], score["num_images"], score["train_sec"]) for score in scores]
    assert found == [(1, 4, 10.0), (2, 8, 20.0)]
    found = [glyphs.at_second(scores, "fd_classifier", sec) for sec in (9, 10, 15, 20, 21)]
    assert found == [None, 8.0, 6.0, 4.0, None]


@pytest.mark.slow
def test_all_stages_are_rehearsed_and_collected(tmp_path, project):
    out = tmp_path / "out"
    for name in gpu.STAGES:
        result = start("-m benchmarks.gpu", out, name, "--tiny", *["--here"] * (name != "score"), check=False)
        assert result.returncode == 0, result.stdout + result.stderr
    assert "InceptionDetector" in (out / "score.log").read_text()
    start("-m benchmarks.gpu", "--collect", out, "--tiny", "--into", project)
    for page in PAGES:
        text = (project / page).read_text()
        assert "Not measured: `make gpu" not in text
        assert text != (ROOT / page).read_text()
    assert len(list((project / "benchmarks" / "results").glob("gpu_*.csv"))) == len(gpu.STAGES)
