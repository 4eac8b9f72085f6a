"""Published files that scores need, with their addresses and hashes."""

from dataclasses import dataclass
from pathlib import Path

from evaluation.detectors.encoders import ENCODERS
from runtime.files import files_in, hash_files, sha256

# The state dict of the Inception network is published twice, under two names, with the same bytes.
WEIGHTS_SHA256 = "6726825d0af5f729cebd5821db510b11b1cfad8faad88a03f1befd49fb9129b2"
BATCHES = "https://openaipublic.blob.core.windows.net/diffusion/jul-2021/ref_batches"


@dataclass(frozen=True)
class PublishedFile:
    """A file published by others.

    Args:
        sha256: None: not published; the file is an .npz or .safetensors.
        saved_as: name of the local file; None: the last part of the address.
    """

    url: str
    description: str
    sha256: str | None = None
    saved_as: str | None = None

    @property
    def name(self) -> str:
        return self.saved_as or self.url.rpartition("/")[2]


PUBLISHED = {
    "inception": PublishedFile(
        "https://github.com/toshas/torch-fidelity/releases/download/v0.2.0/weights-inception-2015-12-05-6726825d.pth",
        "weights of the Inception network, 91 MiB",
        WEIGHTS_SHA256,
    ),
    "imagenet256": PublishedFile(
        f"{BATCHES}/imagenet/256/VIRTUAL_imagenet256_labeled.npz",
        "ADM reference batch of ImageNet 256x256, 1.9 GiB",
    ),
    "imagenet512": PublishedFile(
        f"{BATCHES}/imagenet/512/VIRTUAL_imagenet512.npz",
        "ADM reference batch of ImageNet 512x512, 7.4 GiB",
    ),
    "golden256": PublishedFile(
        f"{BATCHES}/imagenet/256/admnet_guided_upsampled_imagenet256.npz",
        "50,000 samples of ADM-G and ADM-U whose scores are published, 9.2 GiB",
    ),
}
PUBLISHED |= {
    name: PublishedFile(
        f"https://huggingface.co/timm/{encoder.weights}/resolve/main/model.safetensors",
        f"weights of {encoder.weights}, for suite=all",
        saved_as=f"{encoder.weights}.safetensors",
    )
    for name, encoder in ENCODERS.items()
}


def fingerprint(path: Path) -> str:
    """Hash a file, or the names and contents of all files in a folder; follow links."""
    if path.is_file():
        return sha256(path)
    return hash_files(path, (name for name in files_in(path) if (path / name).is_file()))
