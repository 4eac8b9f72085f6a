"""Features of image patches, with a small vision transformer of random weights."""

import json

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from data import PatchEncoder, encode, open_latents, verify
from data.stream import stream
from tests.photos import photographs, write_photographs
from tests.runs import composed, metrics, tiny_run

CPU, MODEL = torch.device("cpu"), "vit_tiny_patch16_224"


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    torch.manual_seed(0)
    network = timm.create_model(MODEL, num_classes=0)
    file = tmp_path_factory.mktemp("weights") / "model.safetensors"
    save_file(network.state_dict(), file)
    return str(file)


@torch.no_grad()
def test_features_are_the_patch_tokens_of_the_transformer(weights):
    network = timm.create_model(MODEL, num_classes=0, dynamic_img_size=True)
    network.load_state_dict(load_file(weights))
    encoder = PatchEncoder(MODEL, weights, CPU)
    pixels = np.stack([photo[:64, :64] for photo in photographs().values()])
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    x = torch.from_numpy((pixels / 255 - mean) / std).permute(0, 3, 1, 2).float()
    expected = network.eval().forward_features(x)[:, 1:]  # without the class token
    given = encoder(torch.from_numpy(pixels).permute(0, 3, 1, 2))
    torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)
    assert encoder.shape(64) == tuple(given.shape[1:]) == (16, 192)


def test_dinov2_sees_one_patch_of_14_pixels_for_each_16():
    """224 pixels for images of 256: a grid of 16x16."""
    config = timm.get_pretrained_cfg("vit_base_patch14_dinov2.lvd142m")
    assert config is not None
    seen = []
    encoder = PatchEncoder.__new__(PatchEncoder)
    encoder.device, encoder.mean, encoder.std = CPU, torch.zeros(3, 1, 1), torch.ones(3, 1, 1)

    class Network:
        num_prefix_tokens = 1
        patch_embed = type("Embed", (), {"patch_size": (14, 14)})

        def forward_features(self, x):
            seen.append(tuple(x.shape))
            return torch.zeros(1, 257, 8)

    encoder.net = Network()
    assert encoder(torch.zeros(1, 3, 256, 256, dtype=torch.uint8)).shape == (1, 256, 8)
    assert seen == [(1, 3, 224, 224)]


@pytest.fixture(scope="module")
def folder(weights, tmp_path_factory):
    """The latents of six images of 64x64 pixels."""
    folder = tmp_path_factory.mktemp("encoded")
    write_photographs(folder / "images", per_class=3)
    out = folder / "latents"
    keys = (f"source={folder}/images", f"out={out}", "encoder=identity", "resolution=64", "num_held_out=2")
    keys += (f"features={MODEL}", f"features_weights={weights}")
    encode.main(composed(*keys, config_name="encode"))
    return out


def test_features_are_stored_beside_the_latents(folder, weights):
    """Each image and its flip have features; the stream reads the features of its entries."""
    dataset, encoder = open_latents(folder), PatchEncoder(MODEL, weights, CPU)
    assert dataset.manifest.features["shape"] == [16, 192]
    assert "features.npy" in dataset.manifest.checksums
    assert not any(verify.damages(folder, dataset.manifest))
    ids = np.arange(6)
    for flipped in (0, 1):
        pixels = dataset.manifest.to_means(dataset.read(ids, np.full(6, flipped))[0])
        expected = encoder(((pixels + 1) * 127.5).round().to(torch.uint8))
        given = dataset.read_features(ids, np.full(6, flipped)).float()
        torch.testing.assert_close(given, expected, rtol=1e-2, atol=1e-2)  # fp16
    options = {"seed": 0, "batch_size": 2, "micro_batch_size": 2, "rank": 0, "world_size": 1}
    batch = next(iter(stream(dataset, 0, **options, num_workers=0, pin_memory=False, with_features=True)))
    pixels = dataset.manifest.to_means(batch.stored)
    expected = encoder(((pixels + 1) * 127.5).round().to(torch.uint8))
    torch.testing.assert_close(batch.features.float(), expected, rtol=1e-2, atol=1e-2)


KEYS = ("data=latents", "model/size=tiny", "model.depth=6", "model.patch_size=16", "train.total_steps=2")
KEYS += ("train.batch_size=2", "train.sample_every=null", "train.log_every=1")


@pytest.mark.parametrize("alignment", ["irepa", "haste"])
def test_a_training_is_aligned_with_stored_features(folder, alignment, tmp_path):
    tiny_run(tmp_path / "run", *KEYS, f"data.path={folder}", f"alignment={alignment}", "alignment.block=1")
    assert all(-1 <= line["alignment_loss"] <= 1 for line in metrics(tmp_path / "run"))


def test_features_at_each_step_equal_stored_ones(folder, weights, tmp_path):
    """Up to fp16, in which features are stored."""
    losses, costs = [], []
    by_encoder = (f"alignment.encoder={MODEL}", f"alignment.weights={weights}")
    for name, more in (("stored", ()), ("step", by_encoder)):
        keys = (*KEYS, *more, f"data.path={folder}", "alignment=repa", "alignment.block=1")
        tiny_run(tmp_path / name, *keys)
        losses.append([line["alignment_loss"] for line in metrics(tmp_path / name)])
        costs.append(json.loads((tmp_path / name / "manifest.json").read_text())["cost"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
    # 16 patches and a class token, 12 blocks of width 192
    blocks = 12 * (2 * 17 * 192 * 192 * 12 + 4 * 17 * 17 * 192)
    encoder = blocks + 2 * 16 * 192 * 3 * 16 * 16
    assert costs[1]["dense_training_flops"] - costs[0]["dense_training_flops"] == encoder


@pytest.mark.parametrize(
    ("name", "file", "error", "message"),
    [
        ("resnet18", "FILE", ValueError, "feature encoder resnet18 must be one of dinov2_b"),
        ("dinov2_b", None, FileNotFoundError, "the weights of dinov2_b, None, not found"),
        (MODEL, "none.safetensors", FileNotFoundError, "not found"),
        ("vit_small_patch16_224", "FILE", ValueError, "does not hold the weights of vit_small_patch16_224"),
    ],
)
def test_wrong_encoders_are_refused(weights, name, file, error, message):
    with pytest.raises(error, match=message):
        PatchEncoder(name, weights if file == "FILE" else file, CPU)


def test_an_image_of_another_size_is_refused(weights):
    with pytest.raises(ValueError, match="resolution=60 must be a multiple of 16 for features"):
        PatchEncoder(MODEL, weights, CPU).shape(60)
