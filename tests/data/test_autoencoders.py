"""Autoencoders of other classes, of random weights, against diffusers' own calls."""

import numpy as np
import pytest
import torch

import sample
from data import encode, image_decoder, load_encoder, open_latents
from tests.data.test_encoders import CPU, manifest_of
from tests.photos import BLOCKS, photographs, write_photographs
from tests.runs import composed, tiny_run

IMAGES = torch.from_numpy(np.stack([photo[:32, :32] for photo in photographs().values()])).permute(0, 3, 1, 2)
PIXELS = IMAGES.float() / 127.5 - 1


@pytest.fixture(scope="module")
def flux2(tmp_path_factory):
    """A folder whose batch norm has statistics that differ from channel to channel."""
    from diffusers import AutoencoderKLFlux2

    torch.manual_seed(0)
    net, folder = AutoencoderKLFlux2(latent_channels=2, **BLOCKS), tmp_path_factory.mktemp("flux2")
    net.bn.running_mean.copy_(torch.linspace(-1, 1, 8))
    net.bn.running_var.copy_(torch.linspace(0.5, 4, 8))
    net.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def dc(tmp_path_factory):
    from diffusers import AutoencoderDC

    torch.manual_seed(0)
    options = {"latent_channels": 4, "attention_head_dim": 8, "scaling_factor": 0.5}
    for side in ("encoder", "decoder"):
        options |= {f"{side}_block_out_channels": (8, 16), f"{side}_layers_per_block": (1, 1)}
        options |= {f"{side}_block_types": "ResBlock", f"{side}_qkv_multiscales": ((), ())}
    folder = tmp_path_factory.mktemp("dc")
    AutoencoderDC(**options).save_pretrained(folder)
    return str(folder)


@torch.no_grad()
def test_flux2_latents_are_patches_normalised_by_the_batch_norm(flux2):
    """The network's input equals patches of 2x2 of diffusers' mean, passed through its batch norm."""
    from diffusers import AutoencoderKLFlux2

    net, encoder = AutoencoderKLFlux2.from_pretrained(flux2).eval(), load_encoder(flux2, CPU)
    assert (encoder.factor, encoder.latent_channels, encoder.kind) == (4, 8, "moments")
    posterior = net.encode(PIXELS).latent_dist
    stored = encoder.encode(IMAGES)
    manifest = manifest_of(encoder, stored.shape[1:])
    patches = posterior.mean.view(-1, 2, 8, 2, 8, 2).permute(0, 1, 3, 5, 2, 4).reshape(-1, 8, 8, 8)
    torch.testing.assert_close(manifest.to_means(stored), net.bn(patches), rtol=1e-4, atol=1e-5)
    logvars = posterior.logvar.view(-1, 2, 8, 2, 8, 2).permute(0, 1, 3, 5, 2, 4).reshape(-1, 8, 8, 8)
    torch.testing.assert_close(stored[:, 8:], logvars)
    decoded = image_decoder(manifest, encoder)(manifest.to_means(stored))
    expected = (127.5 * net.decode(posterior.mean).sample + 128).clamp(0, 255).to(torch.uint8)
    difference = np.abs(decoded.astype(int) - expected.permute(0, 2, 3, 1).numpy().astype(int))
    assert difference.max() <= 1


@torch.no_grad()
def test_dc_latents_are_scaled_samples(dc):
    from diffusers import AutoencoderDC

    net, encoder = AutoencoderDC.from_pretrained(dc).eval(), load_encoder(dc, CPU)
    assert (encoder.factor, encoder.latent_channels, encoder.kind) == (2, 4, "samples")
    stored, latents = encoder.encode(IMAGES), net.encode(PIXELS).latent
    torch.testing.assert_close(stored, latents)
    manifest = manifest_of(encoder, stored.shape[1:])
    torch.testing.assert_close(manifest.to_latents(stored), 0.5 * latents)
    torch.testing.assert_close(encoder.decode(manifest.to_encoder(0.5 * latents)), net.decode(latents).sample)


def test_latents_of_any_class_are_encoded_trained_and_sampled(flux2, tmp_path):
    """`normalise=channels` gives every channel of the network's input mean 0 and standard deviation 1."""
    write_photographs(tmp_path / "images", per_class=4)
    folder = tmp_path / "latents"
    keys = (f"source={tmp_path}/images", f"encoder={flux2}", "resolution=32", "num_held_out=0")
    encode.main(composed(*keys, "normalise=channels", f"out={folder}", config_name="encode"))
    dataset = open_latents(folder)
    means, stds, _ = dataset.measure()
    assert means.abs().max() < 1e-2 and (stds - 1).abs().max() < 1e-2
    assert dataset.manifest.in_channels == 8 and len(dataset.manifest.scale) == 8
    keys = ("data=latents", f"data.path={folder}", "model/size=tiny", "model.depth=6", "train.total_steps=2")
    keys += ("train.batch_size=4", "train.sample_every=2", "sampler.num_steps=2", "diffusion=flow_shifted")
    keys += ("model.head_width=48", "model.head_depth=1", "model.head_num_heads=4")
    tiny_run(tmp_path / "run", *keys)
    config = (tmp_path / "run/config.yaml").read_text()
    assert "shift: 1.0\n" in config, "8x8x8 is smaller than 4x32x32"
    keys = (f"run={tmp_path}/run", "num_samples=1", "num_steps=1", f"out={tmp_path}/a.npz")
    sample.main(composed(*keys, "mixed_precision=no", config_name="sample"))
    with np.load(tmp_path / "a.npz") as arrays:
        assert arrays["arr_0"].shape == (1, 32, 32, 3)
