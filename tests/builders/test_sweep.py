"""A sweep over guidance: the samples it draws, the records it skips, and its table."""

import json
import math

import pytest

from builders.sweep import summarise
from runtime.files import write_json
from tests.programs import start
from tests.runs import TINY, tiny_run


def rows_of(table):
    """Return each line of a table as {column: text}."""
    heading, _, *lines = table.read_text().splitlines()
    assert "num_samples=" in heading
    head, rule, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert set(rule) == {"---"}
    return [dict(zip(head, row, strict=True)) for row in rows]


@pytest.mark.slow
def test_a_sweep_skips_existing_records_and_marks_the_best(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the digits are written
    tiny_run(tmp_path / "r", "data=digits", *TINY[1:], "ema.decay=0")
    request = ("-m", "run=r", "suite=digits", "reference=latents/digits", "num_samples=30", "num_steps=3")
    start("fid.py", *request, "guidance_scale=1,3", folder=tmp_path)
    scores = tmp_path / "r/scores"
    before = {file.name: file.read_bytes() for file in scores.glob("*.json")}
    assert len(before) == 2
    more = ("guidance=cfg", "guidance_scale=1,3,9", "guidance.guidance_interval=null,[0.1,1]")
    again = start("fid.py", *request, *more, folder=tmp_path)
    assert again.stdout.count("already exists") == 2
    assert {name: (scores / name).read_bytes() for name in before} == before
    records = [json.loads(file.read_text()) for file in scores.glob("*.json")]
    settings = [record["samples"]["drawn"]["guidance"] for record in records]
    by_setting = {
        (guidance["guidance_scale"], guidance["guidance_interval"] is None): record
        for guidance, record in zip(settings, records, strict=True)
    }
    assert by_setting[1.0, True]["values"] == by_setting[1.0, False]["values"], "the same samples"
    assert by_setting[9.0, True]["values"] != by_setting[9.0, False]["values"]
    rows = rows_of(scores / "sweep.md")
    assert len(rows) == len(by_setting) == 6
    for key, best in (("fd_pixel", min), ("label_accuracy", max)):
        marked = [float(row[key].strip("*")) for row in rows if row[key].startswith("**")]
        assert marked == [float(f"{best(record['values'][key] for record in records):.4g}")]
    for row in rows:
        record = by_setting[float(row["guidance.guidance_scale"]), row["guidance.guidance_interval"] == ""]
        assert float(row["fd_pixel"].strip("*")) == float(f"{record['values']['fd_pixel']:.4g}")
        assert float(row["GFLOPs per image"]) == float(f"{record['cost_per_image']['flops'] / 1e9:.4g}")
    file = scores / min(before)
    content = json.loads(file.read_text())
    write_json(file, content | {"protocol": content["protocol"] | {"reference": "another"}})
    refused = start("fid.py", *request, "guidance_scale=1,3", folder=tmp_path, check=False)
    assert "already exists: set overwrite=true" in refused.stderr, "scores against another reference"


def record(scale, checkpoint="a", num_samples=5, **values):
    fixed = dict.fromkeys(("labels", "class_label", "mixed_precision", "decoding"))
    guidance = {"_target_": "diffusion.CFG", "guidance_scale": scale}
    drawn = {"guidance": guidance, "sampler": {"_target_": "s"}, "num_samples": num_samples}
    drawn |= {"checkpoint": f"run/checkpoints/{checkpoint}", "first_seed": 0, **fixed}
    content = {"suite": "s", "protocol": {}, "higher_is_better": ["up"], "cost_per_image": {"flops": 2e9}}
    return content | {"samples": {"drawn": drawn}, "values": values}


def test_records_that_cannot_be_compared_are_left_out(tmp_path):
    write_json(tmp_path / "a.json", record(1.0, up=1.0, down=1.0))
    assert summarise(tmp_path / "a.json") is None, "there is nothing to compare"
    write_json(tmp_path / "b.json", record(2.0, up=2.0, down=3.0))
    write_json(tmp_path / "c.json", record(4.0, up=math.nan))
    write_json(tmp_path / "more.json", record(3.0, num_samples=6, up=9.0, down=0.0))
    write_json(tmp_path / "list.json", [])
    write_json(tmp_path / "text.json", {"samples": "x"})
    rows = rows_of(summarise(tmp_path / "b.json"))
    assert [list(row.values()) for row in rows] == [
        ["1.0", "1", "**1**", "2"],
        ["2.0", "**2**", "3", "2"],
        ["4.0", "nan", "nan", "2"],
    ]
    write_json(tmp_path / "other.json", record(1.0, checkpoint="std0.1", up=3.0, down=0.5))
    rows = rows_of(summarise(tmp_path / "b.json"))
    assert [(row["checkpoint"], row["up"]) for row in rows][-1] == ("std0.1", "**3**")
    assert {row["checkpoint"] for row in rows[:-1]} == {"a"}
