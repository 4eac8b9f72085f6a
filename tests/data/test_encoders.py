import json
import os
import shutil

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from data import KLEncoder, LatentManifest, encoder_for, image_decoder, load_encoder
from data import encoders as module
from data.encoders import to_uint8
from tests.outside import with_json
from tests.photos import photographs, write_autoencoder

CPU = torch.device("cpu")
WEIGHTS = "diffusion_pytorch_model.safetensors"
IMAGES = torch.from_numpy(
    np.stack([photo[:32, start : start + 32] for photo in photographs().values() for start in (0, 99, 300)])
).permute(0, 3, 1, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_autoencoder(tmp_path_factory.mktemp("encoders") / "vae")


def load_with_diffusers(folder):
    from diffusers import AutoencoderKL

    return AutoencoderKL.from_pretrained(folder).eval()


def manifest_of(encoder, shape=(8, 16, 16), **changes):
    fields = {key: getattr(encoder, key) for key in ("scale", "shift", "std")}
    fields |= {"encoder_hash": encoder.weights_hash, **changes}
    return LatentManifest(6, tuple(shape), "float16", encoder.kind, 0, encoder.name, **fields)


def test_moments_match_diffusers(folder):
    encoder = KLEncoder(folder, CPU)
    with torch.no_grad():
        posterior = load_with_diffusers(folder).encode(IMAGES.float() / 127.5 - 1).latent_dist
    torch.testing.assert_close(encoder.encode(IMAGES), torch.cat([posterior.mean, posterior.logvar], dim=1))
    assert (encoder.kind, encoder.factor) == ("moments", 2)
    assert (encoder.scale, encoder.shift, encoder.std) == (1.1, 0.0, 1.0)
    assert next(encoder.net.parameters()).dtype == torch.float32
    assert not encoder.net.training


MEANS, STDS = [0.5, -0.2, 0.0, 0.1], [2.0, 4.0, 1.0, 0.5]


def test_scale_and_shift_of_channels_come_from_the_configuration(tmp_path):
    """As in diffusers' pipelines: (z - latents_mean) * scaling_factor / latents_std."""
    changes = {"scaling_factor": 0.18215, "shift_factor": 0.25}
    encoder = KLEncoder(write_autoencoder(tmp_path / "one", **changes), CPU)
    assert (encoder.scale, encoder.shift, encoder.std) == (0.18215, 0.25, 1.0)
    changes = {"scaling_factor": 0.5, "latents_mean": MEANS, "latents_std": STDS}
    encoder = KLEncoder(write_autoencoder(tmp_path / "vae", **changes), CPU)
    assert (encoder.scale, encoder.shift, encoder.std) == ((0.25, 0.125, 0.5, 1.0), tuple(MEANS), 0.5)
    manifest, stored = manifest_of(encoder, std=encoder.std), encoder.encode(IMAGES)
    column = (torch.tensor(values)[:, None, None] for values in (MEANS, STDS))
    seen = (stored[:, :4] - next(column)) * 0.5 / next(column)
    torch.testing.assert_close(manifest.to_means(stored), seen)
    torch.testing.assert_close(manifest.to_encoder(seen), stored[:, :4])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latents_mean": MEANS}, "in both latents_mean and latents_std"),
        ({"latents_mean": MEANS, "latents_std": STDS, "shift_factor": 0.1}, "and shift_factor=0.1"),
        ({"shift_factor": 0.1, "scaling_factor": None}, "has a shift but no scaling_factor"),
        ({"latents_mean": MEANS, "latents_std": STDS, "scaling_factor": None}, "has a shift but no"),
        ({"latents_mean": MEANS, "latents_std": [0.0] * 4}, "must have lists of numbers"),
        ({"latents_mean": 0.5, "latents_std": 1.0}, "must have lists of numbers"),
    ],
)
def test_an_incomplete_scale_is_refused(folder, tmp_path, changes, message):
    shutil.copytree(folder, tmp_path / "vae")
    config = json.loads((tmp_path / "vae" / "config.json").read_text()) | changes
    kept = {key: value for key, value in config.items() if changes.get(key, 0) is not None}  # None: absent
    (tmp_path / "vae" / "config.json").write_text(json.dumps(kept))
    with pytest.raises(ValueError, match=message):
        KLEncoder(str(tmp_path / "vae"), CPU)


