"""Small networks for the tests."""

import torch

from models import DiT, blocks
from routing import Route

PAPER = Route(selection_ratio=0.5, start_layer_idx=2, end_layer_idx=-4)
# hidden_size, depth, num_heads of the paper's networks
SIZES = {"s": (384, 12, 6), "b": (768, 12, 12), "l": (1024, 24, 16), "xl": (1152, 28, 16)}
BLOCKS = {"dit": blocks.DiTBlock, "sprint": blocks.SprintBlock, "modern": blocks.ModernBlock}
BLOCKS |= {"lightning": blocks.LightningBlock, "mamba": blocks.MambaBlock, "rwkv": blocks.RWKVBlock}
BLOCKS |= {"self_logit": blocks.SelfLogitBlock}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


class Field(torch.nn.Module):
    """A network in float64 from a function of its input and the noise level (N, 1, 1, 1)."""

    def __init__(self, write):
        super().__init__()
        self.write, self.weight = write, torch.nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x, c_noise, class_labels, *, routing=None, generator=None):
        self.routing = routing
        return self.write(x, c_noise.view(-1, 1, 1, 1))


def small_dit(routes=(), num_classes=10, depth=8, block="dit", **arguments):
    """A DiT of 16 tokens whose zero-initialised weights are randomised, or every block were the identity."""
    torch.manual_seed(0)
    net = DiT(8, 2, 3, 32, depth, 4, num_classes=num_classes, routes=routes, block=BLOCKS[block], **arguments)
    with torch.no_grad():
        for parameter in net.parameters():
            if not parameter.any():
                parameter.normal_(std=0.2)
    return net


def small_batch(num_samples=4, num_classes=10, seed=0):
    """Latents, noise conditioning and labels for `small_dit`."""
    generator = seeded(seed)
    x = torch.randn(num_samples, 3, 8, 8, generator=generator)
    c_noise = torch.randn(num_samples, generator=generator)
    labels = torch.randint(num_classes, (num_samples,), generator=generator) if num_classes else None
    return x, c_noise, labels
