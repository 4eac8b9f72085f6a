"""Encoders between images and latents, and the one rule that rounds pixels to bytes."""

import hashlib
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from data.latents import LatentDataset
from data.manifest import LatentManifest, Numbers
from runtime.files import read_json

IDENTITY = "identity"
# Short names of public autoencoders.
PUBLISHED = {
    "sd-vae-ft-ema": "stabilityai/sd-vae-ft-ema",
    "sd-vae-ft-mse": "stabilityai/sd-vae-ft-mse",
    "sdxl": "stabilityai/sdxl-vae",
}
FILES_ON_THE_HUB = ("config.json", "diffusion_pytorch_model.safetensors")
ON_THE_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+")
# 8 images of 256x256 at a time: fixed, so that results do not depend on free memory (benchmarks/RESULTS.md).
PIXELS_AT_ONCE = 8 * 256 * 256
LOADING_ERRORS = (OSError, ValueError, KeyError, RuntimeError)
MAX_CONFIG_BYTES, MAX_BLOCKS = 2**16, 32  # of an untrusted autoencoder


class IdentityEncoder:
    """The encoder of pixels: latents are the pixels in [-1, 1].

    The attributes `name`, `weights_hash`, `kind`, `scale`, `shift` and `std` of an encoder have the same
    meaning as in the manifest. `factor` is the side of an image divided by the side of its latents.
    `latent_channels` is None if the latents have as many channels as the image. `resolution` is the only side
    of images that it takes, None: any multiple of `factor`.
    """

    name, weights_hash, kind, factor, latent_channels = IDENTITY, None, "samples", 1, None
    resolution = None
    scale, shift = 1.0, 0.0
    std = 0.5  # [EDM]: pixels of photographs in [-1, 1] have a standard deviation of about 0.5

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (N, C, H, W) uint8 to latents (N, C, H, W) in [-1, 1]."""
        return images.float() / 127.5 - 1

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Map latents (N, C, H, W) to images (N, C, H, W), nominally in [-1, 1]."""
        return latents


