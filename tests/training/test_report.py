"""The page of a run: complete, in one file, and followed by a browser while the run goes on."""

import base64
import json
import re
import signal
import socket
import subprocess
import sys
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from runtime.errors import UserError
from tests.runs import ROOT, metrics, tiny_run
from training.report import REFRESH_SEC, main, metrics_of, page, panels_of, pictures_of, standing
from training.run_folder import RunFolder

TIMES = {"num_images": 8, "train_time_sec": 60.0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "run"
    tiny_run(folder, "train.sample_every=3", "sampler.num_steps=1", "train.eval_every=3")
    return folder.rename(folder.with_name("<b>run"))


@pytest.fixture
def run(trained):
    """The run, whose manifest is put back afterwards."""
    manifest, lines = ((trained / name).read_bytes() for name in ("manifest.json", "metrics.jsonl"))
    yield trained
    (trained / "manifest.json").write_bytes(manifest)
    (trained / "metrics.jsonl").write_bytes(lines)


def pictures(text, kind):
    return [base64.b64decode(found) for found in re.findall(f'src="data:image/{kind};base64,(.*?)"', text)]


def test_a_page_has_curves_pictures_and_facts_and_needs_nothing_else(run, capsys):
    main([str(run)])
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    text = (run / "report.html").read_text()
    samples = run / "samples"
    names = ["step_00000006", "over_time"]
    assert pictures(text, "png") == [(samples / f"{name}.png").read_bytes() for name in names]
    assert "finished; step 6 of 6" in text
    last = metrics(run)[-1]
    assert f"val_loss_dense {last['val_loss_dense']:.4g}" in text
    assert "selection_ratio 0.5" in text.split("did not change")[1]
    assert re.search(r"batch_size: 8", text.split("configuration")[1])
    assert "http" not in re.sub(r"http-equiv|base64,[\w+/=]*", "", text)


def test_a_name_is_shown_as_it_is(run):
    assert "<b>" not in page(RunFolder(run))
    assert "&lt;b&gt;run" in page(RunFolder(run))


def test_curves_are_what_was_logged():
    lines = [
        {"step": 1, "loss": 3.0, "grad_norm": 1.0, "selection_ratio": 0.5, **TIMES},
        {"step": 2, "loss": None, "grad_norm": 2.0, "selection_ratio": 0.5, **TIMES},
        {"step": 2, "val_loss_dense": 2.0, "evaluation_time_sec": 1.0},
        {"step": 3, "loss": 1.0, "grad_norm": 2.0, "selection_ratio": 0.5, **TIMES},
    ]
    panels, constant = panels_of(lines)
    assert panels == {
        "losses": {"loss": [(1, 3.0), (3, 1.0)], "val_loss_dense": [(2, 2.0)]},
        "grad_norm": {"grad_norm": [(1, 1.0), (2, 2.0), (3, 2.0)]},
    }
    assert constant == {"selection_ratio": 0.5}


def test_the_time_that_is_left_counts_evaluations():
    lines = [{"step": 2, **TIMES}, {"step": 2, "evaluation_time_sec": 20.0}]
    said = standing({"status": "running"}, lines, 5, age_sec=9).split("; ")
    assert said[:2] == ["running", "step 2 of 5"]
    assert said[2:] == [
        "0:01:00 of training, 0:00:20 of evaluation",
        "about 0:02:00 left",
        "newest values 0:00:09 ago",
    ]
    failed = {"status": "failed", "failure": {"reason": "no room"}}
    assert standing(failed, [], 5, 0) == "failed; no room; no line of 5 steps yet"


def test_a_line_that_is_being_written_is_left_for_later(run):
    before = metrics_of(run / "metrics.jsonl")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    assert metrics_of(run / "metrics.jsonl") == before
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl is damaged"):
        main([str(run)])


@pytest.mark.parametrize("line", ["[]", '{"step": "<b>"}', '{"loss": 1.0}'])
def test_lines_that_no_run_writes_are_refused(run, line):
    (run / "metrics.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match="each line must be an object with a step"):
        main([str(run)])


@pytest.mark.parametrize(
    ("key", "value"), [("status", None), ("cost", {}), ("routes", 3), ("starts", [7]), ("speed_check", [])]
)
def test_a_manifest_that_no_run_writes_is_refused(run, key, value):
    RunFolder(run).update({key: value})
    with pytest.raises(UserError, match="run is not as a run writes it"):
        main([str(run)])


def test_what_happened_is_listed(run):
    spike = {"step": 3, "loss_spikes": [{"step": 2, "loss": 9.0, "entries": [1]}], "skipped_steps": []}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(spike) + "\n")
    text = page(RunFolder(run))
    assert "<th>loss_spikes</th><td>2</td>" in text and "<th>skipped_steps</th>" not in text


def test_texts_of_a_run_are_shown_as_they_are(run):
    RunFolder(run).update({"command": "<script>"})
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "<i>": 1.0}\n')
    text = page(RunFolder(run))
    assert "<script>" not in text and "&lt;script&gt;" in text
    assert "<i>" not in text and "<figcaption>&lt;i&gt;" in text


def test_pictures_are_those_of_the_run_alone(run, tmp_path):
    samples, secret = run / "samples", tmp_path / "secret.png"
    secret.write_bytes(b"secret")
    (samples / "link.png").symlink_to(secret)
    (samples / ".step_00000009.partial.png").write_bytes(b"half")
    (samples / "folder.png").mkdir()
    (samples / "drawn.png").write_bytes(b"by sample.py")
    assert [file.name for file in pictures_of(run)] == ["step_00000006.png", "drawn.png", "over_time.png"]
    for name in ("link.png", ".step_00000009.partial.png", "drawn.png"):
        (samples / name).unlink()
    (samples / "folder.png").rmdir()


def test_what_is_no_run_is_told_with_the_nearest_one(run):
    with pytest.raises(UserError, match=r"is not a run directory .*: did you mean .*<b>run\?"):
        main([str(run.with_name("<b>runs"))])


@pytest.fixture
def server(run):
    command = [sys.executable, "-m", "training.report", str(run), "--serve", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_a_browser_follows_a_run(run, server):
    address = re.search(r"http://127\.0\.0\.1:\d+", server.stdout.readline())[0]
    refresh = f'http-equiv="refresh" content="{REFRESH_SEC}"'

    def seen():
        with urlopen(address) as answer:
            return answer.read().decode()

    def refused(path, host="127.0.0.1"):
        with pytest.raises(HTTPError) as error:
            urlopen(Request(address + path, headers={"Host": host}))
        return error.value.code, error.value.read().decode()

    port = int(address.rpartition(":")[2])
    idle = socket.create_connection(("127.0.0.1", port))  # as browsers hold in reserve
    assert "step 6 of 6" in seen() and refresh not in seen()
    RunFolder(run).update({"status": "running"})
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 7, "loss": 0.125}) + "\n")
    assert "step 7 of 6" in seen() and "loss 0.125" in seen() and refresh in seen()
    assert [refused(path)[0] for path in ("/manifest.json", "/../manifest.json")] == [404, 404]
    assert refused("/", host="elsewhere.example")[0] == 404
    with pytest.raises(UserError, match=f"--serve={port}: .*in use; give another port"):
        main([str(run), "--serve", str(port)])
    moved = run.rename(run.with_name("moved"))
    code, said = refused("/")
    moved.rename(run)
    assert code == 500 and "No such file" in said and refresh in said
    assert "step 7 of 6" in seen()
    idle.close()
    server.send_signal(signal.SIGINT)
    assert server.wait(10) == 0
