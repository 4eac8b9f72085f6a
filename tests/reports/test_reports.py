"""The report page of one run and of several: complete, in one file, rewritten while a run continues."""

import base64
import csv
import json
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import t

from reports.__main__ import ReportsConfig, main, write_reports
from reports.page import constants, levels_of, page, panels_of, pictures_of, status_line
from reports.runs import MAX_NAME, Run, as_csv, as_text, changes, group_runs, read_metrics, table
from tests.runs import composed, metrics
from training.recorder import LEVEL
from training.run_folder import RunFolder

TIMES = {"num_images": 8, "train_time_sec": 60.0}


@pytest.fixture
def run(compared, tmp_path):
    """A copy of a routed run."""
    return Path(shutil.copytree(compared[2], tmp_path / "<b>run"))


@pytest.fixture
def few_panels(monkeypatch):
    """Draw one panel for each axis: a panel takes a tenth of a second."""
    monkeypatch.setattr("reports.page.MAX_PANELS", 1)


def pictures(text, kind):
    return [base64.b64decode(code) for code in re.findall(f'src="data:image/{kind};base64,(.*?)"', text)]


def test_a_page_has_curves_pictures_and_facts_in_one_file(run, capsys):
    write_reports(ReportsConfig([str(run)]))
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    text = (run / "report.html").read_text()
    samples = run / "samples"
    names = ["step_00000006", "over_time"]
    assert pictures(text, "png") == [(samples / f"{name}.png").read_bytes() for name in names]
    assert "finished; step 6 of 6" in text
    last = metrics(run)[-1]
    assert f"val_loss_dense {last['val_loss_dense']:.4g}" in text
    assert "selection_ratio 0.5" in text.split("constant values")[1]
    assert re.search(r"batch_size: 8", text.split("configuration")[1])
    assert "http" not in re.sub(r"http-equiv|base64,[\w+/=]*", "", text)


def test_curves_show_the_logged_values(run):
    same = {"selection_ratio": 0.5, "images_per_sec": 4.0, "tflops_per_sec": 3.0}  # 2 s a step
    lines = [
        {"step": 1, "loss": 3.0, "grad_norm": 1.0, "num_images": 8, "train_time_sec": 60.0, **same},
        {"step": 2, "loss": None, "grad_norm": 2.0, "num_images": 16, "train_time_sec": 7200.0, **same},
        {"step": 2, "val_loss_dense": 2.0, f"val_loss_dense{LEVEL}0.3": 4.0, "evaluation_time_sec": 1.0},
        {"step": 3, "loss": 1.0, "grad_norm": 2.0, "num_images": 24, "train_time_sec": 10800.0, **same},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    read = Run(RunFolder(run))
    assert read.curves["loss"] == [(1, 3.0), (3, 1.0)]
    assert constants([read]) == same
    (arm,) = group_runs([read])
    panels = panels_of([arm], constants([read]))
    assert {title: [key for key, _, _ in lines] for title, lines in panels.items()} == {
        "losses": ["loss", "val_loss_dense"],
        "grad_norm": ["grad_norm"],
    }
    assert arm.curve("loss", "steps") == [(1, 3.0, 3.0, 3.0), (3, 1.0, 1.0, 1.0)]
    assert [point[0] for point in arm.curve("grad_norm", "hours")] == [pytest.approx(1 / 60), 2.0, 3.0]
    assert [point[0] for point in arm.curve("loss", "TFLOPs")] == pytest.approx([6.0, 18.0])
    assert levels_of([arm]) == {"val_loss_dense": [(arm.name, [(0.3, 4.0, 4.0, 4.0)])]}


def test_the_remaining_time_includes_evaluations():
    lines = [{"step": 2, **TIMES}, {"step": 2, "evaluation_time_sec": 20.0}]
    expected = "running; step 2 of 5; 0:01:00 of training, 0:00:20 of evaluation; about 0:02:00 left"
    assert status_line({"status": "running"}, lines, 5, age_sec=9) == f"{expected}; newest values 0:00:09 ago"
    failed = {"status": "failed", "failure": {"reason": "no room"}}
    assert status_line(failed, [], 5, 0) == "failed; no room; no step of 5 logged yet"


def test_an_unfinished_last_line_is_ignored_and_a_damaged_one_refused(run):
    file = run / "metrics.jsonl"
    before, text = read_metrics(file), file.read_text()
    file.write_text(text + '{"step": 7, "lo')
    assert read_metrics(file) == before
    wrong = ("[]", '{"step": "<b>"}', '{"loss": 1.0}')
    errors = {'{"step": 7, "lo': "damaged"} | dict.fromkeys(wrong, "each line must be an object with a step")
    for line, error in errors.items():
        file.write_text(f"{text}{line}\n")
        with pytest.raises(ValueError, match=error):
            write_reports(ReportsConfig([str(run)]))


@pytest.mark.usefixtures("few_panels")
def test_a_damaged_manifest_is_refused(run):
    manifest = (run / "manifest.json").read_bytes()
    damage = {"status": None, "cost": {}, "routes": 3, "starts": [7]}
    for key, value in damage.items():
        (run / "manifest.json").write_bytes(manifest)
        RunFolder(run).update({key: value})
        with pytest.raises(ValueError, match="run: a file of the run is damaged"):
            write_reports(ReportsConfig([str(run)]))


@pytest.mark.usefixtures("few_panels")
def test_spikes_and_skipped_steps_are_listed(run):
    spike = {"step": 3, "loss_spikes": [{"step": 2, "loss": 9.0, "entries": [1]}], "skipped_steps": []}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(spike) + "\n")
    text = page([Run(RunFolder(run))])
    assert "<th>loss_spikes</th><td>2</td>" in text and "<th>skipped_steps</th>" not in text


