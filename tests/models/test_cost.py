import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models import DiT, cost_of
from routing import Route
from tests.networks import PAPER, small_batch, small_dit

SIZES = {"s": (384, 12, 6), "b": (768, 12, 12), "l": (1024, 24, 16), "xl": (1152, 28, 16)}
VARIANTS = [
    {},
    {"block": "modern"},
    {"block": "modern", "num_prefix_tokens": 3},
    {"learn_sigma": True, "mlp_ratio": 3.0},
    {"removal": False},
    {"gradient_checkpointing": True},
    {"num_classes": 0},
]


def counted(net, ratios, backward):
    """FLOPs that torch counts for two images, divided by two."""
    batch = small_batch(2, num_classes=net.num_classes)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        output = net(*batch, selection_ratio=ratios)
        if backward:
            output.sum().backward()
    assert counter.get_total_flops() % 2 == 0
    return counter.get_total_flops() // 2


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("routes", [(), (PAPER,), (Route(0.3, 0, 1), Route(0.7, 3, -1))])
def test_flops_are_those_that_torch_counts(variant, routes):
    net = small_dit(routes, **variant).train()
    cost = cost_of(net)
    dense = [0.0] * len(routes)
    assert counted(net, None, backward=False) == cost.routed_forward_flops
    assert counted(net, dense, backward=False) == cost.dense_forward_flops
    assert counted(net, None, backward=True) == cost.routed_training_flops
    assert counted(net, dense, backward=True) == cost.dense_training_flops
    assert cost.predicted_speedup == cost.dense_training_flops / cost.routed_training_flops
    assert cost.num_parameters == sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize(
    ("size", "dense", "routed"), [("s", 6.05, 4.20), ("b", 23.0, 16.1), ("l", 80.7, 48.2), ("xl", 118.6, 69.1)]
)
def test_known_costs_at_256_tokens(size, dense, routed):
    hidden_size, depth, num_heads = SIZES[size]
    with torch.device("meta"):
        net = DiT(32, 2, 4, hidden_size, depth, num_heads, routes=[PAPER])
    cost = cost_of(net)
    digits = 2 if size == "s" else 1
    assert round(cost.dense_forward_flops / 2e9, digits) == dense
    assert round(cost.routed_forward_flops / 2e9, digits) == routed


def test_masks_and_short_windows_lower_what_a_route_can_give():
    with torch.device("meta"):
        nets = {end: DiT(32, 2, 4, 384, 12, 6, routes=[Route(0.5, 2, end)]) for end in (4, 8)}
    long, short, masked = cost_of(nets[8]), cost_of(nets[4]), cost_of(nets[8], mask_coverage=0.6)
    assert 1 < short.predicted_speedup < long.predicted_speedup < long.ceiling
    assert short.ceiling < long.ceiling
    assert 1 < masked.predicted_speedup < long.predicted_speedup
    assert masked.predicted_speedup < masked.ceiling < long.ceiling
    assert cost_of(nets[8], mask_coverage=1.0).predicted_speedup == cost_of(nets[8], mask_coverage=1.0).ceiling == 1
    assert cost_of(nets[8], ratios=[0.0]).predicted_speedup == 1
    assert cost_of(nets[8], ratios=[0.75]).predicted_speedup > long.predicted_speedup
