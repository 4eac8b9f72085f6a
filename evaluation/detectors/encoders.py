"""Encoders of timm as detectors, each with the preprocessing of the scores that use it.

DEVIATION: features are computed in fp32; the authors of FDr use bf16. timm resizes the position embeddings of
DINOv2 with antialiasing, the authors of FDD do not.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from evaluation.precision import strict_fp32
from runtime.errors import check_choice
from runtime.files import sha256
from runtime.timm_networks import load_timm


@dataclass(frozen=True)
class Encoder:
    """A network of timm and its preprocessing.

    Args:
        model: name in timm.
        size: side of the images that the network takes.
        resize: `pil` (bytes), or `antialias` or `plain` (floats); all bicubic.
        layer: `pooled` (timm's features: the class token or attention pooling after the last norm),
            `projected` (with the last linear layer) or `mean` (over positions, without the last norm).
        num_features: number of features.
    """

    model: str
    size: int
    resize: str = "antialias"
    layer: str = "pooled"
    num_features: int = 1024

    @property
    def weights(self) -> str:
        """Name of its weights on the hub of timm."""
        return self.model.replace("_quickgelu", "")


DINOV2 = "vit_large_patch14_dinov2.lvd142m"
ENCODERS = {
    "dinov2_224": Encoder(DINOV2, 224, "pil"),
    "dinov2_256": Encoder(DINOV2, 256),
    "convnext": Encoder("convnextv2_base.fcmae_ft_in22k_in1k", 224, layer="mean"),
    "mae": Encoder("vit_large_patch16_224.mae", 224),
    "siglip": Encoder("vit_so400m_patch16_siglip_256.v2_webli", 224, num_features=1152),
    "clip_256": Encoder("vit_large_patch14_clip_224.openai", 256),
    # CLIP's own activation; the authors of FDr use timm's.
    "clip_336": Encoder("vit_large_patch14_clip_quickgelu_336.openai", 336, "plain", "projected", 768),
}


class EncoderDetector:
    """The features of one encoder, in strict fp32.

    Args:
        name: of the encoder; also the name of its features.
        folder: folder of the weights, NAME.safetensors each.

    Raises:
        FileNotFoundError: the weights are missing.
        ValueError: they do not fit the network, or the name is unknown.
    """

    def __init__(self, name: str, folder: str | Path, device: torch.device | str = "cpu"):
        check_choice("evaluation.encoders", name, ENCODERS)
        self.name, self.encoder, self.device = name, ENCODERS[name], torch.device(device)
        self.num_features = {name: self.encoder.num_features}
        file = Path(folder) / f"{self.encoder.weights}.safetensors"
        if not file.is_file():
            hint = f'`python -m evaluation.fetch "files=[{name}]"` downloads it'
            raise FileNotFoundError(f"{file}, the weights of {name}, not found; {hint}")
        # Images of any size: position embeddings are resized, images padded to whole patches.
        options: dict[str, Any] = {}
        if "vit" in self.encoder.model:
            options |= {"dynamic_img_size": True, "dynamic_img_pad": True}
        if self.encoder.layer != "projected":
            options["num_classes"] = 0
        self._network: Any = load_timm(self.encoder.model, file, options).to(self.device)
        cfg = self._network.pretrained_cfg
        self._mean, self._std = (torch.tensor(cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
        self.record = {"path": str(file), "sha256": sha256(file), **asdict(self.encoder)}
        self.record |= {library: version(library) for library in ("timm", "pillow")}

    @strict_fp32()
    @torch.inference_mode()
    def __call__(self, images: np.ndarray) -> dict[str, torch.Tensor]:
        """images (N, H, W, 3) uint8 -> features (N, F) fp32.

        Raises:
            ValueError: the features are not finite.
        """
        x = (resize(images, self.encoder.size, self.encoder.resize) - self._mean) / self._std
        with torch.autocast(self.device.type, enabled=False):
            x = x.to(self.device)
            if self.encoder.layer == "mean":
                features = self._network.forward_features(x).mean(dim=(2, 3))
            else:
                features = self._network(x)
        if not features.isfinite().all():
            raise ValueError(f"the features of {self.name} are not finite: the weights are damaged")
        return {self.name: features}


def resize(images: np.ndarray, size: int, mode: str) -> torch.Tensor:
    """images (N, H, W, 3) uint8 -> (N, 3, size, size) in about [0, 1]; for `mode`, see Encoder."""
    if mode == "pil":
        from PIL import Image

        bicubic = (Image.fromarray(image).resize((size, size), Image.Resampling.BICUBIC) for image in images)
        images = np.stack([np.asarray(image) for image in bicubic])
    x = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
    if mode == "pil":
        return x
    return F.interpolate(x, (size, size), mode="bicubic", antialias=mode == "antialias")


class Detectors:
    """Several detectors as one, so that each image is read once.

    Args:
        first: a detector; the records of the others are added to its record, under `encoders`.
    """

    def __init__(self, first: Any, others: Mapping[str, EncoderDetector]):
        self._parts, self.device = (first, *others.values()), first.device
        self.num_features = {k: n for part in self._parts for k, n in part.num_features.items()}
        self.record = first.record | {"encoders": {name: part.record for name, part in others.items()}}

    def __call__(self, images: np.ndarray) -> dict[str, torch.Tensor]:
        """images (N, H, W, 3) uint8 -> the features of all parts."""
        return {name: x for part in self._parts for name, x in part(images).items()}
