"""Published rows: reading them from headers, and matching records of scores."""

import json
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest

from runtime.tables import aligned
from study import published
from study.published import PAGE, TABLE, Row, fits, main, read_records, read_rows, table
from tests.inception import write_random_weights
from tests.latents import write_latents
from tests.programs import start

EXPERIMENT = "imagenet256_tread_b_2_400k"
SMALL = ("data.input_size=8", "data.in_channels=3", "data.num_classes=7", "model.hidden_size=32")
SMALL += ("model.num_heads=4", "sampler.num_steps=2")
SMALL += tuple(f"train.{key}" for key in ("total_steps=2", "batch_size=2", "save_every=2", "eval_every=null"))
SMALL += ("train.num_workers=0", "train.mixed_precision=no", "train.compile=false")
ROW = Row(EXPERIMENT, SMALL, {"fid5": "3.50"}, None)
GUIDED = Row(EXPERIMENT, (*SMALL, "guidance=cfg", "guidance.guidance_scale=UNKNOWN"), {"fid5": "3.50"}, None)


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """The folder of a tiny run of an experiment and the record of `fid.py` of it."""
    folder = tmp_path_factory.mktemp("published")
    write_latents(folder / "latents", np.zeros((4, 3, 8, 8)), np.arange(4), num_classes=7)
    write_random_weights(folder / "weights.pth")
    images = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3)).astype(np.uint8)
    np.savez(folder / "VIRTUAL_imagenet256_labeled.npz", images)
    paths = (f"data.path={folder}/latents", f"output_dir={folder}/run")
    start("train.py", f"experiment={EXPERIMENT}", *paths, *SMALL, folder=folder)
    keys = ("reference=VIRTUAL_imagenet256_labeled.npz", "weights=weights.pth", "precision_recall=false")
    keys += ("allow_unpublished_weights=true", "num_samples=5", f"run={folder}/run")
    start("fid.py", *keys, folder=folder)
    (record,) = read_records(folder / "run")
    return folder, record


def changed(record, key, value):
    """Return a copy of a record with one value replaced."""
    copy = deepcopy(record)
    node, (*path, last) = copy, key.split(".")
    for name in path:
        node = node[name]
    assert last in node
    node[last] = value
    return copy


@pytest.fixture(scope="module")
def record(scored):
    """The record, as if its features came from the published network."""
    return changed(scored[1], "protocol.detector.checked", "sha256")


@pytest.mark.slow
def test_a_score_is_shown_in_its_row(record):
    assert fits(record, ROW)
    value = record["values"]["fid5"]
    *_, line = table([ROW], [record]).splitlines()
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[2:6] == ["fid5", "3.50", f"{value:.2f}", f"{value - 3.5:+.2f}"]
    assert cells[6].startswith(str(record["environment"]["commit"])[:7])
    unknown = table([replace(ROW, values={"fid5": "UNKNOWN"})], [record]).splitlines()[-1]
    assert f"| fid5 | ? | {value:.2f} | ? |" in unknown


@pytest.mark.slow
def test_a_score_is_shown_if_only_seeds_and_paths_differ(record):
    others = {
        "protocol.detector.checked": "names and shapes",
        "protocol.reference.path": "mine.npz",
        "samples.drawn.checkpoint": "run/checkpoints/step_00000001",
        "samples.drawn.labels": "balanced",
        "samples.drawn.class_label": 3,
        "samples.drawn.decoding": "official",
        "samples.drawn.sampler.num_steps": 3,
        "samples.drawn.guidance.guidance_scale": 1.5,
        "config.model.routes": [],
        "config.optimizer.lr": 1e-3,
        "config.train.batch_size": 4,
        "config.train.init_from": "another",
        "values": {"fid6": 3.5},
    }
    assert [key for key, value in others.items() if fits(changed(record, key, value), ROW)] == []
    free = {"config.seed": 7, "config.output_dir": "x", "config.data.path": "x"}
    assert all(fits(changed(record, key, value), ROW) for key, value in free.items())


@pytest.mark.slow
def test_an_unpublished_value_is_any_except_the_default_of_the_experiment(record):
    assert not fits(record, GUIDED), "it is not guided"
    guided = changed(record, "samples.drawn.guidance.guidance_scale", 1.25)
    assert fits(guided, GUIDED)
    assert "guidance.guidance_scale=1.25" in table([GUIDED], [guided])
    assert not fits(changed(guided, "samples.drawn.guidance.guidance_interval", [0.1, 1]), GUIDED)


