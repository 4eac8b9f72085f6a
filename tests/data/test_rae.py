"""Representation autoencoders, of random weights."""

import pytest
import torch

from data import load_encoder
from data.encode import EncodeConfig, plan_job
from data.listing import list_images
from tests.data.test_autoencoders import CPU, IMAGES
from tests.photos import write_photographs

pytest.importorskip("transformers", reason="`make finetune` installs it")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images of 32 pixels have latents of 64x2x2, with statistics for each number."""
    from diffusers import AutoencoderRAE

    generator = torch.Generator().manual_seed(0)
    means, stds = torch.randn(64, 2, 2, generator=generator), torch.rand(64, 2, 2, generator=generator) + 0.5
    torch.manual_seed(0)
    encoder = {"encoder_hidden_size": 64, "encoder_num_hidden_layers": 1, "encoder_input_size": 28}
    decoder = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    options = encoder | {f"decoder_{key}": value for key, value in decoder.items()}
    path = tmp_path_factory.mktemp("rae")
    AutoencoderRAE(**options, latents_mean=means, latents_std=stds).save_pretrained(path)
    return str(path)


@torch.no_grad()
def test_latents_are_features_that_the_autoencoder_normalised(folder):
    from diffusers import AutoencoderRAE

    net, encoder = AutoencoderRAE.from_pretrained(folder).eval(), load_encoder(folder, CPU)
    sizes = encoder.factor, encoder.latent_channels, encoder.resolution, encoder.kind, encoder.scale
    assert sizes == (16, 64, 32, "samples", 1.0)
    z = net.encode(IMAGES.float() / 255).latent
    torch.testing.assert_close(encoder.encode(IMAGES), z, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(encoder.decode(z), 2 * net.decode(z).sample - 1)


def test_images_of_another_size_are_refused(folder, tmp_path):
    write_photographs(tmp_path / "images", per_class=1)
    request = EncodeConfig(str(tmp_path / "images"), str(tmp_path / "out"), folder, 64)
    with pytest.raises(ValueError, match="resolution=64 must be 32 for "):
        plan_job(request, list_images(request.source), load_encoder(folder, CPU))
