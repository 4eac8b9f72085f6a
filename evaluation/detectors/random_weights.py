"""Random weights for the Inception network, to try all commands without a download.

Scores with random weights mean nothing; their names say so.
"""

from pathlib import Path

import torch

from evaluation.detectors.inception import NUM_CLASSES, RANDOM_MARK
from runtime.files import atomic_write


def random_state() -> dict[str, torch.Tensor]:
    """Draw weights whose features neither vanish nor explode; names and shapes are torchvision's."""
    from torchvision.models import inception_v3

    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        network = inception_v3(weights=None, num_classes=NUM_CLASSES, aux_logits=False, init_weights=False)
    state = {}
    for name, tensor in network.state_dict().items():
        if name.endswith("num_batches_tracked"):
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim > 1:
            state[name] = noise * (2 / tensor[0].numel()) ** 0.5
        elif name.endswith(("bn.weight", "running_var")):
            state[name] = (1 + 0.1 * noise).abs()
        else:
            state[name] = 0.1 * noise
    return state


def write_random_weights(file: Path) -> Path:
    """Write random weights to a file, with a mark that says so."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(file) as partial:
        torch.save({**random_state(), RANDOM_MARK: torch.ones(1)}, partial)
    return file