def test_texts_of_a_run_are_escaped(run):
    RunFolder(run).update({"command": "<script>"})
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "<i>": 1.0}\n')
    text = page([Run(RunFolder(run))])
    assert "<script>" not in text and "&lt;script&gt;" in text
    assert "<i>" not in text and "<figcaption>&lt;i&gt;" in text
    assert "<b>" not in text and "&lt;b&gt;run" in text


def test_only_pictures_of_the_run_are_shown(run, tmp_path):
    samples, secret = run / "samples", tmp_path / "secret.png"
    secret.write_bytes(b"secret")
    (samples / "link.png").symlink_to(secret)
    (samples / ".step_00000009.partial.png").write_bytes(b"half")
    (samples / "folder.png").mkdir()
    (samples / "drawn.png").write_bytes(b"by sample.py")
    assert [file.name for file in pictures_of(run)] == ["step_00000006.png", "drawn.png", "over_time.png"]


def test_another_folder_is_refused_with_the_nearest_run(run):
    with pytest.raises(FileNotFoundError, match=r"is not a run directory .*: did you mean .*<b>run\?"):
        write_reports(ReportsConfig([str(run.with_name("<b>runs"))]))


@pytest.mark.usefixtures("few_panels")
def test_a_page_is_rewritten_until_the_run_has_finished(run):
    RunFolder(run).update({"status": "running"})
    file, refresh = run / "report.html", 'http-equiv="refresh" content="0.1"'
    file.unlink(missing_ok=True)

    def finish_when_written():
        while not file.exists():
            time.sleep(0.05)
        text = file.read_text()
        RunFolder(run).update({"status": "finished"})
        return "running; step 6 of 6" in text and refresh in text

    with ThreadPoolExecutor() as thread:
        seen = thread.submit(finish_when_written)
        write_reports(ReportsConfig([str(run)], refresh_sec=0.1))
    assert seen.result()
    text = file.read_text()
    assert "finished; step 6 of 6" in text and refresh not in text
    with pytest.raises(ValueError, match=r"refresh_sec=0 must be greater than 0"):
        write_reports(ReportsConfig([str(run)], refresh_sec=0))


@pytest.mark.usefixtures("few_panels")
def test_runs_may_be_a_pattern(run, monkeypatch):
    monkeypatch.chdir(run.parent)
    main(composed("runs=[*run]", "out=pages", config_name="reports"))
    assert (run.parent / "pages/report.html").is_file()


def test_runs_that_differ_only_in_the_seed_are_one_arm(compared):
    dense, routed = group_runs([Run(RunFolder(run)) for run in reversed(compared)])[::-1]
    assert (dense.name, routed.name) == ("dit", "tread")
    assert [[run.seed for run in arm.runs] for arm in (dense, routed)] == [[0, 1], [0, 1]]
    curve, values = dense.curve("loss", "steps"), [run.newest["loss"] for run in dense.runs]
    assert curve[-1] == (6, sum(values) / 2, min(values), max(values))


