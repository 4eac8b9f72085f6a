"""Features of image patches by a pretrained transformer, as targets of alignment. [REPA]

Shapes: N images, R their side, T = (R / 16)^2 patches, F numbers per patch.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from runtime.files import sha256
from runtime.timm_networks import load_timm

# Short names of transformers of timm.
ENCODERS = {"dinov2_b": "vit_base_patch14_dinov2.lvd142m"}
PATCH = 16  # pixels of an image per token, as an autoencoder of factor 8 and patches of 2


class PatchEncoder:
    """The last tokens of a vision transformer, one for each patch of 16x16 pixels.

    As in [REPA], bytes are normalised with the mean and standard deviation of ImageNet, and then resized
    (bicubic, without antialiasing), so that the transformer's patches form the same grid.

    Args:
        name: short name (ENCODERS) or name of a vision transformer of timm.
        weights: its safetensors file.

    Raises:
        ValueError: `name` is not a vision transformer of timm, or the file does not have its weights.
        FileNotFoundError: the file does not exist.
    """

    def __init__(self, name: str, weights: str | None, device: torch.device):
        import timm

        self.name, self.device = ENCODERS.get(name, name), device
        if not timm.is_model(self.name.partition(".")[0]) or not self.name.startswith("vit_"):
            rule = f"must be one of {', '.join(ENCODERS)}, or a vit_ model of timm"
            raise ValueError(f"feature encoder {name} {rule}")
        if weights is None or not Path(weights).is_file():
            source = f"https://huggingface.co/timm/{self.name}: model.safetensors"
            raise FileNotFoundError(f"the weights of {name}, {weights}, not found ({source})")
        self.weights_hash = sha256(Path(weights))
        options = {"num_classes": 0, "dynamic_img_size": True}
        self.net = load_timm(self.name, Path(weights), options).to(device).requires_grad_(False)
        self.num_features = self.net.num_features
        mean, std = (torch.tensor(x, device=device) for x in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD))
        self.mean, self.std = mean.view(3, 1, 1), std.view(3, 1, 1)

    def shape(self, resolution: int) -> tuple[int, int]:
        """Return (T, F) for images of side R."""
        if resolution % PATCH:
            raise ValueError(f"resolution={resolution} must be a multiple of {PATCH} for features")
        return (resolution // PATCH) ** 2, self.num_features

    @torch.no_grad()
    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Return features (N, T, F) in fp32 on the device, for images (N, 3, R, R) uint8."""
        x = (images.to(self.device).float() / 255 - self.mean) / self.std
        side = x.shape[-1] // PATCH * self.net.patch_embed.patch_size[0]
        x = F.interpolate(x, (side, side), mode="bicubic")
        with torch.autocast(self.device.type, enabled=False):
            return self.net.forward_features(x)[:, self.net.num_prefix_tokens :]
