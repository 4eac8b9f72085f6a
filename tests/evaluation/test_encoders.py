"""Encoders of timm as detectors: small networks with random weights stand for the published ones."""

import json
import re
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image
from safetensors.torch import save_file

import fid
from data import open_images
from evaluation import Reference, open_reference
from evaluation.detectors.encoders import ENCODERS, Detectors, Encoder, EncoderDetector, resize
from evaluation.features import ArrayImages
from evaluation.files import PUBLISHED
from evaluation.metrics.density_coverage import DensityCoverage
from evaluation.metrics.frechet import FrechetDistance
from tests.inception import Projections, adm_suite
from tests.programs import ROOT
from tests.runs import composed

SMALL = {
    "vit": Encoder("test_vit.r160_in1k", 48, num_features=64),
    "conv": Encoder("test_convnext.r160_in1k", 64, "plain", "mean", 64),
    "projected": Encoder("test_vit2.r160_in1k", 48, "pil", "projected", 1000),
}
FEW = {"pool": 32, "spatial": 24, "probs": 8}
IMAGES = np.random.default_rng(0).integers(0, 256, (5, 40, 40, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoders")
    torch.manual_seed(0)
    for encoder in SMALL.values():
        save_file(timm.create_model(encoder.model).state_dict(), folder / f"{encoder.model}.safetensors")
    return folder


@pytest.fixture(autouse=True)
def small_encoders(monkeypatch):
    for name, encoder in SMALL.items():
        monkeypatch.setitem(ENCODERS, name, encoder)


@pytest.mark.parametrize("name", SMALL)
def test_features_are_those_of_the_network_after_its_preprocessing(name, folder):
    encoder, detector = SMALL[name], EncoderDetector(name, folder)
    network = timm.create_model(encoder.model).eval()
    network.load_state_dict(detector._network.state_dict(), strict=False)  # the head is not used by all
    mean, std = (torch.tensor(network.pretrained_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
    x = (resize(IMAGES, encoder.size, encoder.resize) - mean) / std
    with torch.inference_mode():
        last = network.forward_features(x)
        expected = {
            "vit": lambda: network.forward_head(last, pre_logits=True),
            "conv": lambda: last.mean(dim=(2, 3)),
            "projected": lambda: network(x),
        }[name]()
    features = detector(IMAGES)
    assert features.keys() == {name} and detector.num_features == {name: expected.shape[1]}
    torch.testing.assert_close(features[name], expected, rtol=1e-4, atol=1e-5)
    assert detector.record["sha256"] and detector.record["resize"] == encoder.resize


def test_images_are_resized_as_the_scores_say():
    image = Image.fromarray(IMAGES[0]).resize((24, 24), Image.Resampling.BICUBIC)
    by_pil = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1) / 255
    assert torch.equal(resize(IMAGES, 24, "pil")[0], by_pil)
    antialiased, plain = (resize(IMAGES, 24, how)[0] for how in ("antialias", "plain"))
    assert (antialiased - by_pil).abs().max() < 0.01  # rounding to bytes, and clipping
    assert (plain - by_pil).abs().max() > 0.1
    # Without antialiasing, bicubic samples of a smooth image are its values.
    ramp = np.arange(40, dtype=np.uint8)[None, None, :, None].repeat(40, 1).repeat(3, 3)
    expected = ((torch.arange(20) + 0.5) * 2 - 0.5) / 255
    inside = slice(1, -1)  # at the border, pixels are repeated
    torch.testing.assert_close(
        resize(ramp, 20, "plain")[0, 0, 10, inside], expected[inside], atol=1e-5, rtol=0
    )


def test_the_published_networks_have_the_features_that_the_table_says():
    for name, encoder in {name: ENCODERS[name] for name in ENCODERS.keys() - SMALL.keys()}.items():
        with torch.device("meta"):
            options = {} if encoder.layer == "projected" else {"num_classes": 0}
            dynamic = {"dynamic_img_size": True, "dynamic_img_pad": True}
            options |= dynamic if encoder.model.startswith("vit") else {}
            network = timm.create_model(encoder.model, **options).eval()
            x = torch.empty(1, 3, encoder.size, encoder.size)
            output = network.forward_features(x).mean((2, 3)) if encoder.layer == "mean" else network(x)
        assert output.shape == (1, encoder.num_features), name


def test_missing_and_damaged_weights_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match=r"evaluation\.encoders=vitt must be one of .*dinov2_224"):
        EncoderDetector("vitt", folder)
    with pytest.raises(FileNotFoundError, match=r"of vit, not found; .*files=\[vit\].` downloads it"):
        EncoderDetector("vit", tmp_path)
    file = tmp_path / "test_vit.r160_in1k.safetensors"
    file.write_bytes((folder / file.name).read_bytes()[:1000])
    with pytest.raises(ValueError, match="does not hold the weights of test_vit"):
        EncoderDetector("vit", tmp_path)
    save_file({"other": torch.zeros(3)}, file)
    with pytest.raises(ValueError, match="does not hold the weights of test_vit"):
        EncoderDetector("vit", tmp_path)
    broken = timm.create_model("test_vit.r160_in1k").state_dict()
    save_file({name: x * float("nan") if x.is_floating_point() else x for name, x in broken.items()}, file)
    with pytest.raises(ValueError, match="the features of vit are not finite"):
        EncoderDetector("vit", tmp_path)(IMAGES)


class Counting(Projections):
    """Counts the images that it has seen."""

    seen = 0

    def __call__(self, images):
        Counting.seen += len(images)
        return super().__call__(images)


def test_one_pass_extracts_the_features_of_all_encoders(folder, tmp_path):
    """Scores equal the ones of a suite with one encoder alone; stored features are not computed again."""
    real = np.random.default_rng(1).integers(0, 256, (20, 40, 40, 3), dtype=np.uint8)
    np.savez(tmp_path / "real.npz", real)
    samples = ArrayImages(np.random.default_rng(2).integers(0, 200, (12, 40, 40, 3), dtype=np.uint8))

    def scores(encoders, cache=None):
        metrics = {name: FrechetDistance(name, name) for name in encoders}
        metrics["dc"] = DensityCoverage("vit") if "vit" in encoders else DensityCoverage("pool")
        keys = {"encoders": encoders, "encoder_weights": str(folder), "metrics": metrics, "features": cache}
        suite = adm_suite(Counting(FEW), open_reference(tmp_path / "real.npz", open_images), **keys)
        kept = cache and suite.cache("samples", {"samples": "x"}, samples)
        return suite.score(samples, None, kept).values

    both = scores(["vit", "conv"], tmp_path / "features")
    for name in ("vit", "conv"):
        alone = scores([name])
        assert both[f"{name}12"] == alone[f"{name}12"] and both["fid12"] == alone["fid12"]
    assert {"density12", "coverage12"} <= both.keys()
    before = Counting.seen
    assert scores(["vit", "conv"], tmp_path / "features") == both
    assert Counting.seen == before
    assert scores([]).keys() == both.keys() - {"vit12", "conv12"}


DINO = "vit_large_patch14_dinov2.lvd142m"
PUBLISHED_ENCODERS = {
    "dinov2_224": (DINO, 224, "pil", "pooled", 1024),
    "dinov2_256": (DINO, 256, "antialias", "pooled", 1024),
    "convnext": ("convnextv2_base.fcmae_ft_in22k_in1k", 224, "antialias", "mean", 1024),
    "mae": ("vit_large_patch16_224.mae", 224, "antialias", "pooled", 1024),
    "siglip": ("vit_so400m_patch16_siglip_256.v2_webli", 224, "antialias", "pooled", 1152),
    "clip_256": ("vit_large_patch14_clip_224.openai", 256, "antialias", "pooled", 1024),
    "clip_336": ("vit_large_patch14_clip_quickgelu_336.openai", 336, "plain", "projected", 768),
}


def test_the_encoders_and_the_scores_of_all_are_the_published_ones():
    own = {name: astuple(encoder) for name, encoder in ENCODERS.items() if name not in SMALL}
    assert own == PUBLISHED_ENCODERS
    with torch.device("meta"):
        clip = timm.create_model(ENCODERS["clip_336"].model)
    assert type(clip.blocks[0].mlp.act).__name__ == "QuickGELU", "as in CLIP"
    weights = f"https://huggingface.co/timm/{clip.pretrained_cfg['hf_hub_id'].partition('/')[2]}"
    assert PUBLISHED["clip_336"].url == f"{weights}/resolve/main/model.safetensors"
    suite = yaml.safe_load((ROOT / "configs/evaluation/all.yaml").read_text())
    assert {*suite["encoders"]} == {*own}
    of = {name: metric.get("features") for name, metric in suite["metrics"].items() if name != "fdr"}
    assert of == {name: "clip_336" if name == "cmmd" else "dinov2_224" for name in of}
    published = {"pool": 1.68, "convnext": 56.87, "dinov2_256": 14.19}
    published |= {"mae": 0.04, "siglip": 0.6, "clip_256": 5.6}
    assert suite["metrics"]["fdr"]["of_validation"] == published
    neighbours = suite["metrics"]["dinov2_precision_recall"]
    assert (neighbours["k"], neighbours["exact"]) == (5, True)


@pytest.mark.slow
def test_all_scores_have_intervals(folder, tmp_path, monkeypatch, weights, capsys):
    """`fid.py suite=all intervals=4`, with a small network for each encoder."""
    for name in PUBLISHED_ENCODERS:
        monkeypatch.setitem(ENCODERS, name, SMALL["vit"])
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name, most in (("samples", 200), ("real", 256)):
        np.savez(f"{name}.npz", rng.integers(0, most, (32, 40, 40, 3), dtype=np.uint8))
    keys = ("suite=all", "samples=samples.npz", "reference=real.npz", "intervals=4", f"weights={weights}")
    keys += ("allow_unpublished_weights=true", f"encoder_weights={folder}")
    fid.main(composed(*keys, config_name="fid"))
    record, printed = json.loads(Path("samples.scores.json").read_text()), capsys.readouterr().out
    names = ("fid", "sfid", "is", "precision", "recall", "kid", "fdd", "fdd_inf", "kdd", "dinov2_precision")
    names += ("density", "coverage", "authenticity", "vendi", "cmmd", "fdr", "fd_convnext", "fd_siglip")
    for name in (f"{name}32" for name in names):
        assert record["standard_errors"][name] >= 0 and np.isfinite(record["values"][name])
        better = "higher" if name in record["higher_is_better"] else "lower"
        error = 1.96 * record["standard_errors"][name]
        assert re.search(rf"^\| {name} .* ± {error:.2g} \| +{better} \|$", printed, re.M), name
    assert {*record["higher_is_better"]} > {"density32", "vendi32", "is32"}
    assert not {"fdd32", "cmmd32", "fdr32"} & {*record["higher_is_better"]}
    assert record["intervals"] == 4 and not record["left_out"]
    assert re.search(r"^\| kid_std32 .*\|  +\|$", printed, re.M), "a spread is no score"


def test_features_that_no_detector_has_and_equal_names_are_refused(folder):
    reference = Reference(images=ArrayImages(IMAGES))
    for metrics, message in (
        ({"a": DensityCoverage("mae")}, r"density needs the features mae: the detector has pool"),
        ({"a": DensityCoverage("pool"), "b": DensityCoverage("vit")}, "the name coverage, density"),
    ):
        with pytest.raises(ValueError, match=message):
            adm_suite(
                Projections(FEW), reference, encoders=["vit"], encoder_weights=str(folder), metrics=metrics
            )


def test_the_record_names_the_weights_of_all_parts(folder):
    whole = Detectors(Projections(), {"vit": EncoderDetector("vit", folder)})
    assert whole.record["tensors_sha256"] == "none" and whole.record["encoders"]["vit"]["size"] == 48
    assert whole.num_features["vit"] == 64 and whole.num_features["pool"] == 2048