LONG = f"experiment={40 * 'x'}_end"


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        # The runs: tread, tread, dit. A swept key is in the name of each arm, even as a default.
        (
            ["optimizer.lr=0.5 train.total_steps=6", "", "train.total_steps=6"],
            ["tread, lr=0.5", "tread, lr=0.0001", "dit, lr=0.0001"],
        ),
        # A group shows its option; the keys that follow from the option are not in the name.
        (["model/block=modern", "", "model=dit"], ["tread, block=modern", "tread", "dit"]),
        # Two groups have a key of the same name.
        (
            ["optimizer.lr=0.5 own/lr=two", "", ""],
            ["tread, optimizer.lr=0.5, own/lr=two", *(f"{m}, optimizer.lr=0.0001" for m in ("tread", "dit"))],
        ),
        # No key was set: the name of the run is added.
        (["", "", ""], ["tread, tread_0", "tread, tread_1", "dit"]),
        ([LONG, "", "seed=3"], [f"tread, experiment={10 * 'x'}...{24 * 'x'}_end", "tread", "dit"]),
    ],
)
def test_arms_are_named_by_the_keys_that_were_set(compared, overrides, names):
    dense, _, *routed = (Run(RunFolder(run)) for run in compared)
    runs = [*routed, dense]
    for i, (run, texts) in enumerate(zip(runs, overrides, strict=True)):
        run.manifest["overrides"] = texts.split()
        run.config["recipe"] = f"a text that follows from other keys {i}"  # makes each run an arm
        for text in texts.split():
            key, _, value = text.partition("=")
            if "." in key:
                group, last = key.split(".")
                run.config[group][last] = type(run.config[group][last])(value)
    arms = group_runs(runs)
    assert [arm.name for arm in arms] == names
    assert all(len(name) <= MAX_NAME for name in names)


@pytest.mark.usefixtures("few_panels")
def test_each_data_set_has_a_section(compared, tmp_path, capsys):
    runs = [*compared]
    for run, entries in zip(compared[:2], ("other", "third"), strict=True):
        runs.append(Path(shutil.copytree(run, tmp_path / f"{entries}_{run.name}")))
        data = RunFolder(runs[-1]).manifest()["data"]
        RunFolder(runs[-1]).update({"data": data | {"fingerprint": entries}})
    write_reports(ReportsConfig([*map(str, runs)], str(tmp_path)))
    text, printed = (tmp_path / "report.html").read_text(), capsys.readouterr().out
    headings = re.findall("<h2>(.*?)</h2>", text)
    first = RunFolder(compared[0]).manifest()["data"]["fingerprint"][:8]
    sets = [f"synthetic ({first})", "synthetic (other)", "synthetic (third)"]
    assert headings == [*sets, "Runs", *sets], "tables, then pictures"
    assert printed.startswith(f"synthetic ({first})\n| arm ")
    assert text.count('class="legend"') == 1, "one arm needs no legend"
    assert text.count('name="axis"') == 3


@pytest.mark.usefixtures("few_panels")
def test_a_comparison_is_one_page_and_one_csv_line_per_run(compared, capsys):
    write_reports(ReportsConfig([*map(str, compared), str(compared[0].parent / "no_run.txt")]))
    printed = capsys.readouterr().out
    text = (compared[0].parent / "report.html").read_text()
    assert len(pictures(text, "png")) == 2, "the samples of the first seed of each arm"
    assert text.count('<div class="blocks">') == 2 and text.count("50%, transparent 0") == 3
    assert "<td>method</td><td>dit</td><td>tread</td>" in text
    assert "<td>model.routes</td><td>none</td><td>0.5 bypass 2 to -4</td>" in text
    rows = list(csv.DictReader((compared[0].parent / "runs.csv").open()))
    assert [(row["run"], row["seed"], row["step"]) for row in rows] == [
        (f"{model}_{seed}", str(seed), "6") for model in ("dit", "tread") for seed in (0, 1)
    ]
    losses = [float(row["val_loss_dense_ema"]) for row in rows[:2]]
    middle, half = np.mean(losses), t.ppf(0.975, 1) * np.std(losses, ddof=1) / np.sqrt(2)
    assert f"{middle:.4g} ± {half:.1g}" in printed and "left out" not in printed


def arms_of(compared, *groups):
    """The arms of the compared runs, with other losses: one list for each arm."""
    arms = group_runs([Run(RunFolder(run)) for run in compared])
    for arm, losses in zip(arms, groups, strict=True):
        arm.runs = arm.runs[: len(losses)]
        for run, loss in zip(arm.runs, losses, strict=True):
            run.__dict__["newest"] = {"loss": loss}
    return arms


