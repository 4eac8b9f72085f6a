"""An Inception network of random weights: the same graph as the published one, in 95 MB that nobody has to download."""

import torch
from torchvision.models import inception_v3

from evaluation.inception import NUM_CLASSES, InceptionDetector


def random_state():
    """Draw a state dict whose features neither vanish nor explode (torchvision's network has the same names and shapes)."""
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


def write_random_weights(file):
    torch.save(random_state(), file)
    return file


def random_detector(folder):
    return InceptionDetector(write_random_weights(folder / "random.pth"), allow_unpublished=True)
