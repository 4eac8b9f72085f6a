import re

import numpy as np
import pytest
import torch
from PIL import Image

from data import KLEncoder, report
from tests.latents import write_latents
from tests.photos import write_autoencoder
from tests.runs import composed


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    return write_autoencoder(tmp_path_factory.mktemp("vae") / "vae")


def write(path, vae, scale=1.0, count=600, **changes):
    """Write posterior means of standard deviation 2, with mean 1 in channel 0, and classes 0 0 0 1 1 3."""
    rng = np.random.default_rng(0)
    mean = 2 * rng.standard_normal((count, 2, 4, 16, 16))
    mean[:, :, 0] += 1
    stored = np.concatenate([mean, np.full_like(mean, -20)], axis=2)
    labels = np.array([0, 0, 0, 1, 1, 3])[np.arange(count) % 6]
    weights_hash = KLEncoder(vae, torch.device("cpu")).weights_hash
    fields = {"encoder": vae, "encoder_hash": weights_hash, "scale": scale, "std": 1.0, **changes}
    return write_latents(path, stored, labels, kind="moments", **fields)


def call(path, *overrides):
    report.main(composed(f"path={path}", *overrides, config_name="report"))


def test_numbers_and_picture(tmp_path, vae, monkeypatch, capsys):
    monkeypatch.setattr(report, "SHEET_ROWS", 2)
    dataset = write(tmp_path / "a", vae, scale=0.5, class_names=("cat", "dog", "eel", "fly"))
    call(tmp_path / "a")
    out = capsys.readouterr().out
    assert "classes    4, with 0 to 300 entries, median 150" in out
    assert "300  0 cat" in out and "200  1 dog" in out and "100  3 fly" in out
    assert "warning: 1 of 4 classes have no images to train on" in out
    assert "std 1.02" in out and "(expected: 1)" in out
    assert "warning: the network's input" not in out
    seen = dataset.manifest.to_means(torch.from_numpy(np.array(dataset.stored[:, 0])))
    printed = re.findall(r"channel \d: mean (\S+), std (\S+)", out)
    for channel, (mean, std) in enumerate(printed):
        assert abs(float(mean) - seen[:, channel].mean()) < 1e-3
        assert abs(float(std) - seen[:, channel].std()) < 1e-3
    assert len(printed) == 4
    picture = np.asarray(Image.open(tmp_path / "a_report.png").convert("RGB"))
    assert picture.shape[1] == 8 * 68 and picture.std() > 20


def test_flips_are_drawn_next_to_their_images(tmp_path, vae, monkeypatch):
    dataset, drawn = write(tmp_path / "a", vae, scale=0.5, count=12), []

    def watched(manifest, encoder):
        return lambda latents: (drawn.append(latents), np.zeros((len(latents), 8, 8, 3), np.uint8))[1]

    monkeypatch.setattr(report, "image_decoder", watched)
    monkeypatch.setattr(report, "SHEET_ROWS", 1)
    report.draw_sheet(dataset, tmp_path / "sheet.png", torch.device("cpu"), vae)
    ids = np.linspace(0, 11, 4).astype(int)
    for side in (0, 1):
        expected = dataset.manifest.to_means(torch.from_numpy(np.array(dataset.stored[ids, side])))
        assert torch.equal(drawn[0][side::2], expected)


def test_masks_are_shown(tmp_path, vae, capsys):
    pictures, masks = {}, np.zeros((4, 16, 16), np.uint8)
    masks[1:, :, :8] = 255
    stored = np.random.default_rng(0).standard_normal((4, 4, 16, 16))
    for name, given in (("plain", None), ("masked", masks)):
        write_latents(tmp_path / name, stored, masks=given, encoder=vae)
        call(tmp_path / name)
        pictures[name] = np.asarray(Image.open(tmp_path / f"{name}_report.png").convert("L")).astype(int)
    out = capsys.readouterr().out
    assert "masks      none" in out
    assert "masks      mask, mean weight 0.375, 25.0% are empty" in out
    darker = pictures["masked"] < pictures["plain"] - 20
    assert darker.mean() > 0.05


def test_with_many_classes_only_the_extremes_are_listed(tmp_path):
    dataset = write_latents(tmp_path / "a", np.zeros((300, 1, 4, 4)), np.arange(300) % 100)
    lines = report.count_classes(dataset)
    assert len(lines) == 22
    assert lines[0] == "classes    100, with 3 to 3 entries, median 3"
    names = ("0", "2", *map(str, range(2, 100)))
    dataset = write_latents(tmp_path / "b", np.zeros((300, 1, 4, 4)), np.arange(300) % 100, class_names=names)
    shown = [line.split(maxsplit=1)[1] for line in report.count_classes(dataset)[1:4]]
    assert shown == ["class 0", "1 2", "class 2"]


def test_grey_pixels_without_classes_are_drawn(tmp_path, monkeypatch, capsys):
    write_latents(tmp_path / "a", np.random.default_rng(0).uniform(-1, 1, (3, 1, 8, 8)))
    call(tmp_path / "a", f"out={tmp_path}/new/sheet.png")
    assert (tmp_path / "new" / "sheet.png").stat().st_size > 500
    assert "classes    none" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path / "a")
    call(".")
    assert (tmp_path / "a_report.png").exists()
    with pytest.raises(SystemExit, match=r"data.path=.*nowhere must be a latent folder"):
        call(tmp_path / "nowhere")