def test_a_difference_is_compared_with_the_noise_of_retraining(compared):
    (row,) = changes(arms_of(compared, [1.0, 1.1], [3.0, 3.1]))
    assert (row["score"], row["arm"], row["seeds"]) == ("loss", "tread", "2, 2")
    half = 4.302653 * np.sqrt(2 * 0.1**2 / 2 / 2)  # Student's t, two degrees of freedom
    assert row["change"] == "+2" and row["95 % interval"] == f"{2 - half:+.2g} to {2 + half:+.2g}"
    assert row["verdict"] == "larger than the noise"
    (row,) = changes(arms_of(compared, [1.0, 1.2], [1.1, 1.4]))
    variance = 0.1**2 * 2 / 2 + 0.15**2 * 2 / 2  # of the difference, times n: the sum of two pooled variances
    n = next(n for n in range(2, 99) if t.ppf(0.975, 2 * n - 2) * np.sqrt(2 * variance / n) < 0.15)
    assert (row["verdict"], row["seeds that would decide"]) == ("within the noise", f"{n} of each")
    for losses, change, verdict in (
        (([1.0], [1.5]), "+0.5", "noise unknown: train more seeds"),
        (([1.0, 1.0], [1.5, 1.5]), "+0.5", "noise unknown"),
        (([1.0, 1.0], [1.0, 1.0]), "0", "equal in all seeds"),
    ):
        (row,) = changes(arms_of(compared, *losses))
        assert (row["change"], row["verdict"]) == (change, verdict)
    assert changes(arms_of(compared, [1.0, 1.1], [3.0, 3.1])[:1]) == []


def test_arms_of_other_numbers_of_steps_say_nothing_of_the_noise(compared):
    short = arms_of(compared, [2.0, 2.001], [2.0])[0]
    for run in short.runs:
        run.lines = [line for line in run.lines if line["step"] < run.step]
    rows = changes([*arms_of(compared, [1.0], [1.5]), short])
    assert [row["verdict"] for row in rows] == ["noise unknown: train more seeds"] * 2
    (row,) = changes([arms_of(compared, [1.0, 1.1], [1.5])[0], short])
    assert row["verdict"] == "larger than the noise", "both have several seeds"


@pytest.mark.usefixtures("few_panels")
def test_unreadable_runs_are_left_out_of_a_comparison(compared, run, tmp_path, capsys):
    (run / "metrics.jsonl").write_text("[]\n")
    (tmp_path / "empty").mkdir()
    shutil.copytree(compared[1], tmp_path / "cost")
    RunFolder(tmp_path / "cost").update({"cost": {}})
    shutil.copytree(compared[1], tmp_path / "unseeded")
    config = (tmp_path / "unseeded/config.yaml").read_text()
    (tmp_path / "unseeded/config.yaml").write_text(config.replace("seed: 1", "seeds: 1"))
    others = [str(tmp_path / name) for name in ("empty", "cost", "unseeded")]
    write_reports(ReportsConfig([str(compared[0]), str(run), *others], str(tmp_path)))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out: ")]
    reasons = ("metrics.jsonl is damaged", "not a run directory", "a file of the run is damaged", "no seed")
    assert all(reason in line for reason, line in zip(reasons, lines, strict=True))
    assert (tmp_path / "report.html").is_file()
    with pytest.raises(ValueError, match="none of the folders can be read as a run"):
        write_reports(ReportsConfig([str(run), str(tmp_path / "empty")], str(tmp_path)))
    with pytest.raises(ValueError, match=r"runs=\['none\*'\]: no folder matches"):
        write_reports(ReportsConfig(["none*"]))


@pytest.mark.usefixtures("few_panels")
def test_a_page_notes_what_makes_runs_hard_to_compare(compared):
    runs = [Run(RunFolder(run)) for run in compared]
    assert "note:" not in page(runs)
    runs[0].manifest |= {"device": "NVIDIA <b>", "source_sha256": "other"}
    runs[0].manifest["data"]["manifest"]["num_held_out"] = 4
    text = page(runs)
    assert "more than one device" in text and "more than one code version" in text and "<b>" not in text
    assert "held-out losses use few images (4)" in text


def test_texts_of_a_run_are_safe_in_a_spreadsheet_and_a_terminal(compared):
    read = Run(RunFolder(compared[0]))
    read.name, read.manifest["commit"] = "\x1b[2Jna|me", "=cmd()"
    (arm,) = group_runs([read])
    assert arm.name == "\x1b[2Jna|me" and "| [2Jna/me | 1 |" in as_text(table([arm]))
    assert ",'=cmd()," in as_csv([arm])