@pytest.mark.parametrize("way", ["encode", "decode"])
def test_images_are_processed_in_slices(folder, monkeypatch, way):
    encoder = KLEncoder(folder, CPU)
    batch = IMAGES if way == "encode" else torch.randn(6, 4, 16, 16)
    whole = getattr(encoder, way)(batch)
    seen = []
    forward = getattr(encoder.net, way)
    monkeypatch.setattr(encoder.net, way, lambda part: (seen.append(len(part)), forward(part))[1])
    monkeypatch.setattr(module, "PIXELS_AT_ONCE", 2 * 32 * 32 + 5)
    torch.testing.assert_close(getattr(encoder, way)(batch), whole)
    assert seen == [2, 2, 2]


def test_the_hash_depends_on_the_weights_and_not_on_their_file(folder, tmp_path):
    weights_hash = KLEncoder(folder, CPU).weights_hash
    shutil.copytree(folder, tmp_path / "copy")
    tensors = load_file(file := tmp_path / "copy" / WEIGHTS)
    save_file(dict(reversed(tensors.items())), file, metadata={"format": "pt", "more": "words"})
    assert KLEncoder(str(tmp_path / "copy"), CPU).weights_hash == weights_hash
    tensors["decoder.conv_out.bias"][0] += 1e-6
    save_file(tensors, file, metadata={"format": "pt"})
    assert KLEncoder(str(tmp_path / "copy"), CPU).weights_hash != weights_hash


def configured(folder, **changes):
    return with_json(folder, "config.json", **changes)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda vae: os.truncate(vae / WEIGHTS, 1000), "is not an AutoencoderKL"),
        (lambda vae: (vae / "config.json").write_text("{"), "AutoencoderKL: .*config.json is damaged"),
        (lambda vae: configured(vae, layers_per_block=10**7), "layers_per_block of config.json"),
        (lambda vae: configured(vae, encoder_layers=[1, 99]), "encoder_layers of config.json has 99 blocks"),
        (lambda vae: configured(vae, _class_name="UNet2DModel"), "UNet2DModel must be one of AutoencoderKL,"),
        (lambda vae: drop(vae / WEIGHTS, "decoder.conv_in.weight"), "1 tensors, such as decoder.conv_in"),
    ],
)
def test_a_damaged_autoencoder_is_one_clear_error(folder, tmp_path, spoil, message):
    shutil.copytree(folder, tmp_path / "vae")
    spoil(tmp_path / "vae")
    with pytest.raises(ValueError, match=message):
        load_encoder(str(tmp_path / "vae"), CPU)