class KLEncoder:
    """An autoencoder with a Gaussian posterior: diffusers' AutoencoderKL, in fp32 by default.

    Args:
        name: a folder saved by diffusers, a short name (PUBLISHED), or OWNER/NAME on the hub; safetensors
            only.
        bf16: run under bf16 autocast.
        official: PARITY with the public TREAD code: weights rounded to bf16, fp16 autocast.

    Raises:
        ValueError: the autoencoder does not exist or cannot be loaded.
    """

    kind, class_name = "moments", "AutoencoderKL"

    def __init__(self, name: str, device: torch.device, bf16: bool = False, official: bool = False):
        self.name = str(Path(name).resolve()) if Path(name).is_dir() else PUBLISHED.get(name, name)
        self.device, dtype = device, torch.float16 if official else torch.bfloat16
        self.autocast = partial(torch.autocast, device.type, dtype, enabled=bf16 or official)
        net = _load_autoencoder(name, self.name, self.class_name)
        self.net: Any = net.to(device, torch.float32).eval().requires_grad_(False)
        self.weights_hash = tensors_hash(self.net.state_dict())
        if official:
            for parameter in self.net.parameters():
                parameter.copy_(parameter.bfloat16())
        self.scale, self.shift, self.std = self._normalisation(name)
        self.factor, self.latent_channels, self.resolution = self._sizes()

    def _normalisation(self, name: str) -> tuple[Numbers, Numbers, float]:
        """Return scale, shift and the resulting standard deviation, as the autoencoder's config.json says.

        As in diffusers' pipelines: (z - shift_factor) * scaling_factor, of unit variance, or
        (z - latents_mean) / latents_std * scaling_factor.
        """
        config, file = self.net.config, f"encoder={name}: config.json"
        factor, shift = config["scaling_factor"], config["shift_factor"]
        means, stds = config["latents_mean"], config["latents_std"]
        if means is not None and shift:
            raise ValueError(f"{file} has latents_mean and shift_factor={shift}, must have only one of them")
        if (means is not None or shift) and "scaling_factor" in config.get("_use_default_values", ()):
            raise ValueError(f"{file} has a shift but no scaling_factor, must have both")
        try:  # the manifest checks the number of channels
            if means is stds is None:
                return float(factor), float(shift or 0.0), 1.0
            return tuple(factor / std for std in stds), tuple(map(float, means)), abs(float(factor))
        except (TypeError, ValueError, ZeroDivisionError) as error:
            rule = "must have lists of numbers in both latents_mean and latents_std, or in neither"
            raise ValueError(f"{file} {rule}: {error}") from error

    def _sizes(self) -> tuple[int, int, int | None]:
        """Return `factor`, `latent_channels` and `resolution`; see IdentityEncoder."""
        config = self.net.config
        return 2 ** (len(config.block_out_channels) - 1), config.latent_channels, None

    def _encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Map pixels in [-1, 1] to stored latents."""
        posterior = self.net.encode(pixels).latent_dist
        return torch.cat([posterior.mean, posterior.logvar], dim=1)

    def _decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Map latents to pixels in [-1, 1]."""
        return self.net.decode(latents).sample

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (N, 3, H, W) uint8 to latents fp32 on the CPU: (N, C, H/factor, W/factor) for `samples`,
        mean and logvar (N, 2C, H/factor, W/factor) for `moments`.
        """
        return self._in_slices(lambda part: self._encode(part.float() / 127.5 - 1), images, 1)

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Map latents (N, C, H, W) to images (N, 3, factor H, factor W) fp32, nominally in [-1, 1]."""
        return self._in_slices(self._decode, latents, self.factor)

    @torch.no_grad()
    def _in_slices(self, call: Callable, batch: torch.Tensor, factor: int) -> torch.Tensor:
        pixels = batch.shape[-2:].numel() * factor**2
        with self.autocast():
            parts = batch.split(max(1, PIXELS_AT_ONCE // pixels))
            return torch.cat([call(part.to(self.device)).float().cpu() for part in parts])


class Flux2Encoder(KLEncoder):
    """FLUX.2's autoencoder: patches of 2x2, normalised by its batch norm, which diffusers' encode() omits."""

    class_name, PATCH = "AutoencoderKLFlux2", 2

    def _normalisation(self, name: str) -> tuple[Numbers, Numbers, float]:
        norm = self.net.bn
        stds = (norm.running_var.double() + norm.eps).sqrt()
        return tuple((1 / stds).tolist()), tuple(norm.running_mean.double().tolist()), 1.0

    def _sizes(self) -> tuple[int, int, int | None]:
        factor, channels, resolution = super()._sizes()
        return self.PATCH * factor, self.PATCH**2 * channels, resolution

    def _encode(self, pixels: torch.Tensor) -> torch.Tensor:
        mean, logvar = super()._encode(pixels).chunk(2, dim=1)
        return torch.cat([F.pixel_unshuffle(part, self.PATCH) for part in (mean, logvar)], dim=1)

    def _decode(self, latents: torch.Tensor) -> torch.Tensor:
        return super()._decode(F.pixel_shuffle(latents, self.PATCH))


class DCEncoder(KLEncoder):
    """DC-AE: a deterministic autoencoder of factor 32 or more."""

    kind, class_name = "samples", "AutoencoderDC"

    def _normalisation(self, name: str) -> tuple[Numbers, Numbers, float]:
        return float(self.net.config.scaling_factor), 0.0, 1.0

    def _sizes(self) -> tuple[int, int, int | None]:
        return self.net.spatial_compression_ratio, self.net.config.latent_channels, None

    def _encode(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.net.encode(pixels).latent


class RAEEncoder(KLEncoder):
    """A representation autoencoder: its latents are features, which it normalises itself. [RAE]"""

    kind, class_name = "samples", "AutoencoderRAE"

    def _normalisation(self, name: str) -> tuple[Numbers, Numbers, float]:
        return 1.0, 0.0, float(self.net.config.scaling_factor)

    def _sizes(self) -> tuple[int, int, int | None]:
        net = self.net
        return net.decoder_patch_size, net.config.encoder_hidden_size, net.decoder_image_size

    def _encode(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.net.encode((pixels + 1) / 2).latent

    def _decode(self, latents: torch.Tensor) -> torch.Tensor:
        return 2 * super()._decode(latents) - 1


Encoder = IdentityEncoder | KLEncoder
CLASSES = {kind.class_name: kind for kind in (KLEncoder, Flux2Encoder, DCEncoder, RAEEncoder)}


def is_local(name: str) -> bool:
    """True if an encoder is on this machine: identity, a folder, or in the cache of the hub."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if name == IDENTITY or Path(name).is_dir():
        return True
    name = PUBLISHED.get(name, name)
    try:
        return all(isinstance(try_to_load_from_cache(name, file), str) for file in FILES_ON_THE_HUB)
    except HFValidationError:  # not a valid name on the hub
        return False


def load_encoder(name: str, device: torch.device, bf16: bool = False, official: bool = False) -> Encoder:
    """Load an encoder by name, of the class in its config.json; download it if it is not on this machine."""
    if name == IDENTITY:
        return IdentityEncoder()
    if not is_local(name):
        _download(name)
    return CLASSES[_class_of(name)](name, device, bf16, official)


def encoder_for(
    manifest: LatentManifest,
    device: torch.device,
    encoder: str | None = None,
    allow_other: bool = False,
    official: bool = False,
) -> Encoder:
    """Load the encoder that made the latents of a manifest.

    Args:
        encoder: path or name; None: the manifest's.
        allow_other: accept an encoder that differs from the manifest's.
        official: see KLEncoder.
    """
    name = encoder or manifest.encoder
    loaded = load_encoder(name, device, official=official)
    # Converted latents have no hash of the weights: the user's encoder is accepted.
    other_kind = (loaded.name == IDENTITY) != (manifest.encoder == IDENTITY)
    other_weights = manifest.encoder_hash is not None and loaded.weights_hash != manifest.encoder_hash
    if (other_kind or other_weights) and not allow_other:
        origin = f"the latents were made by {manifest.encoder} with weights {manifest.encoder_hash}"
        raise ValueError(
            f"encoder={name} has weights {loaded.weights_hash}, {origin}: use the same encoder, or set "
            "allow_other_encoder=true (sample.py and fid.py)"
        )
    if loaded.latent_channels not in (None, manifest.in_channels):
        channels = f"{loaded.latent_channels} channels, the data have {manifest.in_channels}"
        raise ValueError(f"encoder={name} has latents of {channels}")
    return loaded


def tensors_hash(tensors: dict[str, torch.Tensor]) -> str:
    """Hash the values of tensors, independent of their names and their order."""
    arrays = (tensor.detach().cpu().float().contiguous().numpy() for tensor in tensors.values())
    digests = sorted(hashlib.sha256(array.tobytes()).hexdigest() for array in arrays)
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def to_uint8(images: torch.Tensor, official: bool = False) -> torch.Tensor:
    """Round pixels in [-1, 1] to bytes, as [EDM] and [DiT] do: add one half and truncate.

    Args:
        official: PARITY with the public TREAD code, which does not add one half: half a grey level darker.
    """
    return (127.5 * images + (127.5 if official else 128)).clamp(0, 255).to(torch.uint8)


def image_decoder(
    manifest: LatentManifest, encoder: Encoder, official: bool = False
) -> Callable[[torch.Tensor], np.ndarray]:
    """Return a function from a network's latents (N, C, H, W) to images (N, H, W, channels) uint8."""
    black, white = manifest.pixel_range

    def decode(latents: torch.Tensor) -> np.ndarray:
        pixels = encoder.decode(manifest.to_encoder(latents.float()))
        if manifest.pixel_range != (-1.0, 1.0):
            pixels = (pixels - black) * (2 / (white - black)) - 1
        return to_uint8(pixels, official).permute(0, 2, 3, 1).cpu().numpy()

    return decode


def real_images(
    dataset: LatentDataset, ids: np.ndarray, encoder: Encoder
) -> tuple[np.ndarray, np.ndarray | None]:
    """Decode entries of a data set: images (N, H, W, channels) uint8, and labels (N,) or None."""
    stored, labels = dataset.read(ids)
    images = image_decoder(dataset.manifest, encoder)(dataset.manifest.to_means(stored))
    return images, None if labels is None else labels.numpy()


def _download(request: str) -> None:
    """Download an autoencoder from the hub into the cache."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import logging

    name = PUBLISHED.get(request, request)
    if not ON_THE_HUB.fullmatch(name):
        choices = f"{', '.join([IDENTITY, *PUBLISHED])}, a folder with an autoencoder"
        raise ValueError(f"encoder={request} not found: must be one of {choices}, or OWNER/NAME on the hub")
    print(f"encoder    {name} is not in the cache: downloading it", flush=True)
    logging.set_verbosity(logging.CRITICAL)  # it would print each retry
    try:
        for file in FILES_ON_THE_HUB:
            hf_hub_download(name, file)
    except LOADING_ERRORS as error:
        line = str(error.__cause__ or error).strip().split("\n")[0]
        raise ValueError(
            f"encoder={request} is not in the cache and cannot be downloaded ({line}): run `hf "
            f"download {name} --local-dir FOLDER` on a machine with internet, then set encoder=FOLDER"
        ) from error


def _class_of(request: str) -> str:
    """Return the class of an autoencoder of diffusers; AutoencoderKL if its files cannot be read."""
    from diffusers import AutoencoderKL

    name = PUBLISHED.get(request, request)
    try:
        if Path(name).is_dir():
            config: Any = read_json(Path(name) / "config.json", MAX_CONFIG_BYTES)
        else:
            config = AutoencoderKL.load_config(name, local_files_only=True)
    except (*LOADING_ERRORS, TypeError):  # `_load_autoencoder` explains it
        return KLEncoder.class_name
    class_name = config.get("_class_name") if isinstance(config, dict) else None
    if class_name in (None, *CLASSES):
        return class_name or KLEncoder.class_name
    raise ValueError(f"encoder={request}: its class {class_name} must be one of {', '.join(CLASSES)}")


def _load_autoencoder(request: str, name: str, class_name: str) -> torch.nn.Module:
    import diffusers
    from diffusers.utils import logging

    logging.set_verbosity(logging.CRITICAL)  # errors are reported once, below
    logging.disable_progress_bar()
    kind = getattr(diffusers, class_name)
    load = partial(kind.from_pretrained, name, use_safetensors=True, output_loading_info=True)
    try:
        if Path(name).is_dir():
            _check_depth(read_json(Path(name) / "config.json", MAX_CONFIG_BYTES))
        net, info = load(local_files_only=True)
    except LOADING_ERRORS as error:
        line = str(error).strip().split("\n")[0]
        raise ValueError(f"encoder={request} is not an {class_name}: {line}") from error
    if missing := info["missing_keys"]:  # diffusers would initialize them at random
        raise ValueError(f"encoder={request} lacks {len(missing)} tensors, such as {min(missing)}")
    return net


def _check_depth(config: Any) -> None:
    """Raise for more than MAX_BLOCKS blocks: diffusers builds them before it reads the weights."""
    for key, value in config.items() if isinstance(config, dict) else ():
        if "layers" in key or "block_out_channels" in key:
            counts = [len(value), *(value if "layers" in key else ())] if isinstance(value, list) else [value]
            if count := next((n for n in counts if isinstance(n, int) and n > MAX_BLOCKS), None):
                raise ValueError(f"{key} of config.json has {count} blocks, must be at most {MAX_BLOCKS}")