@pytest.mark.slow
def test_a_finetune_must_start_from_a_run_of_its_row(scored, record):
    started = changed(record, "config.train.init_from", str(scored[0] / "run"))
    assert fits(started, replace(ROW, starts_from=" ".join((EXPERIMENT, *SMALL))))
    assert not fits(started, replace(ROW, starts_from=" ".join((EXPERIMENT, *SMALL, "train.total_steps=3"))))
    assert not fits(record, replace(ROW, starts_from=" ".join((EXPERIMENT, *SMALL))))


@pytest.mark.slow
def test_random_weights_and_runs_that_are_gone_are_not_shown(scored, capsys):
    folder, unpublished = scored
    assert not fits(unpublished, ROW), "an Inception network with random weights"
    (folder / "gone").mkdir()
    text = json.dumps({key: value for key, value in unpublished.items() if key != "config"})
    (folder / "gone" / "scores.json").write_text(text.replace(f"{folder}/run", f"{folder}/nowhere"))
    assert list(read_records(folder / "gone")) == []
    assert "scores.json is skipped: run=" in capsys.readouterr().err


def test_headers_are_rows():
    rows = {row.experiment: row for row in read_rows()}
    guided = rows["imagenet256_tread_xl_2_740ep"]
    assert guided.keys[1:] == ("guidance.guidance_scale=UNKNOWN", "guidance.guidance_interval=UNKNOWN")
    assert guided.unknown == {"guidance.guidance_scale", "guidance.guidance_interval"}
    assert guided.values["fid50k"] == "1.69" and guided.starts_from == "imagenet256_tread_xl_2_680ep"
    assert rows["imagenet256_dit_l_2_400k"].values == {"fid50k": "23.33"}, "text in brackets is a remark"
    second = rows["imagenet256_sprint_xl_2_stage2"]
    assert second.starts_from == "imagenet256_sprint_xl_2_400k" and second.values == {"fid50k": "9.30"}


def test_a_published_dense_score_has_the_loss_and_sampler_of_its_paper():
    rows = {(row.experiment, "fid50k" in row.values): row for row in read_rows()}
    for size in ("b_2", "xl_2"):
        dit, sit = (rows[f"imagenet256_{model}_{size}_400k", True] for model in ("dit", "sit"))
        assert dit.config["diffusion"]["loss"]["_target_"] == "diffusion.DDPMLoss"
        assert dit.experiment_config["diffusion"]["loss"]["_target_"] == "diffusion.EDMLoss"
        samplers = [row.config["sampler"] for row in (dit, sit)]
        targets = ["diffusion.ddpm_sampler", "diffusion.sde_sampler"]
        assert [(s["_target_"], s["num_steps"]) for s in samplers] == [(target, 250) for target in targets]
        configs = (sit.config, sit.experiment_config)
        assert [row["diffusion"]["loss"]["distribution"] for row in configs] == ["uniform", "logit_normal"]


def lines_of(text):
    """Return the cells of each row of a table, without the measured ones."""
    return [line.split("|")[1:5] for line in text.splitlines() if line.startswith("| `imagenet")]


@pytest.mark.parametrize("row", [row for row in read_rows() if "guidance_scale=" in " ".join(row.keys)])
def test_guided_rows_compose_and_unknown_keys_belong_to_their_guidance(row):
    guidance = row.config["guidance"]
    assert {key.removeprefix("guidance.") for key in row.unknown} <= guidance.keys()
    assert guidance != published.expected(row.experiment).written["guidance"]


def test_results_have_every_row_and_are_written_by_the_program(tmp_path, monkeypatch, capsys):
    page = tmp_path / "RESULTS.md"
    page.write_text(TABLE.sub(r"\1stale\n\2", PAGE.read_text()))
    monkeypatch.setattr(published, "PAGE", page)
    main([str(tmp_path), "--write"])
    assert len(lines_of(page.read_text())) == len(read_rows())
    assert lines_of(page.read_text()) == lines_of(TABLE.search(PAGE.read_text())[0])
    assert page.read_text().startswith("# ") and "stale" not in page.read_text()
    assert capsys.readouterr().out.strip() in aligned(page.read_text())
    with pytest.raises(SystemExit):
        main(["/nowhere"])
    assert "/nowhere is not a folder" in capsys.readouterr().err
