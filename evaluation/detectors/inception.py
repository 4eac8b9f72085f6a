"""The Inception network of the ADM suite, with weights from a local file. [ADM]

The network is torch-fidelity's copy of the TensorFlow graph of 2015-12-05, with the graph's own resizing and
pooling. The weights are read from a state dict; nothing in the file is executed.

Shapes: N images.
"""

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn as nn

from evaluation.files import PUBLISHED, WEIGHTS_SHA256
from evaluation.precision import strict_fp32
from runtime.arrays import load_stored
from runtime.files import sha256

NUM_POOL_FEATURES, NUM_SPATIAL_FEATURES, NUM_CLASSES = 2048, 2023, 1008
NUM_SPATIAL_CHANNELS = 7
RANDOM_MARK, RANDOM_WEIGHTS = "drawn_at_random", "nothing: it is random"
EXPECTED = (
    f"Expected: {PUBLISHED['inception'].name} or pt_inception-2015-12-05-6726825d.pth (sha256 "
    f'{WEIGHTS_SHA256}); `python -m evaluation.fetch "files=[inception]"` downloads the first, `python -m '
    'evaluation.fetch "files=[random]"` writes random weights for a trial'
)


class InceptionDetector:
    """Inception features: pool (N, 2048), spatial (N, 2023), logits and probs (N, 1008), in strict fp32.

    Args:
        weights: file of the published state dict.
        allow_unpublished: also accept a state dict with another hash, if its tensors fit.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file does not have the published hash, or does not fit the network.
    """

    num_features: ClassVar = {
        "pool": NUM_POOL_FEATURES,
        "spatial": NUM_SPATIAL_FEATURES,
        "probs": NUM_CLASSES,
    }

    def __init__(
        self, weights: str | Path, device: torch.device | str = "cpu", allow_unpublished: bool = False
    ):
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

        file = Path(weights)
        state, self.record = read_weights(file, allow_unpublished)
        self.record["tensors_sha256"] = _tensors_sha256(state)
        # torch-fidelity unpickles its file: give it a copy of the tensors, which were read safely.
        buffer = io.BytesIO()
        torch.save(state, buffer)
        buffer.seek(0)
        try:
            network = FeatureExtractorInceptionV3("inception", ["2048"], buffer)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"weights={file} do not fit the network: {reason}. {EXPECTED}") from error
        self.device = torch.device(device)
        # Measured on a CPU: 1.5 times the images per second (benchmarks/RESULTS.md).
        layout = torch.channels_last if self.device.type == "cpu" else torch.contiguous_format
        self._network = network.to(self.device, memory_format=layout)
        self._class_weights = self._network.fc.weight.double().T  # (2048, 1008)
        self._network.Mixed_6d.branch1x1.register_forward_hook(self._keep_spatial)
        self(np.zeros((1, 8, 8, 3), np.uint8))  # damaged weights fail here, not after sampling

    def _keep_spatial(self, module: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        self._spatial = output  # (N, 192, 17, 17), after normalisation and ReLU

    @strict_fp32()
    @torch.inference_mode()
    def __call__(self, images: np.ndarray) -> dict[str, torch.Tensor]:
        """images (N, H, W, 3) uint8 -> features, all fp32.

        Raises:
            ValueError: the images have another type or shape, or the features are not finite.
        """
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
            raise ValueError(f"images are {images.dtype} {images.shape}, must be uint8 (N, H, W, 3)")
        x = torch.from_numpy(images).to(self.device).permute(0, 3, 1, 2)  # (N, 3, H, W)
        with torch.autocast(self.device.type, enabled=False):
            (pool,) = self._network(x)
        # PARITY: the first 7 channels, flattened in the graph's order: rows, columns, channels.
        spatial = self._spatial[:, :NUM_SPATIAL_CHANNELS].permute(0, 2, 3, 1).flatten(1)  # (N, 17 * 17 * 7)
        # PARITY: no bias. In fp64, which no TF32 setting changes.
        logits = (pool.double() @ self._class_weights).float()
        if not (pool.isfinite().all() and logits.isfinite().all()):
            raise ValueError("the Inception features are not finite: the weights are damaged")
        return {"pool": pool, "spatial": spatial, "logits": logits, "probs": logits.softmax(dim=1)}


def read_weights(
    file: Path, allow_unpublished: bool = False
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Read a file of weights; return its state dict and a record of its path, its hash and what was checked.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file does not have the published hash, or cannot be read.
    """
    if not file.is_file():
        raise FileNotFoundError(f"weights={file} not found. {EXPECTED}")
    record = {"path": str(file), "sha256": sha256(file)}
    is_published = record["sha256"] == WEIGHTS_SHA256
    if not (is_published or allow_unpublished):
        rule = "allow_unpublished_weights=true accepts it; its scores cannot be compared with published ones"
        sha = f"its sha256 is {record['sha256']}, not the published one"
        raise ValueError(f"weights={file}: {sha} ({rule}). {EXPECTED}")
    try:
        state = _read_state_dict(file)
    except ValueError as error:
        raise ValueError(f"weights={file}: {error}. {EXPECTED}") from error
    if state.pop(RANDOM_MARK, None) is not None:
        return state, {**record, "checked": RANDOM_WEIGHTS}
    return state, {**record, "checked": "sha256" if is_published else "names and shapes"}


def _read_state_dict(file: Path) -> dict[str, torch.Tensor]:
    state = load_stored(file)
    if not isinstance(state, Mapping):
        raise ValueError(f"the content must be a state dict, not a {type(state).__name__}")
    for name, tensor in state.items():
        is_plain = isinstance(name, str) and isinstance(tensor, torch.Tensor)
        is_plain = is_plain and tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not is_plain or tensor.is_quantized:
            raise ValueError(f"the content must be a state dict: {name!r} is not a plain tensor")
        if tensor.nbytes > file.stat().st_size:
            raise ValueError(f"{name} declares {tensor.nbytes} bytes, more than the file holds")
    return dict(state)


def _tensors_sha256(state: dict[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(name for name in state if not name.endswith("num_batches_tracked")):
        digest.update(name.encode())
        digest.update(state[name].float().contiguous().numpy().tobytes())
    return digest.hexdigest()