def drop(file, name):
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["sd-vae-ft-emma", "vae/with/three", "../nowhere", "/nowhere/vae"])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ValueError, match="not found: must be one of identity, sd-vae-ft-ema, sd-vae-ft-mse"):
        load_encoder(name, CPU)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The cache of the hub, without network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_a_public_autoencoder_is_taken_from_the_cache(folder, hub):
    """The cache has a small autoencoder under the public name."""
    repository = hub / "models--stabilityai--sd-vae-ft-ema"
    shutil.copytree(folder, repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    encoder = load_encoder("sd-vae-ft-ema", CPU)
    assert encoder.name == "stabilityai/sd-vae-ft-ema"
    assert encoder.weights_hash == KLEncoder(folder, CPU).weights_hash


def test_a_missing_autoencoder_says_how_to_download_it(hub):
    message = r"encoder=sdxl is not in .* \(.*\): run `hf download stabilityai/sdxl-vae --local"
    with pytest.raises(ValueError, match=message):
        load_encoder("sdxl", CPU)


def test_an_autoencoder_with_other_weights_is_refused_unless_allowed(folder, tmp_path):
    encoder = KLEncoder(folder, CPU)
    other = write_autoencoder(tmp_path / "other", seed=1)
    manifest = manifest_of(encoder)
    assert encoder_for(manifest, CPU).weights_hash == encoder.weights_hash
    shutil.copytree(folder, tmp_path / "moved")
    assert encoder_for(manifest, CPU, str(tmp_path / "moved")).weights_hash == encoder.weights_hash
    for name in (other, "identity"):
        with pytest.raises(ValueError, match=r"has weights .*: use the same encoder, or set"):
            encoder_for(manifest, CPU, name)
        assert encoder_for(manifest, CPU, name, allow_other=True).weights_hash != encoder.weights_hash
    pixels = LatentManifest(3, (3, 8, 8), "float16", "samples", 0, "identity")
    with pytest.raises(ValueError, match="use the same encoder"):
        encoder_for(pixels, CPU, folder)


def test_latents_without_a_hash_accept_any_autoencoder(folder, tmp_path):
    """Converted latents have no hash of the weights: only the number of channels can be checked."""
    manifest = manifest_of(KLEncoder(folder, CPU), encoder_hash=None)
    assert encoder_for(manifest, CPU).name == folder
    other = write_autoencoder(tmp_path / "other", seed=1)
    assert encoder_for(manifest, CPU, other).name == other
    with pytest.raises(ValueError, match=r"encoder=identity has weights None, .*: use the same encoder"):
        encoder_for(manifest, CPU, "identity")
    wide = write_autoencoder(tmp_path / "wide", latent_channels=8)
    for options in ({}, {"allow_other": True}):
        with pytest.raises(ValueError, match="has latents of 8 channels, the data have 4"):
            encoder_for(manifest, CPU, wide, **options)


def test_pixels_in_another_range_are_decoded(folder):
    """EDM2's latents: pixels in [0, 1], and a scale and a shift for each channel."""
    encoder = KLEncoder(folder, CPU)
    scale, shift = (0.5, 1.0, 2.0, 4.0), (1.0, 0.0, -1.0, 0.5)
    manifest = manifest_of(encoder, scale=scale, shift=shift, pixel_range=(0.0, 1.0))
    raw = torch.randn(2, 4, 16, 16)
    seen = (raw - torch.tensor(shift).view(4, 1, 1)) * torch.tensor(scale).view(4, 1, 1)
    torch.testing.assert_close(manifest.to_means(torch.cat([raw, raw], dim=1)), seen)
    torch.testing.assert_close(manifest.to_encoder(seen), raw)
    with torch.no_grad():
        pixels = load_with_diffusers(folder).decode(raw).sample.permute(0, 2, 3, 1)
    expected = (pixels * 255 + 0.5).clamp(0, 255).to(torch.uint8)
    images = image_decoder(manifest, encoder)(seen)
    assert np.abs(images.astype(int) - expected.numpy().astype(int)).max() <= 1


def test_the_official_decoding_is_coarser_and_half_a_level_darker(folder):
    exact, official = KLEncoder(folder, CPU), KLEncoder(folder, CPU, official=True)
    assert official.weights_hash == exact.weights_hash, "the hash is of the file"
    assert all(torch.equal(p, p.bfloat16().float()) for p in official.net.parameters())
    z = torch.randn(2, 4, 16, 16)
    assert 0 < (official.decode(z) - exact.decode(z)).abs().max() < 0.1
    levels = torch.linspace(-1, 1, 10_001)
    darker = to_uint8(levels).float() - to_uint8(levels, official=True).float()
    assert darker.mean() == pytest.approx(0.5, abs=0.01)
    assert to_uint8(torch.tensor([-1.0, 0.99, 1.0]), official=True).tolist() == [0, 253, 255]


def test_bf16_is_used_only_on_request(folder):
    exact, fast = KLEncoder(folder, CPU), KLEncoder(folder, CPU, bf16=True)
    difference = (exact.encode(IMAGES) - fast.encode(IMAGES)).abs().max()
    assert 0 < difference < 0.1
    assert fast.decode(torch.randn(1, 4, 16, 16)).dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_encodes_and_decodes_like_the_cpu(folder):
    """In fp32, up to the order of summation."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    on_cpu, on_gpu = KLEncoder(folder, CPU), KLEncoder(folder, torch.device("cuda"))
    assert on_gpu.weights_hash == on_cpu.weights_hash
    latents = torch.randn(2, 4, 16, 16)
    torch.testing.assert_close(on_gpu.encode(IMAGES), on_cpu.encode(IMAGES), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(on_gpu.decode(latents), on_cpu.decode(latents), rtol=1e-3, atol=1e-3)
    assert image_decoder(manifest_of(on_gpu), on_gpu)(latents.cuda()).shape == (2, 32, 32, 3)
